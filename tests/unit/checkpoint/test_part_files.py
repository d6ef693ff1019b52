"""Tensors that ranks have written in parts: any rows come back, and no damaged bytes do."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.checkpoint.read import open_checkpoint
from motley.checkpoint.store import Checkpoints
from motley.checkpoint.tensor_files import Parts, part_names, wait_for_parts, write_part
from motley.errors import MotleyError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def write(folder: Path, ranks: int, whole: dict[str, torch.Tensor]) -> Parts:
    """As ranks do: cut along the first dimension."""
    indexes = []
    for rank in range(ranks):
        own = {}
        for name, tensor in whole.items():
            rows = -(-len(tensor) // ranks) if tensor.dim() else 0
            if tensor.dim():
                own[name] = tensor[rank * rows : (rank + 1) * rows]
            elif rank == 0:
                own[name] = tensor
        write_part(folder, rank, own)
        indexes.append(json.loads((folder / part_names(rank)[1]).read_text()))
    return Parts(folder, indexes, lambda path: contextlib.nullcontext())


@given(
    st.integers(1, 6), st.integers(1, 6),
    st.dictionaries(st.text("ab.", min_size=1, max_size=3), st.integers(0, 13), max_size=4),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_ranks_read_what_any_ranks_wrote(
    ranks: int, others: int, rows: dict[str, int], dtype: torch.dtype
) -> None:
    dice = torch.Generator().manual_seed(1)
    whole: dict[str, Any] = {
        name: torch.randint(2, (count, 3), generator=dice).to(dtype)
        for name, count in rows.items()
    }  # fmt: skip
    whole["step"] = torch.tensor(7.0)
    with tempfile.TemporaryDirectory() as folder:
        parts = write(Path(folder), ranks, whole)
        assert parts.shapes() == {name: tuple(tensor.shape) for name, tensor in whole.items()}
        assert parts.check() == sum(tensor.nbytes for tensor in whole.values())
        for name, tensor in whole.items():
            assert torch.equal(parts.load(name), tensor)
            if tensor.dim():
                each = -(-len(tensor) // others)
                got = [parts.rows(name, n * each, min(len(tensor), (n + 1) * each))
                       for n in range(others)]  # fmt: skip
                assert torch.equal(torch.cat(got), tensor)


@given(st.integers(0, 10**6))
def test_a_flipped_bit_is_met_wherever_it_is(place: int) -> None:
    whole = {"a": torch.arange(40.0).reshape(10, 4), "b": torch.ones(3, 2, dtype=torch.bool)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 2, whole)
        indexes = [json.loads((Path(folder) / part_names(rank)[1]).read_text()) for rank in (0, 1)]
        file = Path(folder) / part_names(place % 2)[0]
        content = bytearray(file.read_bytes())
        content[place // 2 % len(content)] ^= 1 << place % 8
        file.write_bytes(content)
        with pytest.raises(ValueError, match="has changed since it was written"):
            Parts(Path(folder), indexes, lambda path: contextlib.nullcontext()).check()


def test_a_checkpoint_of_parts_is_there_when_all_have_written(tmp_path: Path) -> None:
    first, second = (Checkpoints(tmp_path, keep=1) for _ in range(2))
    for step in (1, 2):
        folder = first.begin_parts(step)
        first.save_parts_behind(folder, 2, {"model.a": torch.zeros(2)}, {"step": step})
        assert f"step_{step:08d}" not in {path.name for path in first.list_folders()}
        second.save_part_behind(folder, 1, {"model.a": torch.ones(1)}, step)
        second.wait()
        first.wait()
    (path,) = first.list_folders()
    opened = open_checkpoint(path)
    assert opened.progress["step"] == 2 and opened.check() == 12
    assert opened.read()["model.a"].tolist() == [0, 0, 1]
    assert opened.read(only=("optimizer",)) == {}


def test_a_rank_that_cannot_write_is_heard(tmp_path: Path) -> None:
    first, second = (Checkpoints(tmp_path, keep=1) for _ in range(2))
    folder = first.begin_parts(1)
    second.save_part_behind(folder, 1, {"model.a": torch.ones(1, dtype=torch.complex128)}, 1)
    first.save_parts_behind(folder, 2, {}, {"step": 1})
    with pytest.raises(MotleyError, match="complex128"):
        first.wait()
    assert not first.list_folders() and not folder.exists()


def test_parts_that_never_come_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.checkpoint.tensor_files._SILENT_S", 0.2)
    write_part(tmp_path, 0, {})
    with pytest.raises(MotleyError, match="ranks 1, 2 have not written their parts"):
        wait_for_parts(tmp_path, 3)

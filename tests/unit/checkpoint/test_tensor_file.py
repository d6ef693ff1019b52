"""What is written is what safetensors reads, to the bit, and what the hash is of."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from motley.checkpoint import tensor_files
from motley.checkpoint.tensor_files import write_tensors


def test_safetensors_reads_all_kinds_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE", 7)  # more than one of each
    whole = torch.randn(6, 4)
    tensors = {
        **{str(kind): torch.ones(3, 5).to(kind) for kind in tensor_files._NAMES},
        "a number": torch.tensor(2.5), "nothing": torch.zeros(0, 3), "odd": torch.ones(3) > 0,
        "turned": whole.T, "part": whole[1:3], "same": whole, "tied": whole, "Größe": whole,
    }  # fmt: skip
    file = tmp_path / "x.safetensors"
    said = write_tensors(file, tensors)
    content = file.read_bytes()
    assert said == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(
            tensor.contiguous().view(-1).view(torch.uint8)
        ), name  # fmt: skip
    with safe_open(file, "pt") as opened:  # which reads a tensor alone, at its own place
        assert opened.get_tensor("part").equal(whole[1:3])


def test_no_tensor_is_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {})
    assert load_file(tmp_path / "x") == {}


def test_what_the_format_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a\.b has the type torch.complex128"):
        write_tensors(tmp_path / "x", {"a.b": torch.zeros(1, dtype=torch.complex128)})


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/dev/full")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {"a": torch.ones(9)})

"""Checkpoints: whole or not at all."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from motley.checkpoint import Checkpoints, checkpoints_at, load_checkpoint, newest_whole
from motley.errors import MotleyError

TENSORS = {
    "model.head.weight": torch.arange(6.0).view(2, 3),
    "optimizer.head.weight.exp_avg": torch.ones(2, 3),
    "optimizer.head.weight.step": torch.tensor(3.0),
    "ranks.0.rng.cpu": torch.get_rng_state(),
}


def save(path: Path, *steps: int, keep: int = 9) -> list[Path]:
    checkpoints = Checkpoints(path, keep)
    return [checkpoints.save(TENSORS, {"step": step}) for step in steps]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3)
    tensors, progress = load_checkpoint(folder)
    assert progress == {"step": 3}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "latest").read_text() == "step_00000003\n"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "progress.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    older, newer = save(tmp_path, 3, 5)
    content = bytearray((newer / name).read_bytes())
    content[-3] ^= 1  # the last bytes are data: readable, and wrong
    if damage == "gone":
        (newer / name).unlink()
    else:
        (newer / name).write_bytes(content if damage == "flip" else content[:-7])
    found, _, progress, problems = newest_whole(checkpoints_at(tmp_path))
    assert (found, progress["step"]) == (older, 3)
    assert len(problems) == 1 and str(newer) in problems[0]


def test_none_whole_is_an_error_that_names_all(tmp_path: Path) -> None:
    for folder in save(tmp_path, 1, 2):
        (folder / "manifest.json").unlink()
    with pytest.raises(MotleyError, match=r"step_00000002.*step_00000001"):
        newest_whole(checkpoints_at(tmp_path))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert [path.name for path in checkpoints_at(tmp_path)] == ["step_00000004", "step_00000003"]


def test_a_resume_from_an_older_one_sets_the_later_ones_aside(tmp_path: Path) -> None:
    save(tmp_path, 60, 100, 120)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.set_aside_after(60)
    saved = checkpoints.save(TENSORS, {"step": 70})
    assert checkpoints_at(tmp_path) == [saved]
    load_checkpoint(tmp_path / "aside_step_00000120")


def test_a_later_one_never_costs_the_one_just_saved(tmp_path: Path) -> None:
    save(tmp_path, 120)
    (saved,) = save(tmp_path, 70, keep=1)
    assert saved in checkpoints_at(tmp_path)


def test_what_a_crash_left_half_written_is_swept_and_never_loaded(tmp_path: Path) -> None:
    (tmp_path / ".step_00000009.77").mkdir()
    save(tmp_path, 1)
    assert [path.name for path in checkpoints_at(tmp_path)] == ["step_00000001"]
    assert not list(tmp_path.glob(".step_*"))


def test_resume_paths(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = save(run / "checkpoints", 1, 2)
    for path in (run, run / "checkpoints", second):
        assert checkpoints_at(path) == [second, first]
    assert checkpoints_at(first) == [first]
    assert checkpoints_at(run / "checkpoints" / "step_00000007") == []
    assert checkpoints_at(tmp_path / "nothing") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk this small")
def test_a_full_disk_is_said_and_leaves_the_older_one(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", tmp_path], check=True)
    try:
        (older,) = save(tmp_path, 1)
        big = {**TENSORS, "model.body": torch.zeros(300_000)}
        with pytest.raises(MotleyError, match=r"takes 1 MiB and 0 MiB are free.*--logs DIR"):
            Checkpoints(tmp_path, 9).save(big, {"step": 2})
        assert checkpoints_at(tmp_path) == [older]
        assert not list(tmp_path.glob(".step_*"))
        load_checkpoint(older)
    finally:
        subprocess.run(["umount", tmp_path], check=True)

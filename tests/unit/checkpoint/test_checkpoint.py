"""Checkpoints: whole or not at all."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_of
from torch import Tensor

from motley.checkpoint.read import checkpoints_at, load_checkpoint, load_newest_intact
from motley.checkpoint.resume import find_state
from motley.checkpoint.store import Checkpoints
from motley.errors import MotleyError
from motley.plan.length import TrainState

TENSORS = {
    "model.head.weight": torch.arange(6.0).view(2, 3),
    "optimizer.head.weight.exp_avg": torch.ones(2, 3),
    "optimizer.head.weight.step": torch.tensor(3.0),
    "ranks.0.wire.error": torch.ones(7),
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


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "progress.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "endless", "pipe"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    older, newer = save(tmp_path, 3, 5)
    content = bytearray((newer / name).read_bytes())
    content[-3] ^= 1  # the last bytes are data: readable, and wrong
    if damage in ("gone", "pipe"):
        (newer / name).unlink()
    if damage == "pipe":  # whose reader waits for ever
        os.mkfifo(newer / name)
    elif damage == "endless":
        os.truncate(newer / name, 1 << 40)
    elif damage != "gone":
        (newer / name).write_bytes(content if damage == "flip" else content[:-7])
    found, _, progress, problems = load_newest_intact(checkpoints_at(tmp_path))
    assert (found, progress["step"]) == (older, 3)
    assert len(problems) == 1 and str(newer) in problems[0]


def test_the_best_one_stays_besides_the_newest(tmp_path: Path) -> None:
    checkpoints, best = Checkpoints(tmp_path, 1), tmp_path / "best"
    for step in range(1, 6):
        checkpoints.save_behind(TENSORS, {"step": step})
        if step in (2, 5):
            checkpoints.mark_best_behind(step)
        checkpoints.wait()
        expected = {step, 2} if step in (3, 4) else {step}
        assert {int(folder.name[-8:]) for folder in checkpoints.list_folders()} == expected
        assert best.is_symlink() == (step > 1)
    assert [folder.name for folder in checkpoints_at(best)] == ["step_00000005"]
    checkpoints.mark_best(None)
    assert not best.is_symlink() and checkpoints_at(best) == []


def vouch(folder: Path) -> None:
    """Write the manifest that fits the files."""
    files = [file for file in sorted(folder.iterdir()) if file.name != "manifest.json"]
    described = {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    }
    (folder / "manifest.json").write_text(json.dumps(described))


MANIFEST = {
    "empty": lambda whole: {},
    "a list": lambda whole: [],
    "a number": lambda whole: 7,
    "without a file": lambda whole: {k: v for k, v in whole.items() if k != "model.safetensors"},
    "with one more": lambda whole: {**whole, "../../else": {"bytes": 0, "sha256": ""}},
    "without hashes": lambda whole: {name: {"bytes": 1} for name in whole},
    "of lists": lambda whole: {name: [each] for name, each in whole.items()},
    "of nothing": lambda whole: dict.fromkeys(whole),
}  # fmt: skip


@pytest.mark.parametrize("change", MANIFEST.values(), ids=MANIFEST)
def test_a_manifest_vouches_for_each_file_or_for_none(
    tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    older, newer = save(tmp_path, 3, 5)
    content = bytearray((newer / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (newer / "model.safetensors").write_bytes(content)
    manifest = newer / "manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    found, tensors, _, (problem,) = load_newest_intact(checkpoints_at(tmp_path))
    assert found == older and torch.equal(
        tensors["model.head.weight"], TENSORS["model.head.weight"]
    )
    assert str(manifest) in problem or str(newer / "model.safetensors") in problem


HEADER_BOMB = (2**60).to_bytes(8, "little") + b"{}"
CUT_HEADER = safetensors_of({"head.weight": torch.ones(2, 3)})[:20]
NO_DTYPE = b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize("name, content", [
    ("model.safetensors", pickle.dumps({"head.weight": [0.0] * 6})),
    ("model.safetensors", b""),
    ("model.safetensors", HEADER_BOMB),
    ("model.safetensors", CUT_HEADER),
    ("model.safetensors", len(NO_DTYPE).to_bytes(8, "little") + NO_DTYPE + bytes(4)),
    ("ranks.safetensors", b"\xff" * 99),
    ("progress.json", b"[]"),
    ("progress.json", b"7"),
    ("progress.json", b"{}"),
    ("progress.json", b'{"step": "5"}'),
    ("progress.json", b'{"step": -5}'),
    ("progress.json", b'{"step": true}'),
    ("progress.json", b'{"step": 5, "config": []}'),
    ("progress.json", b'{"step": 5, "scale": 3}'),
    ("progress.json", b'{"step": 5, "optimizer": []}'),
    ("progress.json", b'{"step": 5, "ranks": 2.5}'),
    ("progress.json", b'{"step": 5, "epoch": null}'),
    ("progress.json", b"[" * 200_000),
    ("progress.json", b'{"step": 5, "\xff": 1}'),
    ("manifest.json", b"[" * 200_000),
    ("manifest.json", b'{"\xff": 1}'),
])  # fmt: skip
def test_garbage_under_a_right_name_is_damage(tmp_path: Path, name: str, content: bytes) -> None:
    """Even where the manifest vouches for it."""
    older, newer = save(tmp_path, 3, 5)
    (newer / name).write_bytes(content)
    if name != "manifest.json":
        vouch(newer)
    found, _, progress, (problem,) = load_newest_intact(checkpoints_at(tmp_path))
    assert (found, progress["step"]) == (older, 3)
    assert str(newer / name) in problem and "\n" not in problem


def test_what_a_reader_needs_and_a_checkpoint_lacks_is_damage(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3)
    with pytest.raises(MotleyError, match=r"progress.json.*no 'config'"):
        load_newest_intact([folder], needs=("config",))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nobody changes."""
    return save(tmp_path_factory.mktemp("whole"), 3)[0]


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        torch.equal(found[name], TENSORS[name]) for name in TENSORS
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_happens_to_its_bytes_it_is_whole_or_damaged(
    whole: Path, data: st.DataObject
) -> None:
    folder = whole.with_name("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    others = [b"", b"{}", b"[]", b"{", *(file.read_bytes() for file in sorted(folder.iterdir()))]
    for _ in range(data.draw(st.integers(1, 2))):
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(("flip", "cut", "replace", "insert", "other", "gone")))
        if kind == "gone" or not content:
            file.unlink()
            continue
        if kind == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:]
        elif kind == "other":
            content = bytearray(data.draw(st.sampled_from(others)))
        else:
            new = data.draw(st.binary(max_size=9))
            content[at : at + (len(new) if kind == "replace" else 0)] = new
        file.write_bytes(content)
    try:
        tensors, progress = load_checkpoint(folder)
    except MotleyError as error:
        assert str(folder) in str(error)
    else:
        assert same(tensors) and progress == {"step": 3}


def test_none_whole_is_an_error_that_names_all(tmp_path: Path) -> None:
    for folder in save(tmp_path, 1, 2):
        (folder / "manifest.json").unlink()
    with pytest.raises(MotleyError, match=r"step_00000002.*step_00000001"):
        load_newest_intact(checkpoints_at(tmp_path))


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


def test_only_what_is_named_as_ours_is_ours(tmp_path: Path) -> None:
    """Rotation neither deletes nor stumbles over what a user has put there; no resume takes it."""
    (first,) = save(tmp_path, 1)
    copied = shutil.copytree(first, tmp_path / "step_00000040-good")
    (tmp_path / "step_00000030.tar").write_text("theirs")
    (tmp_path / "step_00000020").symlink_to(shutil.copytree(first, tmp_path.parent / "elsewhere"))
    (tmp_path / "step_7").mkdir()
    (tmp_path / ".step_mine").mkdir()
    theirs = {"step_00000040-good", "step_00000030.tar", "step_00000020", "step_7", ".step_mine"}
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.set_aside_after(1)
    last = checkpoints.save(TENSORS, {"step": 41})
    assert checkpoints_at(tmp_path) == [last]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == theirs | {"step_00000041", "latest"}
    assert checkpoints_at(copied) == [copied], "but whoever names it means it"


def test_steps_past_eight_digits_are_the_newest(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 99_999_999, 100_000_000)
    assert checkpoints_at(tmp_path) == [newer, older]
    assert Checkpoints(tmp_path, 1).list_folders(99_999_999) == [older]


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
        with pytest.raises(MotleyError, match=r"takes 1 MiB, and 0 MiB are free.*--logs DIR"):
            Checkpoints(tmp_path, 9).save(big, {"step": 2})
        assert checkpoints_at(tmp_path) == [older]
        assert not list(tmp_path.glob(".step_*"))
        load_checkpoint(older)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_what_is_written_behind_is_whole_or_said_whoever_waits(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    for step in (1, 2, 3):
        checkpoints.save_behind(TENSORS, {"step": step})
    checkpoints.wait()
    checkpoints.check()
    assert [folder.name[-1] for folder in checkpoints.list_folders()] == ["3", "2"]
    assert load_checkpoint(checkpoints.list_folders()[0])[1]["step"] == 3
    (tmp_path / "file").touch()
    checkpoints.path = tmp_path / "file"
    checkpoints.save_behind(TENSORS, {"step": 4})
    for wait in (checkpoints.wait, checkpoints.wait, checkpoints.check):
        with pytest.raises(MotleyError, match="cannot save the checkpoint"):
            wait()


def test_where_a_run_goes_on_is_known_without_its_tensors(tmp_path: Path) -> None:
    assert find_state([]) == TrainState()
    checkpoints = Checkpoints(tmp_path, 9)
    told = {"epoch": 2, "ranks": 1, "scale": {}, "config": {}}
    for step in (10, 20):
        checkpoints.save({}, {**told, "step": step, "consumed": 3 * step})
    newest, before = checkpoints.list_folders()
    assert find_state([newest, before]) == TrainState(20, 2, 60)
    (newest / "progress.json").write_text("{")
    assert find_state([newest, before]) == TrainState(10, 2, 30)
    assert find_state([newest]) is None, "its reader says why"

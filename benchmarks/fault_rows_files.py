"""Rows of the fault matrix: checkpoints that are damaged, or written while a rank is killed."""

import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from fault_job import until
from fault_places import Place
from fault_row import Seen, row
from fault_story import BEGIN_S, Story

_BEFORE = "damaged, named; the one before is taken; losses equal"
_SAVE = ("--save-every", 10, "--keep", 3)
_SAVED: list[Path] = []  # a run of 30 steps with three checkpoints


def _saved(place: Place) -> Path:
    """A copy of it, in this place; made once."""
    if not _SAVED:
        job = place.start("saved", 1, "--max-steps", 30, *_SAVE)
        assert job.wait(BEGIN_S) == 0, job.output
        saved = place.folder.with_name("saved-run")
        shutil.copytree(place.logs / "saved", saved)
        _SAVED.append(saved)
    shutil.copytree(_SAVED[0], place.logs / "x")
    return place.logs / "x" / "checkpoints"


def _damaged(place: Place, seen: Seen, *says: str, do: Callable[[Path], object],
             code: int = 0) -> Story:  # fmt: skip
    """A finished run's checkpoints are changed, and the run goes on for ten steps."""
    do(_saved(place))
    story = Story(place, seen, 1, "--max-steps", 40, *_SAVE, "--resume", "auto")
    result = story.job.wait(BEGIN_S)
    seen.expect(result == code, f"exit status {result}")
    seen.said = [place.tidy(line.text) for line in story.job.said()]
    for word in says:
        lines = [line.text.strip() for line in story.job.lines if word in line.text]
        seen.line = place.tidy(lines[0]) if lines and not seen.line else seen.line
        seen.expect(bool(lines), f"nothing says {word!r}")
    seen.expect("Traceback" not in story.job.output, "a traceback")
    if code == 0:
        seen.expect(len(story.steps()) == 40, f"{len(story.steps())} of 40 steps")
        story.judge_losses()
        seen.next_launch = "goes on"
    story.judge_left()
    return story


def _newest(checkpoints: Path) -> Path:
    return checkpoints / "step_00000030"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


@row("a bit of the newest checkpoint is flipped", _BEFORE)
def checkpoint_flipped(place: Place, seen: Seen) -> None:
    _damaged(place, seen, "step_00000030", "model.safetensors",
             do=lambda c: _flip(_newest(c) / "model.safetensors"))  # fmt: skip


@row("the newest checkpoint is cut short", _BEFORE)
def checkpoint_cut(place: Place, seen: Seen) -> None:
    _damaged(place, seen, "step_00000030", "optimizer.safetensors",
             do=lambda c: _truncate(_newest(c) / "optimizer.safetensors", 0.5))  # fmt: skip


@row("a file of the newest checkpoint is emptied", _BEFORE)
def checkpoint_emptied(place: Place, seen: Seen) -> None:
    _damaged(place, seen, "step_00000030", "progress.json",
             do=lambda c: _truncate(_newest(c) / "progress.json", 0))  # fmt: skip


@row("the newest checkpoint lost its manifest", _BEFORE)
def checkpoint_without_manifest(place: Place, seen: Seen) -> None:
    _damaged(place, seen, "step_00000030", "manifest.json",
             do=lambda c: (_newest(c) / "manifest.json").unlink())  # fmt: skip


@row("the two newest checkpoints are damaged", "both named; the one before them is taken")
def checkpoints_two_damaged(place: Place, seen: Seen) -> None:
    def harm(checkpoints: Path) -> None:
        for step in (20, 30):
            _flip(checkpoints / f"step_{step:08d}" / "model.safetensors")

    _damaged(place, seen, "step_00000030", "step_00000020", do=harm)


@row("all checkpoints are damaged", "refused, all named, status not 0")
def checkpoints_all_damaged(place: Place, seen: Seen) -> None:
    def harm(checkpoints: Path) -> None:
        for folder in checkpoints.glob("step_*"):
            _flip(folder / "model.safetensors")

    _damaged(place, seen, "step_00000010", "step_00000030", do=harm, code=2)


@row("a manifest of {}, and a bit flipped", _BEFORE)
def manifest_empty(place: Place, seen: Seen) -> None:
    def harm(checkpoints: Path) -> None:
        (_newest(checkpoints) / "manifest.json").write_text("{}")
        _flip(_newest(checkpoints) / "model.safetensors")

    _damaged(place, seen, "step_00000030", do=harm)


@row("a list in progress.json, its hash right", _BEFORE)
def progress_a_list(place: Place, seen: Seen) -> None:
    _damaged(place, seen, "step_00000030",
             do=lambda c: _vouched(_newest(c) / "progress.json", b"[1, 2]\n"))  # fmt: skip


def _vouched(path: Path, data: bytes) -> None:
    """Write a file, and what the manifest says of it."""
    path.write_bytes(data)
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    size = {key: len(data) for key in content[path.name] if key in ("size", "bytes")}
    content[path.name] = {**content[path.name], **size, "sha256": sha256(data).hexdigest()}
    manifest.write_text(json.dumps(content))


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._path}",)


@row("a pickle in place of a checkpoint's tensors, its hash right",
     "damaged, nothing runs; the one before is taken", quick=True)  # fmt: skip
def checkpoint_pickle(place: Place, seen: Seen) -> None:
    ran = place.folder / "ran"
    data = pickle.dumps(_Bomb(ran))
    _damaged(place, seen, "step_00000030",
             do=lambda c: _vouched(_newest(c) / "model.safetensors", data))  # fmt: skip
    seen.expect(not ran.exists(), "the pickle was run")


@row("step_00000030.tar and step_00000040-good lie beside the checkpoints",
     "left alone, and never taken")  # fmt: skip
def names_like_checkpoints(place: Place, seen: Seen) -> None:
    def harm(checkpoints: Path) -> None:
        (checkpoints / "step_00000030.tar").write_text("mine")
        shutil.copytree(_newest(checkpoints), checkpoints / "step_00000040-good")

    story = _damaged(place, seen, do=harm)
    for name in ("step_00000030.tar", "step_00000040-good"):
        seen.expect((story.folder.checkpoints / name).exists(), f"{name} is gone")


@row("another run's run.json is empty, at --resume auto", "skipped, named")
def another_run_damaged(place: Place, seen: Seen) -> None:
    shutil.copytree(_saved(place).parent, place.logs / "other")
    (place.logs / "other" / "run.json").write_text("")
    job = place.start("", 1, "--logs", place.logs, "--max-steps", 3, "--resume", "auto",
                      "--shares", 1, "--eval-samples", 60, train=False)  # fmt: skip
    code = job.wait(BEGIN_S)
    seen.expect(code == 0, f"exit status {code}")
    lines = [line.text.strip() for line in job.lines if "other" in line.text]
    seen.line = place.tidy(lines[0]) if lines else ""
    seen.expect(bool(lines), "nothing names it")


@row("killed while a checkpoint is written, at 4 moments", "no finished step lost, losses equal",
     limit_s=400)  # fmt: skip
def killed_while_saving(place: Place, seen: Seen) -> None:
    choose, words = random.Random(7), ("--max-steps", 60, "--save-every", 2)
    lost = []
    for number in range(4):
        more = ("--resume", "auto") if number else ()
        story = Story(place, seen, 2, *words, *more)
        begun = len(story.steps())
        assert until(lambda: len(story.steps()) > begun + 3, BEGIN_S), "no steps"  # noqa: B023
        writing = story.folder.checkpoints
        until(lambda: any(writing.glob(".step_*")), 10)  # noqa: B023
        time.sleep(choose.uniform(0, 0.02))
        story.kill(choose.randrange(2)).end(20)
        lost.append(len(story.steps()))
    story.launch_again()
    seen.expect((seen.steps_lost or 0) <= 2, f"{seen.steps_lost} steps were lost")
    story.judge_left()


@row("SIGKILL to three ranks, at random steps, under keep_training.sh",
     "no finished step lost, losses equal")  # fmt: skip
def random_kills(place: Place, seen: Seen) -> None:
    choose = random.Random(11)
    story = Story(place, seen, 2, "--max-steps", 120, keep=True)
    for _ in range(3):
        target = len(story.steps()) + choose.randint(3, 15)
        for ready in (lambda: len(place.ranks()) == 2, lambda: len(story.steps()) >= target):  # noqa: B023
            assert until(ready, BEGIN_S), "it did not go on"
        old = {*place.ranks().values()}
        story.kill(choose.randrange(2), signal.SIGKILL)
        until(lambda: not old & {*place.ranks().values()}, 30)  # noqa: B023
    story.went_on(120, "rank . on", steps=120, next_s=60)

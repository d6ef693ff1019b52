"""Checkpoints of a user's own loop: their schedule, their contents, and the resumption."""

import atexit
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motley.checkpoint.read import find_first_intact, open_checkpoint
from motley.checkpoint.run import find_run
from motley.checkpoint.store import Checkpoints, make_progress, spread
from motley.config.option import Duration, steps_or_time
from motley.engines.named_state import snapshot
from motley.errors import MotleyError
from motley.library.lab_loader import LabLoader
from motley.library.loop_records import make_config
from motley.library.loop_state import Keep, LoopPosition, LoopState, put_together, take_apart
from motley.library.model_shards import discard
from motley.library.rank_loop import RankLoop
from motley.library.sample_order import RandomState
from motley.plan.length import TrainState
from motley.train.rescue import beside_training

SAVE_EVERY = "MOTLEY_SAVE_EVERY"  # variable with the time between checkpoints, as 10m
_KEEP = 2  # checkpoints that stay on the disk
_LOOP = "loop"  # entry of progress.json


class LoopCheckpoints:
    """The checkpoints of a loop, written and read by rank 0.

    Args:
        state: the objects of the loop whose state a checkpoint holds.
        folder: path of the folder ``checkpoints`` of the run.
    """

    def __init__(self, state: LoopState, folder: Path) -> None:
        self._state = state
        self._checkpoints = Checkpoints(folder, _KEEP)
        self._best = Checkpoints(folder.parent / "best", 1)

    def save(
        self,
        progress: Mapping[str, Any],
        position: Mapping[str, Any],
        best: bool,
        keep: Keep = snapshot,
    ) -> None:
        """Write a checkpoint while training continues.

        Args:
            progress: entries that every checkpoint has; see motley.checkpoint.store.
            position: position of the loop, as nested tensors and numbers.
            best: True: also write the checkpoint to the folder ``best``.
            keep: function that copies a tensor.
        """
        content, tensors = self._state.take(keep)
        content[_LOOP] = take_apart(position, f"ranks.{_LOOP}", tensors)
        whole = {**progress, _LOOP: content}
        self._checkpoints.save_behind(tensors, whole)
        if best:
            self._best.save_behind(tensors, whole)

    def wait(self) -> None:
        """Wait until all checkpoints have reached the disk."""
        self._checkpoints.wait()
        self._best.wait()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written."""
        self._checkpoints.check()

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of steps after ``step``, so that no run continues from them."""
        self._checkpoints.set_aside_after(step)


def read_loop(folders: list[Path]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Return the JSON and the tensors of the newest intact checkpoint, and notes for the user.

    Args:
        folders: folders of checkpoints, the newest first.

    Raises:
        MotleyError: no checkpoint is intact, or ``motley train`` has written it.
    """
    problems: list[str] = []
    folder, opened = find_first_intact(folders, lambda each: open_checkpoint(each, ()), problems)
    notes = [f"not used: {problem}" for problem in problems]
    if _LOOP not in opened.progress:
        raise MotleyError(
            f"{folder} is a checkpoint of motley train, and not of a loop of your own: continue it "
            "with motley train --resume, or load its model with motley export"
        )
    content = opened.progress[_LOOP]
    return content, opened.read(), [f"continuing from {folder}", *notes]


def get_position(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the position that :meth:`LoopCheckpoints.save` was given."""
    position: dict[str, Any] = put_together(content[_LOOP], tensors)
    return position


def get_objects(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of all objects in a checkpoint."""
    return {name: each for name, each in content.items() if name != _LOOP}


def cuda_state() -> list[Tensor]:
    """Return the state of the random generator of each GPU of this process."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def read_interval(text: str | None) -> float | None:
    """Return the seconds of a text such as 10m; None for an empty text or a number of steps."""
    every = steps_or_time(text) if text else None
    return every.seconds if isinstance(every, Duration) else None


class LoopSaver:
    """The writer and reader of the checkpoints of a user's own loop, on one rank.

    Args:
        loop: state of the training loop on this rank. None: this process trains alone.
        state: the objects of the loop whose state a checkpoint holds.
        position: the position of the loop.
        folder: folder of all runs, and name of this run's folder. If the name is None, the folder
            is named by the time of the start.
        device: device of this rank.

    Attributes:
        position: the position of the loop.
        loaders: the loaders of training data.
    """

    def __init__(
        self,
        loop: RankLoop | None,
        state: LoopState,
        position: LoopPosition,
        folder: tuple[str, str | None],
        device: torch.device,
    ) -> None:
        self._loop, self._state, self.position = loop, state, position
        self._folder, self._device = folder, device
        self.loaders: list[LabLoader] = []
        self._checkpoints: LoopCheckpoints | None = None
        self._saved, self._every_s = time.monotonic(), read_interval(os.environ.get(SAVE_EVERY))
        self._best: float | None = None
        self._run_path: Path | None = None  # folder of a continued run, alone
        self._random: tuple[RandomState, list[Tensor]] | None = (
            None  # state to restore in a process that is alone
        )
        if loop is not None:
            loop.pause, loop.after_step = self._pause, self._save_if_asked
            loop.rescue, loop.gate.wants_save = self._rescue, self._is_save_due

    @property
    def _is_first(self) -> bool:
        return self._loop is None or self._loop.rank == 0

    def save(self, best: bool = False) -> None:
        """Save a checkpoint; see ``Lab.save``."""
        loop = self._loop
        if loop is None or loop.gate.is_open:
            if self._is_first:
                self._save(best)
            elif self._state.shards:
                self._state.take(discard)

    def _save(self, best: bool = False, repeated: int = 0, keep: Keep = snapshot) -> None:
        """Write a checkpoint. One rank calls it.

        Args:
            best: True: also write the checkpoint to the folder ``best`` of the run.
            repeated: number of global batches that a continued run computes again.
            keep: function that copies a tensor.
        """
        loop, position = self._loop, self.position
        checkpoints = self._open_checkpoints()
        checkpoints.check()
        self._saved = time.monotonic()
        order = (loop.order.state if loop else None) or RandomState()
        generators = [each.get_state() for each in self._generators()]
        where = position.state_dict(order, generators)
        where["passes"] = [each.passes - position.in_pass for each in self.loaders]
        where["best"] = self._best
        where["step"], where["batch"] = where["step"] - repeated, where["batch"] - repeated
        if loop is None:
            where["random"], where["cuda"] = RandomState().state_dict(), cuda_state()
        scale = loop.scale.state_dict() if loop else {}
        at = TrainState(where["step"], where["epoch"], 0)
        progress = make_progress(at, 0, scale, make_config(*self._folder).as_json(), {})
        checkpoints.save(progress, where, best, keep)

    def _rescue(self) -> str:
        """Save the state of the last finished step, because a rank was lost and the job ends.

        The thread that watches the ranks calls it on rank 0. If rank 0 is lost, a rank that shares
        the disk of rank 0 calls it. The training thread is blocked in a collective meanwhile.

        Returns:
            A sentence for the user; empty if there was nothing to save.
        """
        loop = self._loop
        assert loop is not None
        repeated = loop.wait_until_blocked()
        step = self.position.step - (repeated or 0)
        if repeated is None or repeated > self.position.batch or not step:
            return ""
        with beside_training(self._device):
            # Not pinned: the GPU may have a collective to do that never ends.
            self._save(repeated=repeated, keep=partial(snapshot, pinned=False))
        self._open_checkpoints().wait()
        return f"saved as of step {step}"

    def _is_save_due(self) -> bool:
        """Return True if the interval of MOTLEY_SAVE_EVERY has passed since the last checkpoint."""
        return self._every_s is not None and time.monotonic() > self._saved + self._every_s

    def _save_if_asked(self) -> None:
        """Save a checkpoint if rank 0 requested one when the ranks summed the last gradients."""
        if self._loop is not None and self._loop.gate.numbers[0].saves:
            self.save()

    def _pause(self) -> str:
        """Save a checkpoint before the job pauses; return a message that names its step."""
        if self.position.step == 0:
            return ""
        self.save()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return f"saved as of step {self.position.step}"

    def _open_checkpoints(self) -> LoopCheckpoints:
        """Return the checkpoints of the run; rank 0 calls it."""
        if self._checkpoints is None:
            path = self._run_path
            if self._loop is not None:
                path = self._loop.records.run.folder.path
            elif path is None:
                path, _ = find_run(make_config(*self._folder))
            self._checkpoints = LoopCheckpoints(self._state, path / "checkpoints")
            atexit.register(self._checkpoints.wait)
        return self._checkpoints

    def save_best(self, metric: float, higher: bool) -> bool:
        """Save a checkpoint in the folder ``best`` if a metric is better; see ``Lab.best``."""
        if math.isnan(metric):
            return False
        if self._best is not None and not (metric > self._best if higher else metric < self._best):
            return False
        self._best = float(metric)
        self.save(best=True)
        return True

    def resume(self, path: str) -> bool:
        """Continue from a checkpoint, if there is one; see ``Lab.resume``."""
        content, tensors, notes = self._read(path)
        if content is None:
            return False
        if self._is_first:
            for note in notes:
                print(f"motley: {note}", flush=True)
        state = get_position(content, tensors)
        self._state.load(get_objects(content), tensors)
        order = self.position.load_state_dict(state)
        self._best = state["best"]
        for loader, passes in zip(self.loaders, state["passes"], strict=True):
            loader.passes = passes
        for generator, saved in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(saved.to(torch.uint8))
        if self._loop is not None:
            self._loop.order.state = order
        elif "random" in state:
            order.restore()
            self._random = RandomState.from_state_dict(state["random"]), state["cuda"]
            if not self.position.batch:
                self.restore_random_state()
        if self._is_first:
            self._open_checkpoints().set_aside_after(self.position.step)
        return True

    def _generators(self) -> list[torch.Generator]:
        """Return the ``torch.Generator`` objects of the user in all loaders of training data."""
        return [each for loader in self.loaders for each in loader.generators]

    def _read(self, path: str) -> tuple[dict[str, Any] | None, dict[str, Tensor], list[str]]:
        """Return the JSON, the tensors and the notes of a checkpoint.

        The JSON is None if there is no checkpoint.
        """
        loop = self._loop
        if loop is None:
            config = make_config(*self._folder, path)
            self._run_path, folders = find_run(config, explains=False)
            return read_loop(folders) if folders else (None, {}, [])
        folders = loop.records.resume(path)
        if not folders:
            return None, {}, []
        tensors: dict[str, Tensor] = {}

        def read() -> Any:
            nonlocal tensors
            content, tensors, notes = read_loop(folders)
            return content, notes

        content, notes = loop.session.world.from_first(read)
        return content, spread(tensors, self._device), notes

    def restore_random_state(self) -> None:
        """Restore the global random generators after a resume, in a process that trains alone."""
        if self._random is None:
            return
        state, cuda = self._random
        self._random = None
        state.restore()
        for number, each in enumerate(cuda):
            torch.cuda.set_rng_state(each.cpu(), number)

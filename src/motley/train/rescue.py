"""The state as of the last finished step, when a run ends since a rank has died: the others hold
all of it.

The training's thread is blocked then, in a collective that never ends, so the watching thread reads
the state. It is whole if the training's thread has changed nothing meanwhile, which counts what it
changes: odd while it does.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.transfer import progress_of
from motley.engines.named_state import on_cpu
from motley.engines.optimizer_state import State
from motley.faults import Phase
from motley.launch.watchdog import PROGRESS_TIMEOUT_S
from motley.launch.world import World
from motley.plan.length import TrainState
from motley.train.setup import Begun, Job

_WAIT_S = 3.0  # for the training's thread to finish a step that it has begun to take
_LOOK_S = 0.02  # between looks; longer than a GPU's step is under way unknown to the host


class Rescue:
    """What one rank can save of a job.

    Args:
        state: where training stands.
    """

    def __init__(self, job: Job, state: TrainState) -> None:
        self._job, self._state, self._version = job, state, 0

    def changing(self) -> None:
        """Parameters, or what belongs to them, begin to change."""
        self._version += 1 - self._version % 2

    def whole(self, state: TrainState) -> None:
        """They are as after ``state``'s last step."""
        self._state = state
        self._version += 2 - self._version % 2

    def save(self) -> str:
        """Write a checkpoint of the last finished step; from the watching thread.

        Returns:
            What was done, for people; empty where nothing was left to do.
        """
        job, deadline = self._job, time.monotonic() + _WAIT_S
        while True:
            version, state = self._version, self._state
            if state.step == 0 or self._is_saved(state.step):
                return ""
            if version % 2 == 0:
                found, scale = self._copy(), job.engine.scale.state_dict()
                time.sleep(_LOOK_S)
                if version == self._version:
                    break
            if time.monotonic() > deadline:
                return "the last step could not be saved: it was not finished in time"
            time.sleep(_LOOK_S)
        # Of no ranks: what each alone held, as its error feedback, is lost with it.
        progress = progress_of(state, 0, scale, job.saved_config, found.plain)
        job.checkpoints.save(found.tensors, progress)
        return f"saved as of step {state.step}"

    def _is_saved(self, step: int) -> bool:
        return any(folder.name.endswith(f"_{step:08d}") for folder in self._job.checkpoints.found())

    def _copy(self) -> State:
        with self._beside():
            return self._job.engine.whole_state(_copied)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """In a stream of its own: in the usual one the copy would wait for the lost rank too."""
        device = self._job.engine.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            yield


def _copied(tensor: Tensor) -> Tensor:
    return on_cpu(tensor).clone()


def arm_rescue(world: World, begun: Begun, shared: bool) -> Rescue:
    """Have a run that is worth checkpoints lose no finished step with a rank.

    Args:
        shared: all ranks see the disk that checkpoints are on.
    """
    job = begun.job
    rescue = Rescue(job, begun.state)
    if job.engine.rescuable and job.length.save_every != 0:
        job.engine.on_change = rescue.changing
        first = dist.get_rank() == 0
        if first or shared:
            world.supervisor.can_rescue(rescue.save, first)
    return rescue


def pause(world: World, job: Job, state: TrainState, save: Callable[[], bool]) -> None:
    """Save, all together, and end where all ranks have agreed to: a host leaves, or is taken back.

    Args:
        save: as of ``state``; False if all have gone back to a checkpoint. Then this returns.
    """
    said = ""
    if job.length.save_every == 0:
        said = "nothing is saved, for this task keeps no checkpoints"
    elif state.step > 0:
        if not save():
            return
        said = f"saved as of step {state.step}"
    world.supervisor.set_status(Phase.LEAVE, PROGRESS_TIMEOUT_S)
    world.supervisor.pause(said, first=dist.get_rank() == 0)

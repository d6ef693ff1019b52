"""Recovery of the state of the last finished step after a rank was lost.

Each surviving rank holds this whole state. The surviving ranks save the state, or continue from the
state without a restart.

After a loss the training thread is blocked in a collective that never ends, so the thread that
watches the ranks copies the state. The copy is consistent if the training thread changes nothing
meanwhile. The training thread therefore has a version counter, which is odd while a change is in
progress. In Local SGD the training thread is not blocked. The training thread then waits before its
next step until the copy is complete. The survivors repeat the unfinished step with the same
samples.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from motley.checkpoint.store import KeptState, make_progress
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.engines.named_state import snapshot
from motley.engines.protocol import Engine, LaunchedStep, Scope
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.world import World
from motley.measure.measured_plan import Planned
from motley.measure.process_group import ProcessGroup
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.membership.survivors import Survivors
from motley.plan.length import TrainState
from motley.plan.plan import Plan, make_plan
from motley.plan.speeds import SpeedTable
from motley.train.group_rebuild import GroupRebuild
from motley.train.setup import Job, StartedJob

_WAIT_S = 3.0  # limit for the training thread to finish its update
_LOOK_S = 0.02  # seconds between checks; a GPU's update is visible sooner


class Rescue:
    """The state of a job on one rank, which can be saved or copied after another rank is lost.

    Args:
        job: the objects of the training.
        state: position of the training.

    Attributes:
        possible: True if this rank holds the whole state, and the task saves checkpoints.
        kept: copy of the state that :meth:`keep` has made, with which the rank continues; None
            before :meth:`keep`.
    """

    def __init__(self, job: Job, state: TrainState) -> None:
        self._state, self._plan, self._version = state, job.plan, 0
        self._engine: Engine | None = job.engine
        self._launched: tuple[TrainState, LaunchedStep] | None = (
            None  # a launched step whose outcome is not read yet
        )
        self._settle: Callable[[], object] = lambda: (
            None
        )  # waits until the device has done the last step
        self._taking = threading.Lock()
        self._checkpoints, self._config = job.checkpoints, job.saved_config
        self.possible = job.engine.rescuable and job.length.save_every != 0
        self.kept: KeptState | None = None

    def launched(self, state: TrainState, step: LaunchedStep) -> None:
        """Record the position after a step that was launched on the device.

        The host reads the outcome of the step later, and then calls :meth:`mark_consistent`.
        """
        self._launched = state, step
        self.mark_unchanged()

    def changing(self) -> None:
        """Mark the beginning of a change of the parameters, optimizer or other training state."""
        self._version += 1 - self._version % 2

    def mark_consistent(
        self, state: TrainState, plan: Plan, settle: Callable[[], object] | None = None
    ) -> None:
        """Set the position after a finished step, and mark all state as consistent.

        Args:
            state: position after the step.
            plan: split of a full batch.
            settle: function that waits until the device has finished the step; None: keep the
                previous function.
        """
        self._state, self._plan, self._launched = state, plan, None
        self._settle = settle or self._settle
        self.mark_unchanged()
        with self._taking:
            pass

    def mark_unchanged(self) -> None:
        """Mark the end of a change that has left the state as it was before :meth:`changing`."""
        self._version += 2 - self._version % 2

    def save(self) -> str:
        """Write a checkpoint of the last finished step. The watching thread calls it.

        Returns:
            A message that names the saved step; empty if there was nothing to save.
        """
        with contextlib.suppress(MotleyError):  # an error of the previous checkpoint
            self._checkpoints.wait()
        launched = self._launched
        state = launched[0] if launched and self._was_taken() else self._state
        step = (self.kept.state if self.kept else state).step
        if step == 0 or self._is_saved(step):
            return ""
        saved = self.kept or self._take()
        # 0 ranks: state that each rank holds alone, such as error feedback, is not saved.
        progress = make_progress(
            saved.state, 0, saved.scale, self._config, saved.engine_state.plain
        )
        self._checkpoints.save(saved.engine_state.tensors | saved.estimated, progress)
        return f"saved as of step {saved.state.step}"

    def keep(self) -> None:
        """Copy the engine's state to :attr:`kept`, and release the engine.

        The watching thread calls this method.
        """
        if self.kept is None:
            self.kept = self._take()
            self._engine = None  # frees memory for the next engine

    def _take(self) -> KeptState:
        """Return a copy of the state after the last finished step.

        Raises:
            MotleyError: the training thread did not finish a change of the state in time.
        """
        deadline, engine = time.monotonic() + _WAIT_S, self._engine
        assert engine is not None
        with self._taking:
            while time.monotonic() < deadline:
                version, state, plan = self._version, self._state, self._plan
                launched, taken = self._launched, self._was_taken()
                if version % 2 == 0:
                    self._settle()  # the copy's stream waits for nothing
                    if launched and taken:
                        state = launched[0]
                        launched[1].wait()
                    with beside_training(engine.device):
                        # Not pinned: the GPU may have a collective to do that never ends.
                        keep = partial(snapshot, pinned=False)
                        result = engine.state(Scope.HELD, keep)
                        seen = engine.state(Scope.STATISTICS, keep).tensors
                        estimated = engine.state(Scope.BUFFERS, keep).tensors
                    scale = engine.scale.state_dict()
                    saved = KeptState(state, plan, result, scale, seen, estimated)
                    time.sleep(_LOOK_S)
                    if (version, taken) == (self._version, self._was_taken()):
                        return saved
                time.sleep(_LOOK_S)
        raise MotleyError("it was not finished in time")

    def _was_taken(self) -> bool | None:
        """Return True if the device has taken the launched step, and False if it has skipped it.

        None: the outcome is not known yet, or no step is launched.
        """
        launched = self._launched
        return launched[1].taken() if launched else None

    def _is_saved(self, step: int) -> bool:
        return any(
            folder.name.endswith(f"_{step:08d}") for folder in self._checkpoints.list_folders()
        )


@contextlib.contextmanager
def beside_training(device: torch.device) -> Iterator[None]:
    """Use a new CUDA stream in a ``with`` block, since the usual one waits for the lost rank."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def arm_rescue(world: World, begun: StartedJob, shared: bool) -> Rescue:
    """Prepare this rank to save the last finished step when another rank is lost.

    Args:
        world: the ranks.
        begun: the job and the position at which it continues.
        shared: True if all ranks see the disk with the checkpoints.
    """
    job = begun.job
    rescue = Rescue(job, begun.state)
    if rescue.possible:
        job.engine.on_change, job.engine.on_same = rescue.changing, rescue.mark_unchanged
        first = dist.get_rank() == 0
        if first or shared:
            world.supervisor.can_rescue(rescue.save, first)
    return rescue


def pause(world: World, job: Job, state: TrainState, save: Callable[[], bool]) -> None:
    """Save a checkpoint, and end the job after a whole step. All ranks call it.

    All ranks have agreed to end after this step, because a host leaves the job or returns to it.

    Args:
        world: the ranks.
        job: the objects of the training.
        state: position of the training.
        save: function that saves a checkpoint at ``state``. If the function returns False, all
            ranks have gone back to an earlier checkpoint, and the job does not end.
    """
    text = ""
    if job.length.save_every == 0:
        text = "nothing is saved, because this task keeps no checkpoints"
    elif state.step > 0:
        if not save():
            return
        job.checkpoints.wait()
        text = f"saved as of step {state.step}"
    world.supervisor.set_status(Phase.LEAVE, PROGRESS_TIMEOUT_S)
    world.supervisor.pause(text, first=dist.get_rank() == 0)


@dataclass(frozen=True)
class Continuation:
    """The process group, plan and state with which the survivors continue after a lost rank.

    Attributes:
        group: process group of the survivors, which this rank has joined.
        planned: the plan for the survivors.
        state: the state that this rank holds; None if the rank took no part in training.
    """

    group: ProcessGroup
    planned: Planned
    state: KeptState | None


class JobRebuild(GroupRebuild):
    """The steps by which the survivors of a lost rank continue a job of ``motley train``.

    Attributes:
        config: options of the run. An option with one value per rank has the survivors' values.
    """

    def __init__(self, world: World, config: Config) -> None:
        super().__init__(world)
        self.config = config
        self._speeds: tuple[SpeedTable, ...] = ()  # speed of each rank of the group
        self._places: list[int] = []  # place in the kept plan, for each rank of the group
        self._rescue: Rescue | None = None

    def ready(
        self, group: ProcessGroup, planned: Planned, rescue: Rescue | None, shared: bool
    ) -> None:
        """Declare that this rank can continue if another rank is lost. All ranks call it.

        Args:
            group: process group of the ranks that train.
            planned: the plan.
            rescue: the state to continue with; None: this rank takes no part in training.
            shared: True if all ranks see the disk that the run is recorded on.
        """
        without_first = self.can_lose_first(shared)
        if rescue is not None and not rescue.possible:
            return
        self._speeds, self._rescue = planned.speeds, rescue
        self._places = list(range(group.size))
        self.offer(group, rescue.keep if rescue else lambda: None, without_first)

    def go_on(self, survivors: Survivors) -> Continuation:
        """Make a process group of the surviving ranks. All of these ranks call this method.

        If another rank is lost meanwhile, the remaining ranks call this method again.
        """
        stay = self.leave_lost(survivors)
        self.config = config_for_survivors(self.config, stay)
        self._places = [self._places[at] for at in stay]
        self._speeds = tuple(self._speeds[at] for at in stay if self._speeds)
        saved = self._rescue.kept if self._rescue else None
        own = None if saved is None else (saved.state.step, saved.plan)
        received = [each for each in self.world.allgather(own) if each is not None]
        _, plan = max(received, key=lambda each: each[0])
        planned = Planned(plan_for_survivors(plan, self._places), self._speeds)
        return Continuation(self.join(), planned, saved)


def plan_for_survivors(plan: Plan, stay: list[int]) -> Plan:
    """Return a plan that splits the batch among the ranks ``stay`` in the ratio of their shares."""
    wire = replace(plan.wire, slow_rank=None) if len(stay) > 1 else EXACT
    shares = [plan.shares[rank] for rank in stay]
    sizes = [plan.max_micro_batch[rank] for rank in stay]
    return make_plan(
        plan.global_batch, shares if any(shares) else [1.0] * len(stay), sizes, wire, plan.buckets,
        plan.grain,
    )  # fmt: skip


def config_for_survivors(config: Config, stay: list[int]) -> Config:
    """Return the options, with values per rank reduced to those of the ranks ``stay``."""
    names = ("shares", "micro_batch", "precision")
    changes: dict[str, Any] = {
        name: value.only(stay) for name in names if (value := getattr(config, name)) is not None
    }
    return replace(config, **changes)

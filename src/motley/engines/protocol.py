"""What an engine is to the training loop.

An engine owns everything between a micro-batch and a changed parameter: forward,
backward, the wire, averaging, the loss scale, clipping, and the agreement of all ranks
on overflow. The loop owns data, plan, schedule, records and checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.average import ParameterAverage
from motley.engines.named_state import State
from motley.engines.step_timer import Clock, Laps
from motley.plan.plan import Plan
from motley.plan.precision import LossScale
from motley.plan.wire import EngineTraits
from motley.tasks.model import TaskModel


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    Attributes:
        loss_sum: summed loss of the global batch; None if only this rank's own part is known. Of
            Local SGD: the mean loss of the samples between the two averaging rounds before, times
            the number of samples of the global batch; None in the steps in between.
        grad_norm: of the unscaled gradient before clipping; None after an overflow.
        overflow: the gradient was not finite, nobody stepped; with local steps, not this rank.
        loss_scale: that this step's losses were multiplied by.
        ready_s: of each rank, seconds of data and compute until its own gradient was ready: they
            travel along, and cost no exchange of their own. Of the step *before* this one, and 0.0
            after a pause, unless all ranks compute on CPUs; empty if nobody told.
        weight: of all samples that ``loss_sum`` is of, as their tokens; None: one each.
        oom_ranks: ranks that ran out of memory, and what was found there. If there is one,
            nobody stepped, and the parameters and the loss scale are as before.
        retry: the loop must repeat this batch, if there are ``oom_ranks``; False for Local SGD,
            where only those ranks skipped a step, some steps ago.
        unsound: ranks whose own gradient was not finite before it was added up; empty where nobody
            can tell.
        losses: of each of this rank's samples, fp32 [n], detached.
        laps: where this rank's time went.
    """

    loss_sum: float | None
    grad_norm: float | None
    overflow: bool
    loss_scale: float
    ready_s: tuple[float, ...]
    weight: float | None = None
    oom_ranks: Mapping[int, str] = field(default_factory=dict)
    retry: bool = True
    unsound: tuple[int, ...] = ()
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    laps: Laps = field(default_factory=lambda: Laps([]))


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device was given, and whose outcome the host has not read yet.

    Attributes:
        read: waits for the outcome and returns it; called once.
        taken: returns without waiting True if the step was taken, False if it was skipped, None if
            some rank has not joined its exchange: then nothing has changed.
        wait: waits until the device has changed the parameters; called once ``taken`` is True.
    """

    read: Callable[[], StepResult]
    taken: Callable[[], bool | None] = lambda: None
    wait: Callable[[], object] = lambda: None


class Engine(Protocol):
    """The protocol between the loop and ``torch_dist/`` or ``deepspeed/``.

    Attributes:
        loss_weight: on each loss, besides the scale and 1/N: what undoes its own average.
        equal_micro_steps: every micro-batch communicates, so all ranks take equally many,
            and compute cannot be told from communication.
        replicated: each rank holds all parameters; else a part of them, and a pass through the
            model is one of all ranks.
        rescuable: each rank holds the whole state between two steps, and :meth:`whole_state` reads
            it without the others.
        diverges: ranks hold different parameters between two steps, until they are synchronised.
        on_change: called when what belongs to the state begins to change.
        on_same: called when it is as after the same step again; after :meth:`step` it is not.
        clock: where this rank's time went in the current step.
        optimizer: whose ``param_groups`` the schedule writes the learning rate to.
        device: where the parameters are.
    """

    loss_weight: int
    equal_micro_steps: bool
    replicated: bool
    rescuable: bool
    diverges: bool
    on_change: Callable[[], None]
    on_same: Callable[[], None]
    clock: Clock
    optimizer: torch.optim.Optimizer
    device: torch.device
    scale: LossScale

    @property
    def average(self) -> ParameterAverage | None:
        """Of the parameters, over steps; None where none is asked for."""

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """Forward and backward of one micro-batch, as a part of a batch of ``n_global``.

        Computes nothing once memory has ended in this step, but still joins the others.
        """

    def step(self) -> StepResult:
        """Finish the global batch: communicate, agree on overflow, clip, step."""

    @property
    def reads_late(self) -> bool:
        """The next step may be accumulated before this one's outcome is read; alike on all ranks.

        A host that reads each outcome at once has nothing queued for its GPU meanwhile, and each
        delay of the host from then on is one of the GPU."""

    def launch_step(self, late: bool) -> LaunchedStep:
        """Begin :meth:`step`, which reads at once.

        Args:
            late: the outcome is read after the next step's micro-batches were accumulated.
        """

    def drop_gradients(self) -> None:
        """Forget what was accumulated: the batch is done again. All ranks call it."""

    def sync_parameters(self) -> None:
        """Make the parameters the same on all ranks, where they are not after every step; all
        ranks call it, before an evaluation and before :meth:`state`."""

    def unite(self) -> None:
        """Where ranks diverge: have all of them go on from the mean of what they hold; all call
        it, when each has loaded what it had."""

    def averaged(self) -> AbstractContextManager[None]:
        """Have the model be :attr:`average` meanwhile; all ranks call it."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Sums of held-out samples; see motley.engines.base."""

    def state(self) -> State:
        """Everything that does not depend on the number of ranks; all ranks must call it.

        Returns:
            On rank 0, on the CPU: whole tensors, and what the optimizer keeps besides. Elsewhere
            it may be empty.
        """

    def whole_state(self, keep: Callable[[Tensor], Tensor]) -> State:
        """What :meth:`state` gives, of this rank alone.

        Args:
            keep: what to take of each tensor.
        """

    def load_state(self, state: State) -> None:
        """Continue from :meth:`state`, the same on all ranks."""

    def alike(self) -> State:
        """What all ranks should hold alike besides the scale, as this rank holds it, where it
        lies; of an engine that is ``whole``."""

    def load_alike(self, state: State) -> None:
        """Continue from another rank's :meth:`alike`."""

    def own_state(self) -> dict[str, Tensor]:
        """What this rank alone holds (error feedback of a wire mode), on the CPU."""

    def seen(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What this rank's batch norms have seen since :meth:`sync_parameters`; empty without any.

        Args:
            keep: what to take of each tensor.
        """

    def estimate_seen(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Estimate the batch norms' buffers, ``model.<name>``, on a rank that cannot reach the
        others. Its samples since :meth:`sync_parameters` stand for those of all ranks.

        Args:
            keep: what to take of each tensor.
        """

    def unite_seen(self, seen: dict[str, Tensor]) -> None:
        """Unite what those who are left have :meth:`seen`, now that another rank is lost; all of
        them call it, after :meth:`load_state`."""

    def load_own_state(self, state: dict[str, Tensor]) -> list[str]:
        """Continue from :meth:`own_state` of the same rank of as many ranks.

        Args:
            state: empty where there were more ranks, or fewer.

        Returns:
            What could not be continued, for the user.
        """

    def reconfigure(self, plan: Plan) -> None:
        """Take a new plan at a step boundary."""


@runtime_checkable
class HoldsParts(Protocol):
    """An engine whose ranks may save and load what they hold, each its own."""

    def part(self) -> State:
        """What this rank holds of :meth:`Engine.state`, on the CPU: tensors cut along their first
        dimension; those that are not, on rank 0 alone."""

    def rows_of(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """The rows that :meth:`load_part` takes of a whole tensor on this rank, from the first to
        before the second; None: all.

        Args:
            name: as in :meth:`Engine.state`.
        """

    def load_part(self, state: State) -> None:
        """Continue from :meth:`Engine.state`, of whose tensors each rank has its own rows."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is built on.

    Attributes:
        rank, size: in the process group.
        precisions: of each rank.
        scale: the shared loss scale; this rank's copy.
        plan: of the full batch.
    """

    config: Config
    rank: int
    size: int
    device: torch.device
    precisions: tuple[str, ...]
    scale: LossScale
    plan: Plan


class EngineFactory(Protocol):
    """An engine's class: it makes one, and says beforehand what it can."""

    @property
    def traits(self) -> EngineTraits:
        """Of its engines."""

    def __call__(self, model: TaskModel, context: EngineContext) -> Engine:
        """Set an engine on a model."""

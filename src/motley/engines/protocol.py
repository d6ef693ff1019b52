"""The interface between an engine and the training loop.

An engine owns everything between a micro-batch and a changed parameter: forward,
backward, the wire, averaging, the loss scale, clipping, and the agreement of all ranks
on overflow. The loop owns data, plan, schedule, records and checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.named_state import ParameterAverage, State, snapshot
from motley.engines.step_timer import Clock, Laps
from motley.plan.plan import Plan
from motley.plan.precision import LossScale
from motley.plan.wire import EngineTraits

if TYPE_CHECKING:
    from motley.tasks.model import TaskModel  # whose timm, 2 s, a reader of checkpoints never needs


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, known to all ranks.

    Attributes:
        loss_sum: summed loss of the global batch; None if only this rank's own part is known. In
            Local SGD: the mean loss of the samples between the two averaging rounds before, times
            the number of samples of the global batch; None in the steps in between.
        grad_norm: of the unscaled gradient before clipping; None after an overflow.
        overflow: the gradient was not finite and no rank stepped; in Local SGD, this rank did not.
        loss_scale: that this step's losses were multiplied by.
        ready_s: of each rank, seconds of data and compute until its own gradient was ready. They
            travel with the step's exchange and belong to the step *before* this one, 0.0 after a
            pause, unless all ranks compute on CPUs; empty where they are not exchanged.
        weight: of all samples that ``loss_sum`` is of, as their tokens; None: one each.
        oom_ranks: ranks that ran out of memory, and what was found there. If there is one,
            no rank stepped, and the parameters and the loss scale are as before.
        retry: the loop must repeat this batch, if there are ``oom_ranks``; False for Local SGD,
            where only those ranks skipped a step, some steps ago.
        unsound: ranks whose own gradient was not finite before the sum; empty where that is not
            known.
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


class Scope(Enum):
    """A part of the training state.

    Attributes:
        GLOBAL: everything that does not depend on the number of ranks: whole tensors on the CPU of
            rank 0, with the optimizer's other values. Empty on other ranks.
        HELD: the same, read on one rank without the others, of an engine that is ``rescuable``.
        REPLICATED: tensors that all ranks should hold alike, as this rank holds them, where they
            lie, without the loss scale.
        ROWS: this rank's rows of the tensors of GLOBAL, on the CPU, of an engine that
            :class:`HoldsParts`. Tensors that are not cut are on rank 0 alone.
        RANK: tensors that this rank alone has, as a wire mode's error feedback.
        STATISTICS: sums of this rank's batch norms since :meth:`Engine.sync_parameters`.
        BUFFERS: buffers of batch norms, ``model.<name>``, estimated on a rank that cannot reach the
            others from its own samples since :meth:`Engine.sync_parameters`.
    """

    GLOBAL = auto()
    HELD = auto()
    REPLICATED = auto()
    ROWS = auto()
    RANK = auto()
    STATISTICS = auto()
    BUFFERS = auto()


class Engine(Protocol):
    """The protocol between the loop and ``torch_dist/`` or ``deepspeed/``.

    Attributes:
        loss_weight: on each loss, besides the scale and 1/N, to undo the engine's own average.
        equal_micro_steps: every micro-batch communicates, so all ranks take equally many,
            and compute and communication are one time.
        replicated: each rank holds all parameters; else a part of them, and a pass through the
            model is one of all ranks.
        rescuable: each rank holds the whole state between two steps, and :attr:`Scope.HELD` reads
            it without the others.
        diverges: ranks hold different parameters between two steps, until they are synchronised.
        on_change: called when the state begins to change.
        on_same: called when the state is as after the same step again; :meth:`step` does not.
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
        """Average of the parameters over steps; None without ``--model-ema``."""

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """Compute forward and backward of one micro-batch, as a part of a batch of ``n_global``.

        Computes nothing once memory has ended in this step, but still joins the others.
        """

    def step(self) -> StepResult:
        """Finish the global batch: communicate, agree on overflow, clip, step."""

    @property
    def reads_late(self) -> bool:
        """The next step may be accumulated before this one's outcome is read; alike on all ranks.

        A host that reads each outcome at once has nothing queued for its GPU meanwhile, and each
        delay of the host from then on is one of the GPU.
        """

    def launch_step(self, late: bool) -> LaunchedStep:
        """Begin :meth:`step`, which reads at once.

        Args:
            late: the outcome is read after the next step's micro-batches were accumulated.
        """

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients: the batch is done again. All ranks call it."""

    def sync_parameters(self) -> None:
        """Make the parameters equal on all ranks, if they are not so after every step.

        All ranks call this method, before an evaluation and before :meth:`state`.
        """

    def unite(self) -> None:
        """Have all ranks go on from the mean of what they hold, where they diverge.

        All ranks call it, when each has loaded what it had.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Have the model be :attr:`average` meanwhile; all ranks call it."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the sums of held-out samples; see motley.engines.base."""

    def state(self, scope: Scope, keep: Callable[[Tensor], Tensor] = snapshot) -> State:
        """Return a part of the training state.

        Args:
            scope: the part. All ranks call it for GLOBAL and ROWS.
            keep: makes the returned tensor of each one, for HELD, STATISTICS and BUFFERS; default:
                a copy on the CPU.
        """

    def load_state(self, scope: Scope, state: State) -> list[str]:
        """Continue from :meth:`state` of the same scope; all ranks call it.

        Args:
            scope: GLOBAL, the same state on all ranks. REPLICATED, another rank's. ROWS, this
                rank's. RANK, the same rank's of as many ranks, else empty. STATISTICS, after
                GLOBAL: unites those of the surviving ranks.
            state: the saved state.

        Returns:
            Notes for the user on state that could not be continued.
        """

    def reconfigure(self, plan: Plan) -> None:
        """Take a new plan at a step boundary."""


@runtime_checkable
class HoldsParts(Protocol):
    """An engine whose ranks may save and load :attr:`Scope.ROWS`, each its own."""

    def get_rows(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the rows of a whole tensor that this rank loads; None: all.

        The rows go from the first number to before the second.

        Args:
            name: name of the tensor in the state.
            shape: shape of the whole tensor.
        """


@dataclass(frozen=True)
class EngineContext:
    """The surroundings of an engine.

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
        """Traits of the engines that this factory makes."""

    def __call__(self, model: "TaskModel", context: EngineContext) -> Engine:
        """Set an engine on a model."""

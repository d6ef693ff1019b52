"""The interface between an engine and the training loop.

An engine does everything between a micro-batch and a changed parameter: the forward and backward
pass, communication, averaging, the loss scale, clipping, and the agreement of all ranks on
overflow. The loop does data, plan, schedule, records and checkpoints.
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
    from motley.tasks.model import TaskModel  # imports timm in 2 s, needless to read checkpoints


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, known to all ranks.

    Attributes:
        loss_sum: summed loss of the global batch; None if only this rank's part is known. In Local
            SGD: the mean loss of the samples between the last two averaging rounds, times the
            number of samples in the global batch; None in the steps between.
        grad_norm: norm of the unscaled gradient before clipping; None after an overflow.
        overflow: the gradient was not finite, and no rank stepped. In Local SGD, this rank did not
            step.
        loss_scale: factor on this step's losses.
        ready_s: seconds of data and compute of each rank until its own gradient was ready. They
            travel with the step's exchange and belong to the step *before* this one, unless all
            ranks compute on CPUs. After a pause they are 0.0. Empty if they are not exchanged.
        weight: weight of all samples in ``loss_sum``, such as their number of tokens; None: one
            each.
        oom_ranks: ranks that ran out of memory, each with a description. If there is one, no rank
            stepped, and the parameters and the loss scale are unchanged.
        retry: the loop must repeat this batch if there are ``oom_ranks``. False for Local SGD,
            where only those ranks skipped a step, some steps ago.
        unsound: ranks whose own gradient was not finite before the sum; empty if unknown.
        losses: loss of each of this rank's samples, fp32 [n], detached.
        laps: this rank's time by activity.
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
    """A step that was queued on the device, and whose outcome the host has not read yet.

    Attributes:
        read: waits for the outcome and returns it; called once.
        taken: returns immediately: True if the step was taken, False if it was skipped, None if a
            rank has not joined the step's exchange yet. With None, nothing has changed.
        wait: waits until the device has changed the parameters; called once ``taken`` returns True.
    """

    read: Callable[[], StepResult]
    taken: Callable[[], bool | None] = lambda: None
    wait: Callable[[], object] = lambda: None


class Scope(Enum):
    """A part of the training state.

    Attributes:
        GLOBAL: all state that does not depend on the number of ranks: whole tensors on the CPU of
            rank 0, with the optimizer's other values. Empty on other ranks.
        HELD: the content of GLOBAL, read on one rank without the others, from an engine that is
            ``rescuable``.
        REPLICATED: tensors that should be equal on all ranks, as this rank holds them, on their
            device, without the loss scale.
        ROWS: this rank's rows of the tensors of GLOBAL, on the CPU, from an engine that
            :class:`HoldsParts`. Tensors that are not sharded are on rank 0 alone.
        RANK: tensors that only this rank has, such as the error feedback of a wire mode.
        STATISTICS: this rank's sums in batch norms since :meth:`Engine.sync_parameters`.
        BUFFERS: buffers of batch norms, ``model.<name>``. A rank that cannot reach the others
            estimates them from its own samples since :meth:`Engine.sync_parameters`.
    """

    GLOBAL = auto()
    HELD = auto()
    REPLICATED = auto()
    ROWS = auto()
    RANK = auto()
    STATISTICS = auto()
    BUFFERS = auto()


class Engine(Protocol):
    """The protocol between the loop and an engine of ``torch_dist/`` or ``deepspeed/``.

    Attributes:
        loss_weight: factor on each loss, besides the scale and 1/N, that undoes the engine's own
            average over ranks.
        equal_micro_steps: every micro-batch communicates, so all ranks have the same number of
            them, and compute and communication are timed together.
        replicated: each rank holds all parameters. Otherwise each rank holds a part, and a pass
            through the model needs all ranks.
        rescuable: each rank holds the whole state between two steps, and :attr:`Scope.HELD` reads
            it without the other ranks.
        diverges: ranks hold different parameters between two steps, until they are synchronised.
        on_change: called when a change of the state starts.
        on_same: called when the state is again as after the last step; :meth:`step` does not call
            it.
        clock: this rank's time by activity in the current step.
        optimizer: the optimizer. The schedule writes the learning rate to its ``param_groups``.
        device: device of the parameters.
        scale: this rank's copy of the loss scale.
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
        """Compute the forward and backward pass of one micro-batch.

        If memory has run out in this step, nothing is computed, but the rank still takes part in
        collectives.

        Args:
            batch: the micro-batch.
            n_global: samples in the global batch.
            last: this is the rank's last micro-batch of the global batch.
        """

    def step(self) -> StepResult:
        """Finish the global batch, and return the result.

        The step communicates, agrees on overflow with the other ranks, clips, and updates
        parameters.
        """

    @property
    def reads_late(self) -> bool:
        """True if the next step may be accumulated before this step's outcome is read.

        The value is the same on all ranks. A host that reads each outcome immediately has no work
        queued for its GPU, so each delay of the host delays the GPU too.
        """

    def launch_step(self, late: bool) -> LaunchedStep:
        """Start a step, and return an object that reads its outcome.

        :meth:`step` reads the outcome immediately.

        Args:
            late: the outcome is read after the next step's micro-batches were accumulated.
        """

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients, because the batch is repeated. All ranks call it."""

    def sync_parameters(self) -> None:
        """Make the parameters equal on all ranks, if they differ after a step.

        All ranks call this method, before an evaluation and before :meth:`state`.
        """

    def unite(self) -> None:
        """Set the parameters to their mean over all ranks, if the engine diverges.

        All ranks call this method after each has loaded its own state.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Swap :attr:`average` into the model for the time of the context; all ranks call it."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the sums of scores of held-out samples; see motley.engines.base."""

    def state(self, scope: Scope, keep: Callable[[Tensor], Tensor] = snapshot) -> State:
        """Return a part of the training state.

        Args:
            scope: the part. All ranks call this method for GLOBAL and ROWS.
            keep: returns the value to store for a tensor, for HELD, STATISTICS and BUFFERS;
                default: a copy on the CPU.
        """

    def load_state(self, scope: Scope, state: State) -> list[str]:
        """Restore a result of :meth:`state` with the same scope; all ranks call it.

        Args:
            scope: GLOBAL: the same state on all ranks. REPLICATED: the state of another rank. ROWS:
                this rank's rows. RANK: the state of the same rank out of as many ranks, else empty.
                STATISTICS, after GLOBAL: the statistics of the surviving ranks are added.
            state: the saved state.

        Returns:
            Notes for the user on state that could not be restored.
        """

    def reconfigure(self, plan: Plan) -> None:
        """Use a new plan from the next step on."""


@runtime_checkable
class HoldsParts(Protocol):
    """An engine whose ranks can each save and load their own :attr:`Scope.ROWS`."""

    def get_rows(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the range of rows of a whole tensor that this rank loads; None: all rows.

        The range is the first row, and the row after the last.

        Args:
            name: name of the tensor in the state.
            shape: shape of the whole tensor.
        """


@dataclass(frozen=True)
class EngineContext:
    """The facts that an engine is built with.

    Attributes:
        config: the options.
        rank: number of this rank in the process group.
        size: number of ranks in the process group.
        device: device of this rank.
        precisions: precision of each rank.
        scale: this rank's copy of the shared loss scale.
        plan: plan of the full batch.
    """

    config: Config
    rank: int
    size: int
    device: torch.device
    precisions: tuple[str, ...]
    scale: LossScale
    plan: Plan


class EngineFactory(Protocol):
    """A factory of engines, which knows their traits before one is built."""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engines that this factory makes."""

    def __call__(self, model: "TaskModel", context: EngineContext) -> Engine:
        """Return an engine for a model."""

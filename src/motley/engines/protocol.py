"""The interface between an engine and the training loop.

An engine computes new parameters from micro-batches. The engine does the forward and backward
passes, communication, averaging, the loss scale, clipping, and the agreement of all ranks on
overflow. The loop handles the data, the plan, the schedule, the records and the checkpoints.
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
        loss_sum: sum of the losses of the global batch. None: only this rank's part is known, as in
            Local SGD between averaging rounds. In an averaging round, the value is the mean loss of
            the samples since the last round, times the number of samples in the global batch.
        grad_norm: norm of the unscaled gradient before clipping; None after an overflow.
        overflow: True if the gradient was not finite, so that no rank changed its parameters. In
            Local SGD, True if this rank did not change its parameters.
        loss_scale: factor by which the losses of this step were multiplied.
        ready_s: for each rank, the seconds that reading and computing took until the rank's own
            gradient was ready. If a rank has a GPU, the times are those of the *previous* step.
            After an interruption they are 0.0. Empty if the ranks do not exchange times.
        weight: total weight of the samples in ``loss_sum``, such as their number of tokens; None:
            each sample has the weight 1.
        oom_ranks: for the ranks that ran out of memory, a description of the error by rank. If the
            dictionary is not empty, the parameters and the loss scale are unchanged on all ranks.
        retry: True: the loop must repeat this batch if ``oom_ranks`` is not empty. False for Local
            SGD, where only the ranks of ``oom_ranks`` skipped a step, some steps ago.
        unsound: ranks whose own gradient was not finite before the sum. Empty: no rank, or unknown.
        losses: loss of each of this rank's samples, fp32 [n], detached.
        laps: seconds that this rank spent on each activity in the step.
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
        read: function that waits for the outcome and returns it. Call it once.
        taken: function that returns without a wait. True: the step was taken. False: the step was
            skipped. None: a rank has not joined the exchange of the step yet, and no state has
            changed.
        wait: function that waits until the device has changed the parameters. Call it after
            ``taken`` has returned True.
    """

    read: Callable[[], StepResult]
    taken: Callable[[], bool | None] = lambda: None
    wait: Callable[[], object] = lambda: None


class Scope(Enum):
    """A part of the training state.

    Attributes:
        GLOBAL: all state that does not depend on the number of ranks: whole tensors on the CPU of
            rank 0, and the optimizer's values that are not tensors. Empty on other ranks.
        HELD: the content of GLOBAL, read on one rank without communication. The engine must be
            ``rescuable``.
        REPLICATED: this rank's copy of the tensors that should be equal on all ranks, on their
            device, without the loss scale.
        ROWS: this rank's rows of the tensors of GLOBAL, on the CPU. The engine must implement
            :class:`HoldsParts`. Only rank 0 has the tensors that are not sharded.
        RANK: tensors that only this rank has, such as the error feedback of a wire mode.
        STATISTICS: this rank's changes of batch norm statistics since
            :meth:`Engine.sync_parameters`.
        BUFFERS: buffers of batch norms, ``model.<name>``. A rank that cannot reach the other ranks
            estimates the buffers from its own samples since :meth:`Engine.sync_parameters`.
    """

    GLOBAL = auto()
    HELD = auto()
    REPLICATED = auto()
    ROWS = auto()
    RANK = auto()
    STATISTICS = auto()
    BUFFERS = auto()


class Engine(Protocol):
    """The protocol between the training loop and an engine.

    Attributes:
        loss_weight: factor by which each loss is multiplied, to undo the engine's own average over
            ranks. Each loss is also multiplied by the loss scale and by 1/N, for N samples in the
            global batch.
        equal_micro_steps: True if every micro-batch communicates. All ranks then have the same
            number of micro-batches, and compute and communication are timed together.
        replicated: True if each rank holds all parameters. False: each rank holds a part, and a
            pass through the model needs all ranks.
        rescuable: True if each rank holds the whole state between two steps, so that
            :attr:`Scope.HELD` reads it without the other ranks.
        diverges: True if ranks hold different parameters between two steps, until
            :meth:`sync_parameters`.
        on_change: function that the engine calls when a change of the state starts.
        on_same: function that the engine calls when the state is the same again as after the last
            step. :meth:`step` does not call this function.
        clock: clock that measures the time of each of this rank's activities in the current step.
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
        """Moving average of the parameters. None without the option ``--model-ema``."""

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """Compute the forward and backward pass of one micro-batch.

        If memory has run out in this step, the method computes nothing, but still takes part in
        collectives.

        Args:
            batch: the micro-batch.
            n_global: number of samples in the global batch, over all ranks.
            last: True if this is the rank's last micro-batch of the global batch.
        """

    def step(self) -> StepResult:
        """Finish the global batch, and return the outcome of the step.

        The method sums the gradients over the ranks, agrees on overflow with the other ranks, clips
        the gradient, and updates the parameters.
        """

    @property
    def reads_late(self) -> bool:
        """True if the host may queue the passes of the next step before it reads this outcome.

        The value is the same on all ranks. A host that reads the outcome of each step immediately
        cannot queue work for its GPU in advance. Each delay of the host then delays the GPU, too.
        """

    def launch_step(self, late: bool) -> LaunchedStep:
        """Start a step, and return an object that reads its outcome.

        :meth:`step` reads the outcome immediately.

        Args:
            late: True if the caller computes the micro-batches of the next step before it reads the
                outcome.
        """

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients before the batch is repeated. All ranks call it."""

    def sync_parameters(self) -> None:
        """Make the parameters equal on all ranks, if they differ after a step.

        All ranks call this method, before an evaluation and before :meth:`state`.
        """

    def unite(self) -> None:
        """Set the parameters to their mean over all ranks, if they differ between ranks.

        All ranks call this method after each has loaded its own state.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Use :attr:`average` as the model's parameters in a ``with`` block. All ranks call it."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the sums of scores of held-out samples; see motley.engines.base."""

    def state(self, scope: Scope, keep: Callable[[Tensor], Tensor] = snapshot) -> State:
        """Return a part of the training state.

        Args:
            scope: the part. All ranks call this method for GLOBAL and ROWS.
            keep: function that returns the value to store for a tensor, such as a copy on the CPU.
                Only HELD, STATISTICS and BUFFERS use the function.
        """

    def load_state(self, scope: Scope, state: State) -> list[str]:
        """Restore a result of :meth:`state` with the same scope. All ranks call it.

        Args:
            scope: GLOBAL: the same state on all ranks. REPLICATED: the state of another rank. ROWS:
                this rank's rows. RANK: this rank's saved state, or an empty state if the number of
                ranks has changed. STATISTICS: each surviving rank's statistics, which are added up.
                GLOBAL must be loaded first.
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
    """The values with which an engine is built.

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
    """A factory of engines. Their traits are known before the factory builds an engine."""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engines that this factory makes."""

    def __call__(self, model: "TaskModel", context: EngineContext) -> Engine:
        """Build and return an engine for a model."""

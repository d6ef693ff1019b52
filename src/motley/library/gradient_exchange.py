"""The exchange of one step in a user's own loop: the sum of gradients, and each rank's numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from motley.comm.reducer import Bucket
from motley.engines.gradient_sum import EarlySum
from motley.errors import MotleyError

CALLS = 4  # most backward calls with a weight in a step


@dataclass(frozen=True)
class RankNumbers:
    """The numbers that each rank sends with its gradient.

    Attributes:
        step: number of the step.
        own_s: seconds of the rank's own work, without waiting for others.
        reached: last step that the rank's loader has requested.
        rows: rows of the rank in the step.
        loss: the rank's part of the loss.
        finite: 1.0 if the sum of the gradients is finite, or if no loss scale is in use.
        absent: number of parameters without a gradient on the rank.
        is_late: 1.0 if a gradient has changed after the rank had sent it.
        call: number of backward calls in the step so far.
        rate: learning rate of the optimizer's first group.
        rates: checksum of the learning rates of all its groups.
        saves: 1.0 if the rank asks for a checkpoint after the step.
        weights: weight of the rank's rows in each backward call that has one.
    """

    step: float
    own_s: float
    reached: float
    rows: float
    loss: Tensor | float
    finite: Tensor | float
    absent: float
    is_late: float
    call: float
    rate: float
    rates: float
    saves: float
    weights: tuple[float, ...]

    def as_row(self) -> list[Tensor | float]:
        """Return the numbers in a row of a fixed length."""
        weights = [*self.weights, *[0.0] * (CALLS - len(self.weights))]
        return [self.step, self.own_s, self.reached, self.rows, self.loss, self.finite, self.absent,
                self.is_late, self.call, self.rate, self.rates, self.saves,
                float(len(self.weights)), *weights]  # fmt: skip

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankNumbers":
        """Return the numbers that :meth:`as_row` has written."""
        count = int(row[-CALLS - 1])
        weights = tuple(row[len(row) - CALLS :][:count])
        return cls(*row[: -CALLS - 1], weights=weights)  # type: ignore[misc, arg-type]


@dataclass(frozen=True)
class SumOutcome:
    """The outcome of one sum of gradients, equal on all ranks.

    Attributes:
        numbers: numbers of all ranks, by rank.
        loss: mean loss of the global batch.
        overflow: True if the sum is not finite, so that no rank steps.
        totals: weights of all ranks' rows in each backward call that has one.
    """

    numbers: tuple[RankNumbers, ...]
    loss: float
    overflow: bool
    totals: tuple[float, ...]


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


class OptimizerSum:
    """One optimizer, and the sum of its parameters' gradients over all ranks.

    The sum begins during the backward pass that completed the gradients in the step before, since
    the next step mostly has the same passes. If one more pass follows, all ranks repeat the sum.

    Args:
        optimizer: the optimizer.
        begin: starts to sum a bucket; see EarlySum.

    Attributes:
        summed: step whose gradients are summed already; None: none is.
        may_step: True if the optimizer may step with the sum.
        usual_call: number of the backward call that completed the gradients in the step before,
            equal on all ranks; None: not known, and the sum begins after the passes.
    """

    def __init__(
        self, optimizer: Optimizer, begin: Callable[[Bucket], torch.futures.Future[Tensor]]
    ) -> None:
        self._optimizer, self._begin = optimizer, begin
        self._known = list(map(id, list_parameters(optimizer)))
        self._trained: list[Tensor] = []
        self._sum = EarlySum((), begin)
        self.summed: int | None = None
        self.may_step = False
        self.usual_call: int | None = None

    def all_parameters(self) -> list[Tensor]:
        """Return all parameters of the optimizer, frozen ones included."""
        return list_parameters(self._optimizer)

    def parameters(self) -> list[Tensor]:
        """Return the parameters that are trained now."""
        return [each for each in self.all_parameters() if each.requires_grad]

    def list_rates(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    @property
    def has_begun(self) -> bool:
        """True while buckets are sent and not waited for."""
        return self._sum.has_begun

    def open(self) -> None:
        """Send the gradients during the next backward pass. All ranks call it."""
        self._update()
        self._sum.open()

    def flush(self) -> None:
        """Send the remaining gradients of the backward pass."""
        self._sum.flush()

    def mark_late(self) -> None:
        """Have all ranks repeat a sum that has begun, because this rank's gradients change."""
        self._sum.is_late |= self._sum.has_begun

    def forget(self) -> None:
        """Drop a sum that has begun."""
        self._sum.forget()

    def wait(self) -> tuple[list[int], list[Tensor]]:
        """Wait for the sums. All ranks call it.

        Returns:
            The indices in :attr:`summed_parameters` of those that had no gradient on this rank, and
            the sums.

        Raises:
            MotleyError: the optimizer has got other parameters since ``lab.prepare``.
        """
        self._check_known()
        if self._sum.has_begun:
            self._sum.is_late |= self._are_others(self.parameters())
        else:
            self._update()
        return self._sum.wait(), self._sum.sums

    def _check_known(self) -> None:
        """Raise MotleyError if the optimizer has got other parameters."""
        if list(map(id, list_parameters(self._optimizer))) != self._known:
            raise MotleyError(
                "the optimizer has other parameters than when lab.prepare() got it, and they may "
                "differ between ranks: call lab.prepare(model, optimizer) again after the change"
            )

    @property
    def is_late(self) -> bool:
        """True if all ranks must repeat the sum."""
        return self._sum.is_late

    def take(self) -> None:
        """Replace each gradient by its sum."""
        self._sum.take()

    @property
    def summed_parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are summed, in the order of their indices."""
        return self._sum.parameters

    def _are_others(self, trained: Sequence[Tensor]) -> bool:
        return list(map(id, trained)) != list(map(id, self._trained))

    def _update(self) -> None:
        """Sum the gradients of the parameters that are trained now."""
        trained = self.parameters()
        if self._are_others(trained):
            self._sum.close()
            self._trained, self._sum = trained, EarlySum(trained, self._begin)

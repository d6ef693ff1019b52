"""The gradients and numbers that ranks exchange in one step of a user's own training loop."""

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
        own_s: seconds that the rank worked in the step. Waiting for other ranks does not count.
        reached: number of the last step whose rows the rank's loader has requested.
        rows: number of rows that the rank computed in the step.
        loss: the rank's summand of the mean loss of the global batch.
        finite: 1.0 if the summed gradients are finite, or if no loss scale is in use; else 0.0.
        absent: number of parameters that have no gradient on the rank.
        is_late: 1.0 if a gradient changed after the rank had sent it. All ranks then repeat the
            sum.
        call: number of backward calls in the step so far.
        rate: learning rate of the optimizer's first parameter group.
        rates: checksum of the learning rates of all parameter groups of the optimizer.
        saves: 1.0 if the rank asks for a checkpoint after the step.
        weights: total weight of the rank's rows, for each backward call with ``weight=``.
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
        """Return the numbers as a list whose length is equal on all ranks."""
        weights = [*self.weights, *[0.0] * (CALLS - len(self.weights))]
        return [self.step, self.own_s, self.reached, self.rows, self.loss, self.finite, self.absent,
                self.is_late, self.call, self.rate, self.rates, self.saves,
                float(len(self.weights)), *weights]  # fmt: skip

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankNumbers":
        """Return the numbers, given a list that :meth:`as_row` has returned."""
        count = int(row[-CALLS - 1])
        weights = tuple(row[len(row) - CALLS :][:count])
        return cls(*row[: -CALLS - 1], weights=weights)  # type: ignore[misc, arg-type]


@dataclass(frozen=True)
class SumOutcome:
    """The outcome of one sum of gradients, equal on all ranks.

    Attributes:
        numbers: numbers that each rank has sent, in the order of ranks.
        loss: mean loss of the global batch.
        overflow: True if the sum is not finite. No rank's optimizer then steps.
        totals: total weight of all ranks' rows, for each backward call with ``weight=``.
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

    In the previous step, backward pass number k completed the gradients. In this step, backward
    pass number k therefore sends the gradients in buckets while it runs. If this step has a further
    backward pass, all ranks repeat the sum.

    Args:
        optimizer: the optimizer.
        begin: function that starts the sum of one bucket of gradients; see EarlySum.

    Attributes:
        summed: number of the last step whose gradients were summed; None before the first sum.
        may_step: True if the optimizer may step with the sum. False after an overflow.
        usual_call: number of the backward call that completed the gradients in the previous step,
            equal on all ranks. None: the number is not known, and the sum starts after the last
            backward pass.
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
        """Return the parameters that require gradients now."""
        return [each for each in self.all_parameters() if each.requires_grad]

    def list_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    @property
    def has_begun(self) -> bool:
        """True after :meth:`open`, until :meth:`take` or :meth:`forget` is called."""
        return self._sum.has_begun

    def open(self) -> None:
        """Prepare to send the gradients during the next backward pass. All ranks call it."""
        self._update()
        self._sum.open()

    def flush(self) -> None:
        """Send the gradients that the backward pass has not sent yet."""
        self._sum.flush()

    def mark_late(self) -> None:
        """Request that all ranks repeat the current sum, because this rank's gradients change."""
        self._sum.is_late |= self._sum.has_begun

    def forget(self) -> None:
        """Discard a sum that has begun. This rank keeps the gradients that it has computed."""
        self._sum.forget()

    def wait(self) -> tuple[list[int], list[Tensor]]:
        """Wait until the gradients are summed over all ranks. All ranks call it.

        Returns:
            Two lists. The first has the indices in :attr:`summed_parameters` of the parameters that
            have no gradient on this rank. The second has the summed gradients.

        Raises:
            MotleyError: the optimizer's parameters have changed since ``lab.prepare``.
        """
        self._check_known()
        if self._sum.has_begun:
            self._sum.is_late |= self._are_others(self.parameters())
        else:
            self._update()
        return self._sum.wait(), self._sum.sums

    def _check_known(self) -> None:
        """Raise MotleyError if the optimizer's parameters have changed since ``lab.prepare``."""
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
        """Replace each gradient by its sum over all ranks."""
        self._sum.take()

    @property
    def summed_parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients are summed, in the order of their indices."""
        return self._sum.parameters

    def _are_others(self, trained: Sequence[Tensor]) -> bool:
        return list(map(id, trained)) != list(map(id, self._trained))

    def _update(self) -> None:
        """Make a new sum if the set of parameters that require gradients has changed."""
        trained = self.parameters()
        if self._are_others(trained):
            self._sum.close()
            self._trained, self._sum = trained, EarlySum(trained, self._begin)

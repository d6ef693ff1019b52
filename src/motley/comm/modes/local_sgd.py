"""Local SGD: ranks send no gradients, and average their parameters every few steps."""

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from motley.comm.modes.numbers import EXACT
from motley.plan.wire import Addition, AllReduceCost, WireMode

_OFFERED = (2, 4, 8, 16)  # steps
LOST_POINTS = {2: (0.3, 5), 4: (0.5, 8), 8: (0.3, 8)}  # see WireMode, by steps


@dataclass(frozen=True)
class LocalSgd(WireMode):
    """The mode in which each rank takes several steps of its own before parameters are averaged.

    Attributes:
        steps: number of steps from one averaging round to the next.
    """

    name, usage = "local", "local:H"
    says = (
        "or not at all: each rank takes H steps of its own before parameters are averaged, inexact"
    )
    addition = Addition.LOCAL_STEPS

    steps: int = 1

    @classmethod
    def parse(cls, number: str) -> Self:
        """Return the mode for the text that follows ``NAME:`` in ``--wire``."""
        if not re.fullmatch(r"[1-9]\d{0,3}", number):
            raise ValueError(
                "local needs the number of steps between two averaging rounds, 1 or more, as in "
                "local:4. A larger number hides a slower network and costs more accuracy"
            )
        return cls(int(number))

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return the mode with the fewest local steps that hide the transfer time.

        Args:
            precisions: precisions of the ranks.
            part: seconds of a step's communication in the exact mode, divided by the seconds of a
                step without communication.
        """
        return [cls(steps) for steps in _OFFERED if steps >= part][:1]

    @property
    def sync_every(self) -> int:
        """Number of steps between two all-reduces."""
        return self.steps

    @property
    def is_inexact(self) -> bool:
        """True if the mode does more than round the gradient."""
        return self.steps > 1

    @property
    def lost_points(self) -> tuple[float, int] | None:
        """Loss of top-1 accuracy in points, and number of seeds. None: not measured."""
        return LOST_POINTS.get(self.steps)

    @property
    def price(self) -> str:
        """Effect of the mode on the gradient and on accuracy, in words."""
        if self.steps == 1:
            return "parameters are averaged after every step; this is exact"
        return super().price

    def in_job(self, precisions: Collection[str]) -> WireMode:
        """Return the form of this mode for a job whose ranks compute in these precisions."""
        return EXACT if self.steps == 1 else self

    def cost_from(self, exact: AllReduceCost) -> AllReduceCost:
        """Return the cost, with the bytes of the exact mode in every ``steps``-th step."""
        return dataclasses.replace(exact, sync_every=self.steps)

    def __str__(self) -> str:
        """Return the mode as a user writes it after ``--wire``."""
        return f"{self.name}:{self.steps}"


MODES = (LocalSgd,)

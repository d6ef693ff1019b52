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
    """The mode in which each rank takes local steps between averaging rounds of the parameters.

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
        """See WireMode."""
        if not re.fullmatch(r"[1-9]\d{0,3}", number):
            raise ValueError(
                "local needs the number of steps between two averaging rounds, 1 or more, as in "
                "local:4. A larger number hides a slower network and costs more accuracy"
            )
        return cls(int(number))

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return the mode with the fewest local steps that hide the transfer time. See WireMode."""
        return [cls(steps) for steps in _OFFERED if steps >= part][:1]

    @property
    def sync_every(self) -> int:
        """See WireMode."""
        return self.steps

    @property
    def is_inexact(self) -> bool:
        """See WireMode."""
        return self.steps > 1

    @property
    def lost_points(self) -> tuple[float, int] | None:
        """See WireMode."""
        return LOST_POINTS.get(self.steps)

    @property
    def price(self) -> str:
        """See WireMode."""
        if self.steps == 1:
            return "ranks that meet after every step take it together; this is exact"
        return super().price

    def in_job(self, precisions: Collection[str]) -> WireMode:
        """See WireMode."""
        return EXACT if self.steps == 1 else self

    def cost_from(self, exact: AllReduceCost) -> AllReduceCost:
        """Return the cost, with as many bytes as the exact mode. See WireMode."""
        return dataclasses.replace(exact, sync_every=self.steps)

    def __str__(self) -> str:
        """See WireMode."""
        return f"{self.name}:{self.steps}"


MODES = (LocalSgd,)

"""PowerSGD: a mode of ``--wire`` that sends two thin matrices in place of each gradient matrix.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from motley.plan.wire import Addition, WireMode

# The default rank. Rank 4 lost three times as many points, and was 4 % faster
# (benchmarks/results/tesla_replay_512.json).
_OFFERED = 8
LOST_POINTS = {1: (6.4, 5), 4: (1.0, 16), 8: (0.3, 8)}  # see WireMode, by rank


@dataclass(frozen=True)
class PowerSgd(WireMode):
    """The mode that sends two thin matrices in place of each gradient matrix.

    The error of the matrices is added to the gradient of the next step.

    Attributes:
        rank: rank of the thin matrices.
        rounded: True if the matrices are rounded to bf16 before they are sent.
    """

    name, usage = "powersgd", "powersgd:R"
    says = "PowerSGD of rank R, few bytes and inexact"
    addition = Addition.BUCKETS
    mixes_devices = False
    waits_for_gpu = True
    kept_copies = 1  # the error

    rank: int = _OFFERED
    rounded: bool = False

    @classmethod
    def parse(cls, number: str) -> Self:
        """Return the mode for the text that follows ``NAME:`` in ``--wire``."""
        if not (match := re.fullmatch(r"([1-9]\d{0,3})(\+bf16)?", number)):
            raise ValueError(
                "powersgd needs a rank of 1 or more, as in powersgd:8 or powersgd:8+bf16. A "
                "higher rank sends more bytes and is more accurate"
            )
        return cls(int(match[1]), rounded=match[2] is not None)

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return the modes of this kind that are measured without a user's request."""
        return (cls().in_job(precisions),)

    @property
    def dtype(self) -> str:
        """Name of the dtype in which numbers are sent."""
        return "bf16" if self.rounded else "fp32"

    @property
    def least_side(self) -> int:
        """Side of the smallest square matrix that the mode compresses like large ones."""
        return 4 * self.rank + 1

    @property
    def lost_points(self) -> tuple[float, int] | None:
        """Loss of top-1 accuracy in points, and number of seeds. None: not measured.

        The loss is the same with and without rounding to bf16.
        """
        return LOST_POINTS.get(self.rank)

    def count_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of bytes that are sent for gradients of these shapes.

        Like torch's hook, the mode compresses only gradients that become at most half as large.
        """
        return super().count_bytes([(self.thin(shape) or math.prod(shape),) for shape in shapes])

    def thin(self, shape: Sequence[int]) -> int | None:
        """Return the number of elements that are sent for a compressed gradient.

        None: a gradient of this shape is not compressed.

        Args:
            shape: shape of the gradient.
        """
        high, whole = shape[0] if shape else 1, math.prod(shape)
        wide = whole // high
        numbers = (high + wide) * min(high, wide, self.rank)
        return numbers if 2 * numbers < whole else None

    def in_job(self, precisions: Collection[str]) -> WireMode:
        """Return the form of the mode for a job: with rounding if a rank computes in 16 bits.

        The matrices are rounded to bf16, because a matrix times the loss scale could exceed fp16's
        range.
        """
        rounds = not {"bf16", "fp16"}.isdisjoint(precisions)
        return dataclasses.replace(self, rounded=True) if rounds else self

    def reducer(self, device: Any) -> Any:
        """Return the reducer of this mode for a device. All ranks call it."""
        from motley.comm.power_sgd_reducer import PowerSgdReducer

        return PowerSgdReducer(self, device)

    def __str__(self) -> str:
        """Return the mode as a user writes it after ``--wire``."""
        return f"{self.name}:{self.rank}{'+bf16' if self.rounded else ''}"


MODES = (PowerSgd,)

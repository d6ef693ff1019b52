"""A global batch that grows, as in ``512:2048:32/100M``. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from motley.errors import MotleyError

_TEXT = re.compile(r"(\d+):(\d+):(\d+)/(\d+)([KMG]?)")
_TIMES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Ramp:
    """The batches of a run: the same in all its steps if ``over`` is 0.

    Attributes:
        first: samples in its first step. most: in the last ones. by: it grows by so many at once.
        over: samples since the start after which it has grown.
    """

    first: int
    most: int
    by: int = 1
    over: int = 0

    def at(self, used: int) -> int:
        """Samples in the step that begins when so many are used up since the start of the run."""
        if used >= self.over:
            return self.most
        times = (self.most - self.first) // self.by
        return self.first + self.by * (used * times // self.over)

    def batches(self) -> range:
        """All that there are, ascending."""
        return range(self.first, self.most + 1, self.by)

    def steps(self, used: int, until: int) -> int:
        """How many it takes from one number of samples to another within an epoch; the last step
        may be smaller."""
        count = 0
        while used < min(until, self.over):
            used += self.at(used)
            count += 1
        return count + max(0, -((used - until) // self.most))

    def __str__(self) -> str:
        return f"{self.first}:{self.most}:{self.by}/{self.over}"


class RampedBatch(int):
    """``--batch-size`` where it grows: a number, the largest one, that knows of the others."""

    ramp: Ramp

    def __new__(cls, text: str) -> "RampedBatch":
        """Read as :func:`read_ramp` does."""
        ramp = read_ramp(text)
        made = super().__new__(cls, ramp.most)
        made.ramp = ramp
        return made

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (str(self),)

    def __str__(self) -> str:
        return str(self.ramp)


def ramp_of(batch_size: int) -> Ramp:
    """How a batch grows; where it does not, one that is the same in all steps."""
    if isinstance(batch_size, RampedBatch):
        return batch_size.ramp
    return Ramp(batch_size, batch_size)


def read_ramp(text: str) -> Ramp:
    """Of ``first:most:by/samples``, the last with K, M or G for thousands, millions, milliards.

    Raises:
        MotleyError: it is none, or cannot be reached in such steps.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MotleyError(
            f"--batch-size {text}: write FIRST:LAST:BY/SAMPLES, as 512:2048:32/100M, which grows "
            "from 512 to 2048 by 32 over the first 100 million samples"
        )
    first, most, by, over = (int(number) for number in match.groups()[:4])
    over *= _TIMES[match[5]]
    if not (0 < first < most and by > 0 and over > 0):
        raise MotleyError(f"--batch-size {text}: it is to begin above 0, grow, and take samples")
    if (most - first) % by:
        near = first + (most - first) // by * by
        raise MotleyError(
            f"--batch-size {text}: from {first} by {by} it never is {most}; take "
            f"{f'{near} or ' if near > first else ''}{near + by}"
        )
    return Ramp(first, most, by, over)


def growth(ramp: Ramp) -> Iterator[str]:
    """What is to be said of it at the start: a line, or nothing."""
    if ramp.over:
        steps = ramp.steps(0, ramp.over)
        yield (
            f"the batch grows from {ramp.first} to {ramp.most} samples, by {ramp.by}, over the "
            f"first {ramp.over:,} samples: {steps:,} steps"
        )

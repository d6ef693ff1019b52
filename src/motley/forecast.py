"""What a split should do, and other ways beside it, predicted from measured speeds. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.balance import Speed, limit_s, split


@dataclass(frozen=True)
class Forecast:
    """What a plan should do.

    Attributes:
        compute_s: of each rank in a step.
        wire_s: one all-reduce of the whole gradient, measured.
        buckets: that the gradient is sent in.
        overlap: gradients are sent while the backward pass still runs.
        exposed_s: the part of the all-reduce that the backward pass cannot hide.
        limit_s: a step's time if nobody waited and nothing was sent.
    """

    global_batch: int
    compute_s: tuple[float, ...]
    wire_s: float
    buckets: int
    overlap: bool
    exposed_s: float
    limit_s: float

    @property
    def step_s(self) -> float:
        """A step, predicted."""
        return max(self.compute_s) + self.exposed_s

    @property
    def images_per_s(self) -> float:
        """Predicted."""
        return self.global_batch / self.step_s

    @property
    def fraction(self) -> float:
        """Of the smaller of two bounds: the limit, and one all-reduce after the other."""
        return max(self.limit_s, self.wire_s) / self.step_s

    def sentence(self) -> str:
        """What to expect, for the log."""
        return (
            f"predicted: {self.step_s:.3g} s a step, {self.images_per_s:,.0f} images/s, which is "
            f"{self.fraction:.2f} of what these machines can do together "
            f"({self.global_batch / self.limit_s:,.0f} images/s; one all-reduce takes "
            f"{self.wire_s:.3g} s)"
        )

    def as_json(self) -> dict[str, Any]:
        """For run.json; :meth:`from_json` reads it."""
        derived = {"step_s": self.step_s, "fraction": self.fraction}
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Forecast":
        """Reads :meth:`as_json`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{**{name: content[name] for name in names},
                      "compute_s": tuple(content["compute_s"])})  # fmt: skip


def forecast(
    counts: Sequence[int],
    speeds: Sequence[Speed],
    wire_s: float,
    buckets: int,
    overlap: bool = True,
) -> Forecast:
    """Predict a plan.

    The wire may work while the last micro-batch's backward pass (two thirds of its time) still
    produces gradients; the last of the ``buckets`` is ready only when that ends.

    Args:
        overlap: the wire does so; else it works after the backward pass.
    """
    total = sum(counts)
    compute = tuple(speed.seconds_of(n) for speed, n in zip(speeds, counts, strict=True))
    last = max(range(len(counts)), key=lambda rank: compute[rank])
    parts = max(1, math.ceil(counts[last] / speeds[last].micro_batch))
    hidden = speeds[last].micro_s(counts[last] / parts) * 2 / 3
    exposed = max(wire_s - hidden, wire_s / buckets) if overlap else wire_s
    return Forecast(total, compute, wire_s, buckets, overlap, exposed, limit_s(total, speeds))


def what_if(
    global_batch: int,
    names: Sequence[str],
    speeds: Sequence[Speed],
    wire_s: float,
    buckets: int,
    overlap: bool = True,
) -> dict[str, Forecast]:
    """Other ways to do it, predicted: for a person who wonders.

    Args:
        names: of the ranks, for the rows.
    """
    ranks = range(len(speeds))
    best = min(ranks, key=lambda rank: speeds[rank].seconds_of(global_batch))
    rows = {f"{names[best]} alone": forecast([global_batch], [speeds[best]], 0.0, buckets)}
    if len(speeds) == 1:
        return rows
    equal = [global_batch // len(speeds) + (rank < global_batch % len(speeds)) for rank in ranks]
    rows["equal shares"] = forecast(equal, speeds, wire_s, buckets, overlap)
    fast = sorted(ranks, key=lambda rank: speeds[rank].seconds_of(global_batch))
    for count in range(2, len(speeds)):
        few = [speeds[rank] for rank in sorted(fast[:count])]
        # A ring of n takes 2 (n - 1) / n of the gradient over each link.
        wire = wire_s * (1 - 1 / count) / (1 - 1 / len(speeds))
        rows[f"the fastest {count}"] = forecast(
            split(global_batch, few), few, wire, buckets, overlap
        )
    twice = 2 * global_batch
    rows[f"--batch-size {twice}"] = forecast(split(twice, speeds), speeds, wire_s, buckets, overlap)
    return rows

"""What is kept of one rank's steps: the last ones whole, all of them thinned out. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from motley.records.json_files import JsonDict

PARTS = ("t_data", "t_compute", "t_wait", "t_comm", "t_opt", "t_host")
RECENT = 64  # steps that are kept whole
_POINTS = 240  # of a history, at most


@dataclass(frozen=True)
class Step:
    """One line of steps.rank<k>.jsonl, as far as it is shown.

    Attributes:
        parts: seconds, as PARTS; None where they are not known.
        others: of many ranks, of which the first tells: the seconds that the middle one of the
            others was ready after, who was ready last, and after how many; None: not told.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    loss_scale: float | None
    n_local: int | None
    n_global: int
    weight: float | None
    memory_mib: float | None
    time: float
    parts: tuple[float | None, ...]
    others: tuple[float, int, float] | None = None

    @cached_property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(part or 0.0 for part in self.parts)

    @property
    def ready_s(self) -> float | None:
        """Until this rank's own gradient was ready."""
        data, compute, *_, host = self.parts
        return None if data is None or compute is None else data + compute + (host or 0.0)


def read_step(line: JsonDict) -> Step | None:
    """A line's step; None of one that is none: damaged, or of a version that nobody knows."""
    step, time = _number(line.get("step")), _number(line.get("time"))
    if step is None or time is None or not 0 <= step < 2**53:
        return None
    return Step(
        int(step), int(_number(line.get("epoch")) or 0), _number(line.get("loss")),
        _number(line.get("lr")), _number(line.get("loss_scale")),
        None if (n_local := _number(line.get("n_local"))) is None else int(n_local),
        int(_number(line.get("n_global")) or 0), _number(line.get("weight")),
        _number(line.get("mem_peak_mib")), time,
        tuple(_number(line.get(part)) for part in PARTS),
        _others(line.get("others_ready")),
    )  # fmt: skip


def _others(told: Any) -> tuple[float, int, float] | None:
    try:
        last = told["largest"]
        return float(told["middle"]["ready_s"]), int(last["rank"]), float(last["ready_s"])
    except (KeyError, TypeError, ValueError):
        return None


def _number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    return value if type(value) is int else None  # a bool is none


@dataclass(frozen=True)
class Point:
    """The mean over some steps; ``parts`` as of :class:`Step`."""

    step: int
    loss: float | None
    parts: tuple[float | None, ...]


class History:
    """Means over as many steps each as make no more than some hundred of them."""

    def __init__(self) -> None:
        self._width = 1
        self._steps: dict[int, _Sum] = {}

    def add(self, step: Step) -> None:
        """Add one that comes after all others."""
        self._steps.setdefault(step.step // self._width, _Sum()).add(step.loss, *step.parts)
        while len(self._steps) > _POINTS:
            self._width *= 2
            wider: dict[int, _Sum] = {}
            for place, total in self._steps.items():
                wider.setdefault(place // 2, _Sum()).merge(total)
            self._steps = wider

    def forget(self, step: int) -> None:
        """Without that one and those after it, and those that share a mean with it."""
        self._steps = {
            place: total for place, total in self._steps.items()
            if place < step // self._width
        }  # fmt: skip

    def points(self) -> list[Point]:
        """In order."""
        found = []
        for place, total in self._steps.items():
            loss, *parts = total.means()
            found.append(Point(place * self._width, loss, tuple(parts)))
        return found


class _Sum:
    """Of loss and parts, each as often as it is known."""

    def __init__(self) -> None:
        self._sums, self._counts = [0.0] * (1 + len(PARTS)), [0] * (1 + len(PARTS))

    def add(self, *values: float | None) -> None:
        for index, value in enumerate(values):
            if value is not None:
                self._sums[index] += value
                self._counts[index] += 1

    def merge(self, other: "_Sum") -> None:
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]

    def means(self) -> list[float | None]:
        pairs = zip(self._sums, self._counts, strict=True)
        return [total / count if count else None for total, count in pairs]


class Track:
    """One rank's steps, as they come.

    Attributes:
        recent: the last ones, in order.
    """

    def __init__(self) -> None:
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.history = History()

    def add(self, step: Step) -> None:
        """Add one; those after it are forgotten, for it is taken again."""
        if self.recent and step.step <= self.recent[-1].step:
            while self.recent and self.recent[-1].step >= step.step:
                self.recent.pop()
            self.history.forget(step.step)
        self.recent.append(step)
        self.history.add(step)

    @property
    def last(self) -> Step | None:
        """The last one."""
        return self.recent[-1] if self.recent else None


def mean_parts(steps: Sequence[Step]) -> tuple[float | None, ...]:
    """Of each part, over the steps that tell it."""
    total = _Sum()
    for step in steps:
        total.add(None, *step.parts)
    return tuple(total.means()[1:])

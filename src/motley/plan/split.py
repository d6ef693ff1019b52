"""Splits the global batch over ranks of unequal speed. Pure.

The split gives rank i the most samples that it can do in T (see motley.plan.speed_table), for the
smallest T that serves the whole batch: an integer minimax split. All ranks are looked at together,
so that a thousand of them are split in milliseconds, and watched in each step.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.plan.speed_table import SpeedTable

Floats = NDArray[np.float64]

_BISECTIONS = 45


class Speeds:
    """The tables of all ranks at once; each array is [ranks].

    Args:
        tables: of one grain.

    Attributes:
        step_s: of each.
    """

    def __init__(self, tables: Sequence[SpeedTable]) -> None:
        longest = max(len(table.sizes) for table in tables)
        seconds = np.array([_filled(table.seconds, longest) for table in tables])
        self._ranks = np.arange(len(tables))
        self._last = np.array([len(table.sizes) - 1 for table in tables])
        self._sizes = np.array([_filled(table.sizes, longest) for table in tables])
        before = np.array([0.0 if table.reads_ahead else table.input_s for table in tables])
        self._beside = np.array([table.input_s if table.reads_ahead else 0.0 for table in tables])
        self._m = np.array([float(table.micro_batch) for table in tables])
        self._seconds = _rising(self._sizes, seconds, self._m)
        self._m_s = self._micro_s(self._m) + before * self._m
        self._seconds += before[:, None] * np.where(np.isinf(self._sizes), 0.0, self._sizes)
        self.step_s = np.array([table.step_s for table in tables])
        self._grain = tables[0].grain

    def computed_s(self, samples: Floats) -> Floats:
        """What of :meth:`ready_s` depends on the samples alone, and takes longest to find."""
        parts: Floats = np.maximum(1.0, np.ceil(samples / self._m))
        computed: Floats = parts * self._micro_s(samples / parts)
        return computed

    def ready_s(
        self, samples: Floats, slowdown: Floats | float = 1.0, computed_s: Floats | None = None
    ) -> Floats:
        """:meth:`SpeedTable.seconds_of` less ``step_s``.

        Args:
            computed_s: of these samples, where it is known.
        """
        computed = self.computed_s(samples) if computed_s is None else computed_s
        read = slowdown * self._beside * samples - self.step_s
        ready: Floats = np.maximum(slowdown * computed, read)
        return ready

    def seconds_of(self, samples: Floats, slowdown: Floats | float = 1.0) -> Floats:
        """:meth:`SpeedTable.seconds_of`.

        Args:
            slowdown: factor on all but ``step_s``.
        """
        return self.step_s + self.ready_s(samples, slowdown)

    def samples_in(self, seconds: float, slowdown: Floats | float = 1.0) -> Floats:
        """The most samples in so many seconds, real numbers: the inverse of :meth:`seconds_of`."""
        left = np.maximum(0.0, seconds - self.step_s) / slowdown
        full = np.floor(left / self._m_s)
        more = (full + 1) * self._size_in(left / (full + 1))
        computed = np.where(left > 0, np.maximum(more, full * self._m), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            read = np.where(self._beside > 0, seconds / (slowdown * self._beside), np.inf)
        found: Floats = np.minimum(computed, read)
        return found

    def whole_in(self, seconds: float, slowdown: Floats | float = 1.0) -> NDArray[np.int64]:
        """Of these, whole samples, or grains; what is one but for rounding counts as one."""
        grains = self.samples_in(seconds, slowdown) / self._grain
        return (grains + 1e-8).astype(np.int64) * self._grain

    def _micro_s(self, samples: Floats) -> Floats:
        right = np.clip((self._sizes <= samples[:, None]).sum(axis=1), 1, np.maximum(1, self._last))
        found = self._between(samples, self._sizes, self._seconds, np.minimum(right, self._last))
        first, shortest = self._sizes[:, 0], self._seconds[:, 0]
        alone = (samples <= first) | (self._last == 0)
        found = np.where(alone, shortest * np.maximum(1.0, samples / first), found)
        return np.where(samples > 0, found, 0.0)

    def _size_in(self, seconds: Floats) -> Floats:
        """The largest micro-batch up to m that takes so many seconds."""
        place = (self._seconds <= seconds[:, None]).sum(axis=1) - 1
        right = np.minimum(place + 1, self._last)
        found = self._between(seconds, self._seconds, self._sizes, right)
        found = np.where(self._sizes[self._ranks, place] >= self._m, self._m, found)
        return np.where(place >= 0, found, 0.0)

    def _between(self, at: Floats, x: Floats, y: Floats, right: NDArray[np.int64]) -> Floats:
        """``y`` at ``x`` = ``at``, on the line through the columns before ``right`` and it."""
        left = np.maximum(right - 1, 0)
        low, high = x[self._ranks, left], x[self._ranks, right]
        start, end = y[self._ranks, left], y[self._ranks, right]
        width = np.where(high > low, high - low, 1.0)
        return start + (end - start) * (at - low) / width


def _filled(values: Sequence[float], length: int) -> Sequence[float]:
    return values if len(values) == length else [*values, *[math.inf] * (length - len(values))]


def _rising(sizes: Floats, seconds: Floats, m: Floats) -> Floats:
    """:attr:`SpeedTable.rising` of all, [ranks, sizes]; table by table it took half of a plan."""
    shortest = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    at_m = np.where(sizes == m[:, None], shortest, np.inf).min(axis=1)
    least = (at_m / m)[:, None] * np.where(np.isinf(sizes), 0.0, sizes)
    rising: Floats = np.where(sizes < m[:, None], np.maximum(least, shortest), shortest)
    return rising


def split(global_batch: int, tables: Sequence[SpeedTable]) -> tuple[int, ...]:
    """Samples of each rank so that the slowest takes the shortest time; they sum to the batch, and
    are multiples of the tables' grain, as the batch is.

    Holds for thousands of ranks: one bisection over the time, and one sample after another
    taken from who would be last.
    """
    speeds = Speeds(_some(tables))
    whole = speeds.whole_in(_time_for(global_batch, speeds, len(tables)))
    counts, surplus = whole.tolist(), int(whole.sum() - global_batch) // tables[0].grain
    took = np.where(whole > 0, speeds.seconds_of(whole.astype(float)), 0.0)
    last = [  # of equal times the largest share first: what the clock took for equal need not be
        (-tables[rank].seconds_of(counts[rank]), -counts[rank], rank)
        for rank in _slowest(surplus, took) if counts[rank]
    ]  # fmt: skip
    heapq.heapify(last)
    for _ in range(surplus):
        *_, rank = heapq.heappop(last)
        counts[rank] -= tables[0].grain
        if n := counts[rank]:
            heapq.heappush(last, (-tables[rank].seconds_of(n), -n, rank))
    return tuple(counts)


def _slowest(count: int, seconds: Floats) -> Sequence[int]:
    """So many ranks that take longest, and who takes as long but for rounding."""
    if not 0 < count < len(seconds):
        return range(len(seconds) if count else 0)
    least = (1 - 1e-9) * np.partition(seconds, -count)[-count]
    found: list[int] = np.flatnonzero(seconds >= least).tolist()
    return found


def limit_s(global_batch: int, speeds: Sequence[SpeedTable]) -> float:
    """Seconds of a step if nobody waited, nothing was sent, samples could be cut, and every
    rank had each of its samples at its best rate: the smallest T with
    sum of rate_i * (T - step_s_i) = N, over the ranks whose step fits into T."""
    rate, lost, shortest = 0.0, 0.0, math.inf
    for speed in sorted(_some(speeds), key=lambda speed: speed.step_s):
        rate, lost = rate + speed.rate, lost + speed.rate * speed.step_s
        shortest = min(shortest, (global_batch + lost) / rate)
    return shortest


def _time_for(global_batch: int, speeds: Speeds, ranks: int) -> float:
    """The smallest time, to 1e-12 of itself, in which the ranks do the batch together; or a longer
    one in which they do no sample more, so that the shares are the same."""
    low = 0.0
    high = 1.000001 * float(speeds.seconds_of(np.full(ranks, float(global_batch))).max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        done = speeds.whole_in(middle).sum()
        if done == global_batch:
            return middle
        low, high = (low, middle) if done > global_batch else (middle, high)
    return high


def _some(tables: Sequence[SpeedTable]) -> Sequence[SpeedTable]:
    if not tables:
        raise MotleyError("no rank is left to train; see why each was left out")
    return tables

"""Watches whether the split still fits while training runs, and proposes a better one. Pure.

Every rank feeds it the same numbers, which have travelled to all, so all propose the same.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from motley.plan.speed_table import SpeedTable
from motley.plan.split import Floats, Speeds, split

WINDOW = 8  # steps; their median forgives single slow ones
SPANS = (WINDOW, 2 * WINDOW)  # steps; the longer is surer of a small gain, and later
STEPS_IN_A_ROW = 4  # steps in a row that must ask for another split: no oscillation
DEAD_BAND = 0.08  # of a step that another split must save, seen over WINDOW: less may be noise
_REMEMBERED = 8  # splits of which it is known what computing takes; a growing batch has many


@dataclass(frozen=True)
class Proposal:
    """Another split.

    Attributes:
        counts: samples of each rank.
        slowdown: of each rank, against its measured speed; 2.0 takes twice as long.
        gain: part of the step's compute time that it should save.
    """

    counts: tuple[int, ...]
    slowdown: tuple[float, ...]
    gain: float


class ReplanMonitor:
    """The last steps of all ranks.

    Args:
        speeds: as measured before training; empty for a plan made by hand, which stays.
        kinds: ranks of one kind are equal (CPU ranks of one machine), noise must not tell
            them apart; one a rank.
    """

    def __init__(self, speeds: Sequence[SpeedTable], kinds: Sequence[Hashable]) -> None:
        self._tables, self._kinds = tuple(speeds), _Kinds(kinds)
        self._slowdown = np.ones(len(speeds))  # of each rank, when it last had something to do
        self.forget()

    def forget(self) -> None:
        """Start anew, after a change."""
        self._speeds = Speeds(self._tables) if len(self._tables) > 1 else None
        self._loads: dict[tuple[int, ...], _Load] = {}
        self._steps: deque[Floats] = deque(maxlen=max(SPANS))
        self._asked = 0

    def limit(self, micro_batches: Sequence[int]) -> None:
        """Expect no larger micro-batches than these, one size a rank, from now on."""
        pairs = zip(self._tables, micro_batches, strict=False)  # no speeds: a plan made by hand
        self._tables = tuple(table.at_most(size) for table, size in pairs)
        self.forget()

    def step(
        self, ready_s: Sequence[float], counts: Sequence[int], full: Sequence[int] | None = None
    ) -> Proposal | None:
        """Take in a step.

        Args:
            ready_s: each rank's data and compute until its gradient was ready, seconds.
            counts: samples of each rank in it.
            full: of each rank in a full batch, which a growing one is not yet; None: ``counts``.
        """
        if self._speeds is None:
            return None
        usual, took = self._load(self._speeds, counts).ready_s, np.array(ready_s)
        works = usual > 0  # who had nothing to do showed nothing
        self._slowdown[works] = np.maximum(took[works] / usual[works], 1e-6)
        self._steps.append(self._slowdown.copy())
        steps = np.array(self._steps)
        load = self._load(self._speeds, full or counts)
        # The noise of a median falls with the root of what it is taken of.
        bands = ((span, DEAD_BAND * math.sqrt(WINDOW / span)) for span in SPANS)
        found = (
            self._propose(self._speeds, load, _median(steps[-span:]), band)
            for span, band in bands if len(steps) >= span
        )  # fmt: skip
        proposal = next((each for each in found if each), None)
        self._asked = self._asked + 1 if proposal else 0
        return proposal if self._asked >= STEPS_IN_A_ROW else None

    def _load(self, speeds: Speeds, counts: Sequence[int]) -> "_Load":
        """Most steps ask of the same samples."""
        key = tuple(counts)
        if key not in self._loads:
            if len(self._loads) >= _REMEMBERED:
                self._loads.clear()
            self._loads[key] = _Load.of(speeds, key, self._tables[0].grain)
        return self._loads[key]

    def _propose(
        self, speeds: Speeds, load: "_Load", slowdown: Floats, band: float
    ) -> Proposal | None:
        """Another split, if it saves more than ``band`` of a step.

        Args:
            load: of the split that there is. slowdown: of each rank, against its measured speed.
        """
        slowdown = self._kinds.median(slowdown)
        old = (speeds.step_s + speeds.ready_s(load.samples, slowdown, load.computed_s)).max()
        # So quick that each step can ask it: could all together be faster by so much? And who is
        # not left without a sample, with the least that it keeps?
        enough = (1 - band) * old
        soonest = speeds.step_s + speeds.ready_s(load.least, slowdown, load.least_s)
        if soonest[load.least > 0].max() > enough:
            return None
        if speeds.whole_in(enough, slowdown).sum() < sum(load.counts):
            return None
        pairs = zip(self._tables, slowdown.tolist(), strict=True)
        tables = [table.slower(factor) for table, factor in pairs]
        counts, grain = load.counts, self._tables[0].grain
        better = _all_seen(split(sum(counts), tables), counts, grain)
        gain = float(1 - speeds.seconds_of(np.array(better, dtype=float), slowdown).max() / old)
        return Proposal(better, tuple(slowdown.tolist()), gain) if gain > band else None


@dataclass(frozen=True)
class _Load:
    """A split, and what computing it takes, of each rank at its measured speed.

    Attributes:
        samples: ``counts``. computed_s, ready_s: see Speeds. least, least_s: samples that each who
            works would keep, and ``computed_s`` of these.
    """

    counts: tuple[int, ...]
    samples: Floats
    computed_s: Floats
    ready_s: Floats
    least: Floats
    least_s: Floats

    @classmethod
    def of(cls, speeds: Speeds, counts: tuple[int, ...], grain: int) -> "_Load":
        """Of these samples."""
        samples = np.array(counts, dtype=float)
        least = np.minimum(samples, grain)
        computed_s = speeds.computed_s(samples)
        ready_s = speeds.ready_s(samples, computed_s=computed_s)
        return cls(counts, samples, computed_s, ready_s, least, speeds.computed_s(least))


def _median(steps: Floats) -> Floats:
    """Of each rank; NumPy's own takes eight times as long for a thousand."""
    ordered = np.sort(steps, axis=0)
    middle: Floats = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return middle


class _Kinds:
    """Which ranks are of one kind, in an order in which each kind is together."""

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._of = np.array([numbers[kind] for kind in kinds], dtype=int)
        self._size = np.bincount(self._of, minlength=len(numbers))
        self._begin = np.cumsum(self._size) - self._size

    def median(self, values: Floats) -> Floats:
        """Each rank's value is that of the middle of its kind."""
        if len(self._size) == len(values):
            return values
        ordered = values[np.lexsort((values, self._of))]
        low, high = self._begin + (self._size - 1) // 2, self._begin + self._size // 2
        middle: Floats = ((ordered[low] + ordered[high]) / 2)[self._of]
        return middle


def _all_seen(better: Sequence[int], counts: Sequence[int], grain: int) -> tuple[int, ...]:
    """The same, but whoever works keeps a sample, or what stays together: without one nobody sees
    it recover."""
    kept = [max(new, min(grain, old)) for new, old in zip(better, counts, strict=True)]
    for _ in range((sum(kept) - sum(counts)) // grain):
        kept[kept.index(max(kept))] -= grain
    return tuple(kept)

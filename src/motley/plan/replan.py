"""Watches whether the split still fits while training runs, and proposes a better one. Pure.

Every rank feeds it the same numbers, which have travelled to all, so all propose the same.
"""

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from motley.plan.split import SpeedTable, split

WINDOW = 8  # steps; their median forgives single slow ones
SPANS = (WINDOW, 2 * WINDOW)  # steps; the longer is surer of a small gain, and later
STEPS_IN_A_ROW = 4  # steps in a row that must ask for another split: no oscillation
DEAD_BAND = 0.08  # of a step that another split must save, seen over WINDOW: less may be noise


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
        self._speeds, self._kinds = tuple(speeds), tuple(kinds)
        self._slowdown = [1.0] * len(speeds)
        self.forget()

    def forget(self) -> None:
        """Start anew, after a change."""
        self._steps: deque[tuple[float, ...]] = deque(maxlen=max(SPANS))
        self._asked = 0

    def limit(self, micro_batches: Sequence[int]) -> None:
        """Expect no larger micro-batches than these, one size a rank, from now on."""
        pairs = zip(self._speeds, micro_batches, strict=False)  # no speeds: a plan made by hand
        self._speeds = tuple(speed.at_most(size) for speed, size in pairs)
        self.forget()

    def step(self, ready_s: Sequence[float], counts: Sequence[int]) -> Proposal | None:
        """Take in a full step.

        Args:
            ready_s: each rank's data and compute until its gradient was ready, seconds.
            counts: samples of each rank in it.
        """
        if len(self._speeds) < 2:
            return None
        self._steps.append(tuple(ready_s))
        seen = ((span, self._propose(counts, span)) for span in SPANS if len(self._steps) >= span)
        # The noise of a median falls with the root of what it is taken of.
        better = (p for span, p in seen if p.gain > DEAD_BAND * math.sqrt(WINDOW / span))
        proposal = next(better, None)
        self._asked = self._asked + 1 if proposal else 0
        return proposal if self._asked >= STEPS_IN_A_ROW else None

    def _propose(self, counts: Sequence[int], span: int) -> Proposal:
        last = islice(self._steps, len(self._steps) - span, None)
        took = [statistics.median(column) for column in zip(*last, strict=True)]
        for rank, (speed, n) in enumerate(zip(self._speeds, counts, strict=True)):
            if n:  # who had nothing to do showed nothing
                self._slowdown[rank] = max(took[rank] / (speed.seconds_of(n) - speed.step_s), 1e-6)
        slowdown = [
            statistics.median(
                s for s, k in zip(self._slowdown, self._kinds, strict=True) if k == kind
            )
            for kind in self._kinds
        ]
        now = [
            replace(speed, seconds=tuple(s * factor for s in speed.seconds))
            for speed, factor in zip(self._speeds, slowdown, strict=True)
        ]
        better = _all_seen(split(sum(counts), now), counts, now[0].grain)
        old = max(speed.seconds_of(n) for speed, n in zip(now, counts, strict=True))
        new = max(speed.seconds_of(n) for speed, n in zip(now, better, strict=True))
        return Proposal(better, tuple(slowdown), 1 - new / old)


def _all_seen(better: Sequence[int], counts: Sequence[int], grain: int) -> tuple[int, ...]:
    """The same, but whoever works keeps a sample, or what stays together: without one nobody sees
    it recover."""
    kept = [max(new, min(grain, old)) for new, old in zip(better, counts, strict=True)]
    for _ in range((sum(kept) - sum(counts)) // grain):
        kept[kept.index(max(kept))] -= grain
    return tuple(kept)

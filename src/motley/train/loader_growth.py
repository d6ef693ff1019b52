"""Loader processes that are added while a run goes on.

A trial of a fraction of a second, before training, says little about the hours that follow.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from motley.records.training import StepRecord

WINDOW = 16  # steps that are judged together
WORTH_IT = 0.03  # of the time, that a rank waits for its samples
_SETTLING = 4  # steps behind a change, in which new processes make their first batches
_STALLS = 2  # steps of a window that may have waited for anything, such as a slow file
_HELPED = 0.8  # of that wait; more is left where the disk or something else is the limit


@dataclass(frozen=True)
class Growth:
    """A wish for more loader processes.

    Attributes:
        workers: that there should be. waited: part of the time that the rank waits for samples.
    """

    workers: int
    waited: float


class LoaderGrowth:
    """Decides from finished steps when a rank adds loader processes: one, then twice as many.

    It stops for good once an addition has not shortened the wait.

    Args:
        workers: that there are. most: that there may be.
        idle_cores: returns how many of the rank's cores did nothing since it was called last.
    """

    def __init__(
        self, workers: int, most: int, idle_cores: Callable[[], float] | None = None
    ) -> None:
        self._workers, self._most = workers, most
        self._idle_cores = idle_cores or _idle_cores
        self._seen = -1  # the last step
        self._before: float | None = None  # the wait, when processes were added last
        self._steps: list[tuple[float, float]] = []  # seconds waited, and of the step
        self._skip = _SETTLING

    def step(self, record: StepRecord) -> Growth | None:
        """Take in a finished step of this rank; return a wish, or None."""
        if self._workers >= self._most or record.step == self._seen:
            return None
        self._seen = record.step
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._idle_cores()
            return None
        # While others take longer still, input costs this rank nothing.
        waited = record.t_data - (record.t_wait or 0.0)
        self._steps.append((waited, record.n_global / record.samples_per_s))
        if len(self._steps) < WINDOW:
            return None
        usual = sorted(self._steps)[:-_STALLS]
        waited, total = map(sum, zip(*usual, strict=True))
        part, idle, before = waited / total, self._idle_cores(), self._before
        self._steps, self._before = [], None
        if before is not None and part > _HELPED * before:
            self._most = 0
        if part < WORTH_IT:
            return None
        added = min(max(1, self._workers), self._most - self._workers, round(idle))
        return Growth(self._workers + added, part) if added > 0 else None

    def take(self, workers: int, waited: float) -> None:
        """Go on with so many processes; see :class:`Growth`. As many as before: no more fit."""
        if workers == self._workers:
            self._most = workers
        self._before, self._workers = waited, workers
        self._steps, self._skip = [], _SETTLING


def _idle_cores() -> float:
    """Return how many of this process's cores did nothing since the last call."""
    own = os.sched_getaffinity(0)
    used = enumerate(psutil.cpu_percent(percpu=True))
    return sum(1 - percent / 100 for core, percent in used if core in own)

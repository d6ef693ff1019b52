"""How long a re-planner waits after a move that brought nothing. Pure."""

import numpy as np

from motley.plan.evidence import LONGEST
from motley.plan.split import Floats

_FIRST = 64  # steps before a failed move is tried again
_MOST = 4096  # steps
_CALM = 16  # waits without a failure after which a wait is the first again
_PATIENCE = 8  # steps that must show a change of another rank after a failure
_FORGIVEN = 256  # steps without a failure after which half as many must


class BackOff:
    """Waiting times of all ranks, apart for a rank that seems slower and one that seems faster.

    A rank whose move has failed waits twice as long each time, and then needs a window of as many
    steps, or the longest. All other ranks need longer windows too, but wait for no time: noise that
    has misled once may do so again, and a machine that halves its speed must be followed.
    """

    def __init__(self, size: int) -> None:
        self._until = np.zeros((2, size))  # step
        self._wait = np.zeros((2, size))  # steps
        self._patience = np.zeros((2, 1), dtype=int)  # least window of any rank, in steps
        self._failed = 0  # last step of a failure

    def add_failure(self, change: Floats, step: int) -> None:
        """Add a failed move.

        Args:
            change: ratio of each rank's slowdown that was seen; above 1 is slower.
        """
        ranks = np.array([change > 1, change < 1])
        is_calm = step > self._until + _CALM * self._wait
        longer = np.where(is_calm, _FIRST, np.minimum(2 * self._wait, _MOST))
        self._wait = np.where(ranks, longer, self._wait)
        self._until = np.where(ranks, step + self._wait, self._until)
        more = np.clip(2 * self._patience, _PATIENCE, LONGEST)
        self._patience = np.where(ranks.any(axis=1, keepdims=True), more, self._patience)
        self._failed = step

    def allow(self, change: Floats, window: int, step: int) -> Floats:
        """Return the change, with 1 for ranks that wait or need a longer window."""
        if step > self._failed + _FORGIVEN:
            self._patience, self._failed = self._patience // 2, step
        has_failed = step <= self._until + _CALM * self._wait
        needs_more = has_failed & (np.minimum(self._wait, LONGEST) > window)
        slower, faster = (step < self._until) | needs_more | (self._patience > window)
        return np.where((slower & (change > 1)) | (faster & (change < 1)), 1.0, change)

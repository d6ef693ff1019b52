"""When a checkpoint is due by the clock: all ranks agree on it, and talk about it seldom."""

import time

from motley.comm.collectives import all_gather_floats
from motley.config.option import Duration


class SaveTimer:
    """Asks rank 0's clock when half of the time that is left should have passed: some ten times
    between two checkpoints, so that their steps need not be known before.

    Args:
        every: between checkpoints; anything but a time: never by the clock.
    """

    def __init__(self, every: object, step: int) -> None:
        self._every_s = every.seconds if isinstance(every, Duration) else None
        self.saved(step)

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step."""
        self._step, self._time, self._ask_at = step, time.monotonic(), step + 1

    def asks(self, step: int) -> bool:
        """Return True if :meth:`due` talks to the other ranks at this step."""
        return self._every_s is not None and step >= self._ask_at

    def due(self, step: int) -> bool:
        """Whether one is to be made now; all ranks call it, after the same step."""
        if not self.asks(step):
            return False
        assert self._every_s is not None
        ((passed_s,), *_) = all_gather_floats([time.monotonic() - self._time])
        steps = max(1, step - self._step)
        left = (self._every_s - passed_s) / (passed_s / steps) if passed_s else 1.0
        self._ask_at = step + max(1, int(left / 2))
        return left < 1

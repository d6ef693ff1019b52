"""Which of several faults is blamed: one leads to others, and its echo may be heard before it."""

import time

from motley.faults import Fault, FaultKind


class FirstCause:
    """The best cause so far, until it is time to blame it.

    Attributes:
        fault: that cause; None: there is no fault.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._deadline = 0.0

    def suspect(self, fault: Fault, within_s: float) -> Fault:
        """Blame ``fault`` unless a better cause turns up in time; the best so far."""
        deadline = time.monotonic() + within_s
        if self.fault is not None:
            fault = max(self.fault, fault, key=_weight)  # the first of equals
            deadline = min(deadline, self._deadline)
        self.fault, self._deadline = fault, deadline
        return fault

    def forget(self) -> None:
        """What was heard was the echo of something else."""
        self.fault = None

    def due(self) -> Fault | None:
        """The cause to blame now, if it is time."""
        return self.fault if time.monotonic() >= self._deadline else None

    def due_in(self, at_most: float) -> float:
        """Seconds until then."""
        left = at_most if self.fault is None else self._deadline - time.monotonic()
        return min(at_most, max(0.0, left))


def _weight(fault: Fault) -> int:
    """A failure counts more than the launcher's stop for it, and that more than one rank's."""
    return 2 if not fault.signal else int(fault.kind is FaultKind.STOPPED)

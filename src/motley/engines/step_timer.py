"""The time of one rank by activity, in laps. On a GPU it is measured without a wait."""

import time
from collections import deque
from collections.abc import Callable
from functools import cached_property
from statistics import median
from typing import Any

import torch

from motley.faults import Phase

# The host's phase after each lap. A lap of the loop's own Python does not change the phase.
_AFTER = {
    "data": Phase.FORWARD,
    "compute": Phase.DATA,
    "sync": Phase.OPTIMIZER,
    "opt": Phase.DATA,
}
HOST = "host"
# Python's time in a step that is far above the usual: this many times the median, and seconds more.
_FAR, _FAR_S = 3.0, 0.01
_REMEMBERED = 15  # steps of which the usual time is the median
LAPS = (HOST, *_AFTER)  # all names; these laps together are the step


class Clock:
    """A clock that divides one rank's time into named laps, which sum to the whole.

    On a GPU, events in the device's stream mark the laps. Work that was queued ahead counts when it
    runs, and the host need not wait.

    Attributes:
        on_phase: called with the phase that the host starts.
        at_once: the time at which the rank was ready is sent within the same step. This is possible
            if all ranks compute on CPUs, whose times are known immediately. Otherwise it is sent
            with the next step.
    """

    at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self._host_s: deque[float] = deque(maxlen=_REMEMBERED)  # of the last steps
        self.restart()

    def restart(self) -> None:
        """Discard all laps; the next lap starts now."""
        self._marks: list[tuple[str, Any]] = [("", self._now())]
        self._last: Laps | None = None

    @property
    def ready_s(self) -> float:
        """Seconds from the start of the last step until this rank's own gradient was ready.

        With ``at_once`` it is the current step. Otherwise the value after a pause is 0.0.
        """
        if self.at_once:
            return Laps(self._marks).ready_s
        return self._last.ready_s if self._last else 0.0

    def measure_own_s(self, compute_s: float | None = None) -> float:
        """Return the seconds of own work in the step of :attr:`ready_s`, without any wait.

        A step with several optimizers waits for the other ranks more than once. Python's time far
        above that of the steps measured before is left out, as of an evaluation or a save by one
        rank alone: another share would not change it.

        Args:
            compute_s: seconds of computing, where the laps include waits; None: those of the laps.
        """
        laps = Laps(self._marks) if self.at_once else self._last
        if laps is None:
            return 0.0
        host_s = laps.seconds(HOST)
        self._host_s.append(host_s)
        usual_s = _FAR * median(self._host_s) + _FAR_S
        if compute_s is None:
            compute_s = laps.seconds("compute")
        return laps.seconds("data") + compute_s + min(host_s, usual_s)

    def lap(self, name: str, ready: bool = False) -> None:
        """End a lap, and attribute the time since the last mark to it.

        Args:
            name: name of the lap, in a step one of LAPS.
            ready: True if this rank's gradient is complete, and it needs those of the other ranks
                now.
        """
        self._marks.append((name, self._now()))
        if name != HOST:
            self.on_phase(Phase.ALL_REDUCE if ready else _AFTER.get(name, Phase.FORWARD))

    def end_wait(self) -> None:
        """Attribute the time since the last mark to a wait for other ranks, in the same phase."""
        self._marks.append(("sync", self._now()))

    def cut(self) -> "Laps":
        """Return the laps of the finished step. The next step starts where the last lap ended."""
        self._last, self._marks = Laps(self._marks), [("", self._marks[-1][1])]
        return self._last

    def _now(self) -> Any:
        return mark_time(self._device)


class Laps:
    """The laps of one step.

    Reading them on a GPU waits until the device has passed the last mark.
    """

    def __init__(self, marks: list[tuple[str, Any]]) -> None:
        self._marks = marks

    @property
    def ready_s(self) -> float:
        """Seconds until the end of the last compute lap, when the rank's gradient was ready."""
        last = max((place for place, (name, _) in enumerate(self._laps) if name == "compute"),
                   default=-1)  # fmt: skip
        return sum(seconds for _, seconds in self._laps[: last + 1])

    def seconds(self, *names: str) -> float:
        """Return the time spent on ``names`` together."""
        return sum(seconds for name, seconds in self._laps if name in names)

    @cached_property
    def _laps(self) -> list[tuple[str, float]]:
        times = [time for _, time in self._marks]
        if len(times) > 1 and not isinstance(times[-1], float):
            times[-1].synchronize()
        return [
            (name, seconds_between(start, end))
            for (name, end), start in zip(self._marks[1:], times, strict=False)
        ]


def mark_time(device: torch.device) -> Any:
    """Return a mark of the present time: seconds, or an event in the stream of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks of :func:`mark_time`, which a GPU has passed."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000

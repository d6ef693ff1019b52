"""The time of one rank in each activity of a step, measured without GPU synchronisation.

A lap is a period of time in one activity, such as reading data or computing.
"""

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
    """A clock that divides one rank's time into laps, which together are the whole time.

    A lap is a period of time in one activity, such as reading data or computing. On a GPU, events
    in the device's stream mark the ends of laps. Queued work thus counts at the time when the GPU
    runs the work, and the host need not wait.

    Attributes:
        on_phase: function that is called with the phase that the host starts.
        at_once: True if all ranks compute on CPUs, whose times are known immediately. Each step
            then sends its own :attr:`ready_s` to the other ranks. False: each step sends the value
            of the step before.
    """

    at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self._host_s: deque[float] = deque(maxlen=_REMEMBERED)  # Python's time in the last steps
        self.restart()

    def restart(self) -> None:
        """Discard all laps. The next lap starts now."""
        self._marks: list[tuple[str, Any]] = [("", self._now())]
        self._last: Laps | None = None

    @property
    def ready_s(self) -> float:
        """Seconds from the start of the last step until this rank's own gradient was ready.

        With ``at_once`` the value is that of the current step. Otherwise it is 0.0 after a
        :meth:`restart`.
        """
        if self.at_once:
            return Laps(self._marks).ready_s
        return self._last.ready_s if self._last else 0.0

    def measure_own_s(self, compute_s: float | None = None) -> float:
        """Return the seconds of this rank's own work in a step, without waits for other ranks.

        The step is the one that :attr:`ready_s` describes. Python's time counts only up to a limit
        above the median of the last steps. A longer time comes from work that does not depend on
        the rank's share, such as an evaluation on one rank.

        Args:
            compute_s: seconds of computing, if the laps named ``compute`` include waits. None: use
                the time of these laps.
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
        """End a lap, which lasts from the end of the previous lap until now.

        Args:
            name: name of the activity in this lap. Within a step, the name is one of LAPS.
            ready: True if this rank's gradient is complete, and the rank waits for the gradients of
                the other ranks next.
        """
        self._marks.append((name, self._now()))
        if name != HOST:
            self.on_phase(Phase.ALL_REDUCE if ready else _AFTER.get(name, Phase.FORWARD))

    def end_wait(self) -> None:
        """End a lap in which this rank has waited for other ranks."""
        self._marks.append(("sync", self._now()))

    def cut(self) -> "Laps":
        """Return the laps of the finished step. The next step starts at the end of its last lap."""
        self._last, self._marks = Laps(self._marks), [("", self._marks[-1][1])]
        return self._last

    def _now(self) -> Any:
        return mark_time(self._device)


class Laps:
    """The laps of one step: the time of each activity.

    On a GPU, the methods wait until the device has finished the last lap.
    """

    def __init__(self, marks: list[tuple[str, Any]]) -> None:
        self._marks = marks

    @property
    def ready_s(self) -> float:
        """Seconds from the start of the step until this rank's gradient was ready."""
        last = max((place for place, (name, _) in enumerate(self._laps) if name == "compute"),
                   default=-1)  # fmt: skip
        return sum(seconds for _, seconds in self._laps[: last + 1])

    def seconds(self, *names: str) -> float:
        """Return the total seconds of all laps with these names."""
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
    """Return a mark of the current time: seconds for a CPU, or an event in a GPU's stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks of :func:`mark_time` that the device has reached."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000

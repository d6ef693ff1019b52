"""How long the parts of a start take, from the launch of this process to where it trains.

    imports      since the process began, its environment included, until all ranks have imported
                 and meet by MPI
    connect      code, facts and addresses of all hosts; the supervisor
    prepare      the run's folder, and the data on each host's disk
    group        the process group, and the precision of each rank
    model        built, with the data opened and the initial weights read
    speeds       of all devices, measured, or remembered and tried
    links        between machines, and
    wires        adding up gradients, measured where they are not remembered
    compile      the trial of compiling the model
    plan         the arithmetic between them
    engine       the loader, the loss scale, the engine, what is resumed

A part that was not there has no entry.
"""

import os
import time

from motley.cluster.processes import ticks

_SHOWN_S = 0.05


class StartClock:
    """Cuts one rank's start into parts that sum to the whole, in the order in which they ended.

    Args:
        before_s: seconds that this process has lived, all of which it imported for.
    """

    def __init__(self, before_s: float | None = None) -> None:
        self._parts = {} if before_s is None else {"imports": before_s}
        self._last = time.perf_counter()

    @classmethod
    def of_process(cls) -> "StartClock":
        """Made where this process has imported what it needs: it has done nothing else yet."""
        started_s = ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        return cls(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)

    def lap(self, part: str) -> None:
        """End a part: the time since the last one ended was spent on it; one may come again."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def as_json(self) -> dict[str, float]:
        """Seconds by part."""
        return {part: round(seconds, 4) for part, seconds in self._parts.items()}

    def sentence(self) -> str:
        """For the log, without what is over before one could read of it."""
        parts = dict(self._parts)
        imports_s = parts.pop("imports", 0.0)
        said = ", ".join(f"{part} {s:.1f} s" for part, s in parts.items() if s >= _SHOWN_S)
        after = f" after {imports_s:.1f} s of imports" if imports_s >= _SHOWN_S else ""
        return f"ready in {sum(parts.values()):.1f} s{after}{': ' if said else ''}{said}"

"""The watch over the start of a job, and the clock of the parts of a start.

A process beside each rank ends the rank if not all ranks start.

A launcher waits without end for a rank that is stopped, or a host that is frozen, before it has
joined the others, and so does MPI, inside of which no thread of Python's runs. Each rank that is
ready to join therefore has a process watch the time. This process sees the ranks of its machine by
their processes, and nothing of the others. A process that can name a rank speaks first, and the
lowest rank of its machine. Where all are stopped while they import, none is ready: until it is, a
rank has another one watch.

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

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from motley.cluster.launcher import RANKS, read_launch
from motley.cluster.processes import ticks
from motley.errors import MotleyError
from motley.launch.process import die_with_parent
from motley.membership.reaper import find_sessions, reap_after_this_process
from motley.text import typed_command

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
    def for_process(cls) -> "StartClock":
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
        text = ", ".join(f"{part} {s:.1f} s" for part, s in parts.items() if s >= _SHOWN_S)
        after = f" after {imports_s:.1f} s of imports" if imports_s >= _SHOWN_S else ""
        return f"ready in {sum(parts.values()):.1f} s{after}{': ' if text else ''}{text}"


TIMEOUT_VARIABLE = "MOTLEY_START_TIMEOUT"
_TIMEOUT_S = 120.0  # torch from a cold disk of a network takes one of them
_TURN_S = 1.0  # between the ranks of a machine: who has spoken ends the others
_OTHERS_S = 4.0  # for machines that can name a rank
_WATCHES = "motley.launch.start_watch"
_IMPORTS = "imports"  # a word of the command line
_LOOK_S = 1.0


class StartWatch:
    """A rank's end of it: runs from here to :meth:`joined`; nothing for a rank alone.

    Raises:
        MotleyError: the variable holds no number of seconds.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        seconds = start_timeout(environ)
        if read_launch(environ).size > 1 and seconds > 0:
            command = [sys.executable, "-P", "-m", _WATCHES, str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                start_new_session=True,  # a launcher ends a rank's whole group, and it with it
            )  # fmt: skip

    def joined(self) -> None:
        """All ranks have started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def watch_imports(environ: Mapping[str, str] = os.environ) -> object:
    """Start a process that reports if this rank is stopped before it is ready; it ends by itself.

    Returns:
        An object that has to live as long as this process.
    """
    with contextlib.suppress(MotleyError):  # StartWatch will say it
        if read_launch(environ).size > 1 and (seconds := start_timeout(environ)) > 0:
            command = [sys.executable, "-P", "-m", _WATCHES, str(os.getpid())]
            return subprocess.Popen(
                [*command, str(seconds), _IMPORTS], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    return None


def start_timeout(environ: Mapping[str, str]) -> float:
    """Seconds in which all ranks should start; 0: as long as it takes."""
    text = environ.get(TIMEOUT_VARIABLE, str(_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise MotleyError(
            f"{TIMEOUT_VARIABLE}={text} is no number of seconds; write {_TIMEOUT_S:.0f}, say, or "
            "0 to wait as long as it takes"
        )
    return seconds


@dataclass(frozen=True)
class Sibling:
    """A rank of this machine, as its kernel sees it.

    Attributes:
        stopped: by a signal or a debugger. ready: it has begun to join the others.
    """

    rank: int
    pid: int
    stopped: bool
    ready: bool


def siblings(pid: int) -> list[Sibling]:
    """All ranks that the launcher of process ``pid`` has started here, in order."""
    launcher = _stat(pid)[1]
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, parent = _stat(int(folder.name))
            if parent != launcher:
                continue
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(word.split("=", 1) for word in words if "=" in word)
            if state != "Z" and any(name in environ for name in RANKS):
                number = int(folder.name)
                rank = read_launch(environ).rank
                result.append(Sibling(rank, number, state in "Tt", _is_ready(number)))
    return sorted(result, key=lambda sibling: sibling.rank)


def words(
    here: list[Sibling], local_size: int, size: int, host: str, hosts: list[str], seconds: float
) -> str:
    """Return a sentence on a start that takes too long.

    Args:
        here: ranks of this machine.
        local_size: number of ranks on this machine if all are there.
        size: number of ranks of the job.
        host: name of this machine.
        hosts: names of the other hosts, if they are available.
        seconds: seconds since the begin of the start.
    """
    begin = f"not all ranks have started within {seconds:.0f} s: "
    longer = f"give it longer with {TIMEOUT_VARIABLE}=600 (seconds)"
    named = "; ".join(
        f"rank {s.rank} on {host} (process {s.pid}) is "
        + ("stopped" if s.stopped else "still reading its program")
        for s in here
        if s.stopped or not s.ready
    )
    if named:
        slow = not all(s.stopped for s in here if s.stopped or not s.ready)
        return begin + named + (f"; {longer}" if slow else "; start it again")
    if len(here) < local_size:
        return f"{begin}{local_size - len(here)} of {local_size} on {host} are gone; see above why"
    if size == local_size:
        return f"{begin}those of {host} wait for each other in MPI; see whether MPI works here"
    others = sorted(set(range(size)) - {s.rank for s in here})
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    where = f" ({', '.join(hosts)})" if hosts else ""
    return (
        f"{begin}those of {host} have, so it is one of ranks {shown} on other hosts{where}, which "
        "is frozen, off, cut off or slow; see which with: bash setup/test_cn_connection.sh, or "
        + longer
    )


def _stat(pid: int) -> tuple[str, int]:
    """State and parent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _main() -> None:
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    die_with_parent()
    launch = read_launch()
    turn = launch.rank if launch.local_rank is None else launch.local_rank
    if _IMPORTS in sys.argv:
        if _is_stopped_early(pid, seconds + _TURN_S * turn):
            _end(pid, seconds)
        return
    if _ends_within(seconds + _TURN_S * turn):
        return
    none_known = all(sibling.ready and not sibling.stopped for sibling in siblings(pid))
    if none_known and _ends_within(_OTHERS_S):
        return
    _end(pid, seconds)


def _is_stopped_early(pid: int, seconds: float) -> bool:
    """Return True if a rank is found stopped after some seconds, and none is ready to report it.

    Return False as soon as the rank is ready, or ends. A user who stops mpirun too (Ctrl-Z) means
    it.
    """
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while not _ends_within(_LOOK_S) and not _is_ready(pid):
            state, launcher = _stat(pid)
            late = time.monotonic() > deadline
            if late and state == "T" and _stat(launcher)[0] != "T":
                return not any(sibling.ready for sibling in siblings(pid))
    return False


def _is_ready(pid: int) -> bool:
    """Return True if the rank has begun to join the others, which a process watches."""
    with contextlib.suppress(psutil.Error):  # it has just ended
        return any(map(_watches_start, psutil.Process(pid).children()))
    return False


def _watches_start(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return _WATCHES in words and words[-1] != _IMPORTS
    return False


def _ends_within(seconds: float) -> bool:
    """Return True if this rank ends in time, as the end of this process's input shows."""
    return bool(select.select([0], [], [], seconds)[0])


def _end(pid: int, seconds: float) -> None:
    """Say what is wrong, and end the job: a launcher ends it when a rank is killed."""
    here, launcher = siblings(pid), _stat(pid)[1]
    launch, hosts = read_launch(), [*find_sessions(launcher).values()]
    local = launch.local_size or len(here)
    line = words(here, local, launch.size, os.uname().nodename, hosts, seconds)
    die_with_parent(0)  # from here on this process outlives the rank
    with contextlib.suppress(OSError):
        print(f"motley: {typed_command(line)}", file=sys.stderr, flush=True)
    time.sleep(0.2)  # let the launcher pass it on
    reap_after_this_process(launcher)
    for sibling in here:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sibling.pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()

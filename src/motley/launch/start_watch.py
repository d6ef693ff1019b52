"""The watch over the start of a job, and a clock that measures the parts of a start.

A process beside each rank ends the rank if another rank does not start.

A rank may be stopped, or its host frozen, before it has joined the other ranks. The launcher then
waits for this rank for ever. MPI waits too, and no Python thread runs while MPI waits. Each rank
that is ready to join therefore starts a process that watches the time. The watching process sees
the other ranks of its machine in /proc, and nothing of other machines. Processes that can name a
late rank report first. On each machine, only the process of the lowest rank reports. If all ranks
are stopped during their imports, no rank has started this process yet. Each rank therefore has a
second process, which watches the rank until it is ready to join.

    imports      the time from the start of the process, its environment included, until all ranks
                 have imported their modules and MPI has joined them
    connect      comparison of code, exchange of facts and addresses of all hosts, the supervisor
    prepare      the run's folder, and the data on each host's disk
    group        the process group, and the precision of each rank
    model        the model is built, the data is opened, and the initial weights are read
    speeds       the speeds of all devices are measured, or stored speeds are checked
    links        the links between machines are measured, unless stored by an earlier run
    wires        the wire modes (ways to add up gradients) are measured, unless stored
    compile      the trial of compiling the model
    plan         the computation of the plan from these measurements
    engine       the loader, the loss scale, the engine and the resumed state are set up

A part that did not take place has no entry.
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
    """A clock that divides one rank's start into parts, in the order in which they ended.

    Args:
        before_s: age of this process in seconds, which counts as the part ``imports``; None: the
            age does not count.
    """

    def __init__(self, before_s: float | None = None) -> None:
        self._parts = {} if before_s is None else {"imports": before_s}
        self._last = time.perf_counter()

    @classmethod
    def for_process(cls) -> "StartClock":
        """Create the clock of a process that has only imported its modules so far."""
        started_s = ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        return cls(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)

    def lap(self, part: str) -> None:
        """End a part: add the time since the end of the previous part to ``part``."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def as_json(self) -> dict[str, float]:
        """Return the duration of each part in seconds, by name."""
        return {part: round(seconds, 4) for part, seconds in self._parts.items()}

    def sentence(self) -> str:
        """Return a sentence for the log with the seconds of each part of at least 0.05 s."""
        parts = dict(self._parts)
        imports_s = parts.pop("imports", 0.0)
        text = ", ".join(f"{part} {s:.1f} s" for part, s in parts.items() if s >= _SHOWN_S)
        after = f" after {imports_s:.1f} s of imports" if imports_s >= _SHOWN_S else ""
        return f"ready in {sum(parts.values()):.1f} s{after}{': ' if text else ''}{text}"


TIMEOUT_VARIABLE = "MOTLEY_START_TIMEOUT"
_TIMEOUT_S = 120.0  # importing torch from a cold network disk takes about half of it
_TURN_S = 1.0  # seconds between reports of a machine's ranks: the first report ends the others
_OTHERS_S = 4.0  # seconds in which a machine that can name a late rank reports first
_WATCHES = "motley.launch.start_watch"
_IMPORTS = "imports"  # word in the command line of the process that watches imports
_LOOK_S = 1.0


class StartWatch:
    """A process that watches the start of the job for one rank, until :meth:`joined` is called.

    In a job of one rank, no process is started.

    Raises:
        MotleyError: MOTLEY_START_TIMEOUT is no number of seconds.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        seconds = start_timeout(environ)
        if read_launch(environ).size > 1 and seconds > 0:
            command = [sys.executable, "-P", "-m", _WATCHES, str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                start_new_session=True,  # a launcher ends all processes of a rank's group
            )  # fmt: skip

    def joined(self) -> None:
        """End the watch, because all ranks have started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def watch_imports(environ: Mapping[str, str] = os.environ) -> object:
    """Start a process that reports this rank if it is stopped before it is ready to join.

    The process ends once this rank is ready.

    Returns:
        An object that has to live as long as this process.
    """
    with contextlib.suppress(MotleyError):  # StartWatch will raise it
        if read_launch(environ).size > 1 and (seconds := start_timeout(environ)) > 0:
            command = [sys.executable, "-P", "-m", _WATCHES, str(os.getpid())]
            return subprocess.Popen(
                [*command, str(seconds), _IMPORTS], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    return None


def start_timeout(environ: Mapping[str, str]) -> float:
    """Return the time limit for the start of all ranks, in seconds; 0: no limit.

    Raises:
        MotleyError: MOTLEY_START_TIMEOUT is no number of seconds.
    """
    text = environ.get(TIMEOUT_VARIABLE, str(_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise MotleyError(
            f"{TIMEOUT_VARIABLE}={text} is not a number of seconds; write one, such as "
            f"{_TIMEOUT_S:.0f}, or 0 for no limit"
        )
    return seconds


@dataclass(frozen=True)
class Sibling:
    """A rank of this machine, with its state in /proc.

    Attributes:
        rank: number of the rank.
        pid: process id of the rank.
        stopped: True if a signal or a debugger has stopped the rank.
        ready: True if the rank has started to join the other ranks.
    """

    rank: int
    pid: int
    stopped: bool
    ready: bool


def siblings(pid: int) -> list[Sibling]:
    """Return all ranks on this machine that the launcher of process ``pid`` has started."""
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
        local_size: number of ranks that this machine should have.
        size: number of ranks of the job.
        host: name of this machine.
        hosts: names of the other hosts, if they are available.
        seconds: seconds since the beginning of the start.
    """
    begin = f"not all ranks have started within {seconds:.0f} s: "
    longer = f"if the hosts are slow, allow more seconds with {TIMEOUT_VARIABLE}=600"
    named = "; ".join(
        f"rank {s.rank} on {host} (process {s.pid}) is "
        + ("stopped" if s.stopped else "still importing its program")
        for s in here
        if s.stopped or not s.ready
    )
    if named:
        slow = not all(s.stopped for s in here if s.stopped or not s.ready)
        return begin + named + (f"; {longer}" if slow else "; start it again")
    if len(here) < local_size:
        return (
            f"{begin}{local_size - len(here)} of {local_size} on {host} have ended; the output "
            "above shows why"
        )
    if size == local_size:
        return (
            f"{begin}the ranks on {host} wait for each other in MPI; check that MPI works with: "
            "bash setup/test_mpi.sh"
        )
    others = sorted(set(range(size)) - {s.rank for s in here})
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    where = f" ({', '.join(hosts)})" if hosts else ""
    return (
        f"{begin}all ranks on {host} have started, so the host of one of ranks {shown}{where} is "
        "frozen, off, cut off or slow; find it with: bash setup/test_cn_connection.sh, or " + longer
    )


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and the parent's pid of a process, from /proc."""
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
    """Wait until a rank is ready or ends. Return True if it is stopped (SIGSTOP) meanwhile.

    The result is False if another rank of this host is ready, since that rank reports the stopped
    one. A rank is not reported while mpirun is stopped too: then the user has stopped the job on
    purpose (Ctrl-Z).

    Args:
        pid: process ID of the rank.
        seconds: time after which a stopped rank counts.
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
    """Return True if a rank has a watching process, which it starts when it is ready to join."""
    with contextlib.suppress(psutil.Error):  # the process has just ended
        return any(map(_watches_start, psutil.Process(pid).children()))
    return False


def _watches_start(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return _WATCHES in words and words[-1] != _IMPORTS
    return False


def _ends_within(seconds: float) -> bool:
    """Return True if the watched rank ends within ``seconds``.

    The end of the rank closes the standard input of this process.
    """
    return bool(select.select([0], [], [], seconds)[0])


def _end(pid: int, seconds: float) -> None:
    """Print why the start takes too long, and kill the ranks of this machine.

    The launcher then ends the job.
    """
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

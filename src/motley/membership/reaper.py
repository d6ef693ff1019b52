"""The reaper: a small process on each host that ends a hung launcher.

After its rank has died, the reaper ends an mpirun or daemon that hangs, and removes the files that
a killed launcher leaves.

mpirun ends when its daemon on every host has ended, and waits without end for one that is frozen or
cut off; a daemon waits for mpirun in the same way. Once mpirun is to stop, it passes on nothing
more of its ranks' output and kills them, at once or after a tenth of a second. Where mpirun is
killed itself, no other process is left to report that, to record it, and to remove its files.
"""

import contextlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from motley.cluster.launcher import MPIRUN
from motley.errors import MotleyError
from motley.faults import Fault, FaultKind
from motley.membership.fault_causes import (
    make_daemon_fault,
    make_death_fault,
    make_launcher_fault,
    record_fault,
)
from motley.membership.messages import greeting
from motley.records.run_folder import RunFolder

# sm_segment.HOST.USER.JOB.RANK, of Open MPI 5; 4.1 calls it vader_segment
_SEGMENT = re.compile(r"/dev/shm/((?:sm|vader)_segment\.\S+\.)\d+$", re.MULTILINE)


def segments_of_this_job() -> str:
    """Return the prefix of this job's shared memory in /dev/shm; empty if it has none.

    A rank maps its own, so they are known without a rule for numbers of jobs.
    """
    with contextlib.suppress(OSError):
        result = _SEGMENT.search(Path("/proc/self/maps").read_text(errors="replace"))
        return result[1] if result else ""
    return ""


def session_folder(launcher: int, environ: Mapping[str, str]) -> str:
    """Return the launcher's folder for its jobs, named by its process; empty if unknown."""
    folder = environ.get("PMIX_SERVER_TMPDIR", "")
    names = (f"/ompi.{launcher}", f"/pid.{launcher}", f"/prted.{launcher}")
    return folder if folder.endswith(names) else ""


def remove(segments: str, session: str) -> None:
    """Remove what is left of a job that has ended; what is another user's is not touched."""
    if segments:
        for path in Path("/dev/shm").glob("*"):
            if path.name.startswith(segments):
                with contextlib.suppress(OSError):
                    if _is_ours(path):
                        path.unlink()
    if session:
        with contextlib.suppress(OSError):
            if _is_ours(Path(session)):
                shutil.rmtree(session, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    return path.lstat().st_uid == os.getuid() and not path.is_symlink()


def find_sessions(launcher: int) -> dict[int, str]:
    """Return the process of each ssh session, with its host as hosts.txt has it.

    There are none, unless ``launcher`` is an mpirun that has started some.
    """
    result = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = child.cmdline()
                daemon = next((n for n, word in enumerate(words) if "prted" in word), 0)
                if daemon and any(word.endswith("ssh") for word in words[:2]):
                    result[child.pid] = words[daemon - 1].rpartition("@")[2]
    return result


class SshSessions:
    """Which session of a launcher ends first.

    mpirun loses a host with its session, or just before it, and ends the others with itself.
    """

    def __init__(self, launcher: int) -> None:
        self._first = ""
        self._hosts: dict[int, str] = {}  # of those that are open, by a descriptor of the process
        for pid, host in find_sessions(launcher).items():
            with contextlib.suppress(OSError):  # an older kernel, or it has just ended
                self._hosts[os.pidfd_open(pid)] = host

    def register(self, poll: select.epoll) -> None:
        """Have it wait for them too; what it finds is for :meth:`look`."""
        for descriptor in self._hosts:
            poll.register(descriptor, select.EPOLLIN)

    def look(self, ready: Sequence[int], poll: select.epoll) -> None:
        """Take note of those that have ended, in the order in which they did: epoll keeps it."""
        for descriptor in ready:
            if (host := self._hosts.pop(descriptor, None)) is not None:
                poll.unregister(descriptor)
                self._first = self._first or host

    def first(self, limit_s: float) -> str:
        """Return the host of the session that has ended first; empty where none does.

        Args:
            limit_s: seconds to wait for it.
        """
        with select.epoll() as poll:
            self.register(poll)
            if not self._first and self._hosts:
                self.look([ready for ready, _ in poll.poll(limit_s)], poll)
        return self._first


_RECORD_AFTER_S = 0.5  # for a rank of another host, which records what it knows
_GAVE_UP_S = 1.0  # from mpirun's end to that of the session to the host that it gave up
_TIMEOUT_S = 8.0  # that they may take; it is about one where all hosts answer


class LauncherReaper:
    """A rank's end of it; does nothing under another launcher than mpirun."""

    def __init__(self, rank: int, number: int, host: str) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._told: dict[str, Any] = {}
        self._sessions: dict[psutil.Process, str] = {}
        launcher = psutil.Process().parent()
        if launcher is None or not _is_for_one_job(launcher):
            return
        errors: int | TextIO = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            if launcher.name() in MPIRUN:
                with contextlib.suppress(OSError):  # a pipe of another user's, under sudo say
                    errors = stack.enter_context(Path(f"/proc/{launcher.pid}/fd/2").open("a"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "motley.membership.reaper", str(launcher.pid)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(psutil.NoSuchProcess):
            result = find_sessions(launcher.pid)
            self._sessions = {psutil.Process(pid): host for pid, host in result.items()}
        self.send(
            rank=rank, number=number, host=host,
            launcher=f"{launcher.name()}, process {launcher.pid}",
            segments=segments_of_this_job(), session=session_folder(launcher.pid, os.environ),
        )  # fmt: skip

    def send(self, **news: Any) -> bool:
        """Send the reaper facts for the time when this rank and mpirun are gone.

        See :class:`_ReaperFacts`.

        Returns:
            True if there is such a process.
        """
        if self._process is None or self._process.stdin is None:
            return False
        # Names of a thousand hosts do not change, and are sent once.
        changed = {name: value for name, value in news.items() if self._told.get(name) != value}
        if changed:
            with contextlib.suppress(OSError):
                print(json.dumps(changed), file=self._process.stdin, flush=True)
        self._told.update(changed)
        return True

    def lost_session(self, names: Collection[str], limit_s: float) -> bool:
        """Return True if mpirun's ssh session to a host has ended, or ends in time.

        Args:
            names: names of that host, one of which may be that in hosts.txt.
            limit_s: seconds to wait.
        """
        return any(
            host in names and _ends_within(session, limit_s)
            for session, host in self._sessions.items()
        )

    def dismiss(self) -> None:
        """Let the launcher take its time: all is well."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class _ReaperFacts:
    """The facts that a rank has sent to its reaper.

    Attributes:
        rank: its number in the group that is left. number: the one in the launch.
        line: to print, where mpirun's own errors go; empty means nothing.
        fault: the reason why the job ends, as far as is known, until it is printed.
        step: that training is at.
        ended: the rank leaves by itself. folder: of the run; on rank 0.
        hosts: the lowest rank of each, as of the launch, by name and by address; on rank 0.
        segments, session: see motley.membership.reaper.
        supervisor: address, port and token of the rank to inform that this host outlives its rank;
            None where the others could not go on without it.
        timeout_s: that the launcher may take to end.
    """

    rank: int = 0
    number: int = 0
    host: str = ""
    launcher: str = ""
    line: str = ""
    fault: dict[str, Any] | None = None
    step: int | None = None
    ended: bool = False
    folder: str | None = None
    hosts: dict[str, int] = field(default_factory=dict)
    segments: str = ""
    session: str = ""
    supervisor: tuple[str, int, str] | None = None
    timeout_s: float = _TIMEOUT_S


def reap_after_this_process(pid: int) -> None:
    """End a launcher, should it hang, once this process has ended."""
    launcher = psutil.Process(pid)
    if _is_for_one_job(launcher):
        subprocess.Popen(
            [sys.executable, "-P", "-m", "motley.membership.reaper", str(pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def outlived_by_launcher() -> bool:
    """Return True if a rank of this launcher may end, with status 0, before all others do.

    Open MPI 5 goes on then; 4.1 ends the job.
    """
    launcher = psutil.Process().parent()
    return launcher is not None and launcher.name() in ("prted", "prterun")


def _is_for_one_job(launcher: psutil.Process) -> bool:
    if launcher.name() == "prted":  # may also be of a prte that serves many jobs
        return any("prterun-" in word for word in launcher.cmdline())
    return launcher.name() in MPIRUN | {"orted"}


def _end_unless_gone(launcher: psutil.Process, timeout_s: float) -> None:
    if _ends_within(launcher, timeout_s):
        return
    children = launcher.children()  # mpirun's: an ssh to each host
    for end in (launcher.terminate, launcher.kill):
        end()
        if _ends_within(launcher, 2):
            break
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


def _ends_within(process: psutil.Process, limit_s: float) -> bool:
    """Return True if a process ends in time.

    A zombie has ended: its parent may first read all of its output, of which this process holds one
    end.
    """
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended between two questions
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def _main() -> None:
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        launcher = psutil.Process(int(sys.argv[1]))
        sessions, terminal = SshSessions(launcher.pid), launcher.terminal()
        received, launcher_first = _listen(launcher.pid, sessions)
        if launcher_first and received.rank == 0 and not received.ended:
            received.fault = asdict(_why_gone(received, sessions))
        if received.supervisor and not (launcher_first or received.ended):
            _report_host_alive(received.rank, received.host, *received.supervisor)
        if received.line:  # before mpirun ends, and a shell says that it waits for the next command
            _print_line(received.line, terminal)
        with contextlib.suppress(psutil.NoSuchProcess):
            _end_unless_gone(launcher, received.timeout_s)
        fault = Fault.read(received.fault) if received.fault else None
        if received.folder:
            known = fault or make_death_fault(received.number, received.host, received.step)
            _record(RunFolder(received.folder), known, received.number)
        if fault and not received.line:
            _print_line(fault.last_words(), terminal)
        if _ends_within(launcher, 0):
            session = received.session or session_folder(launcher.pid, os.environ)
            remove(received.segments, session)


def _print_line(line: str, terminal: str | None) -> None:
    """Print a line where mpirun prints, or on its terminal: Ctrl-C has ended a ``tee`` between."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        with contextlib.suppress(OSError), Path(terminal or os.devnull).open("w") as screen:
            print(line, file=screen, end="\r\n")


def _report_host_alive(rank: int, host: str, address: str, port: int, token: str) -> None:
    """Inform the first rank that this host lives, though its rank does not.

    The process then waits while the others train, because mpirun's daemon still serves their job.
    """
    with contextlib.suppress(OSError), socket.create_connection((address, port), 3.0) as line:
        line.sendall(greeting(token, ~rank, host))
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # that host may go too
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        line.recv(1)  # it says nothing; its end closes the connection


def _why_gone(told: _ReaperFacts, sessions: SshSessions) -> Fault:
    """Return why the launcher ended before its ranks; from rank 0's host."""
    text = Fault.read(told.fault) if told.fault else None
    if text and text.kind is not FaultKind.KILLED:
        return text
    gave_up = bool(told.session) and not Path(told.session).exists()  # it had time to tidy up
    host = sessions.first(_GAVE_UP_S) if gave_up else ""
    if host in told.hosts:
        return make_daemon_fault(told.hosts[host], host, told.step)
    return text or make_launcher_fault(told.host, told.launcher, told.step)


def _listen(launcher: int, sessions: SshSessions) -> tuple[_ReaperFacts, bool]:
    """Return all that the rank sends until it has ended, and True if its launcher ended before it.

    A rank that dies of its launcher does so within milliseconds, so both may be seen at once.
    """
    received, rest, first = _ReaperFacts(), b"", False
    poll, ended = select.epoll(), -1
    poll.register(0, select.EPOLLIN)
    with contextlib.suppress(OSError):  # an older kernel
        poll.register(ended := os.pidfd_open(launcher), select.EPOLLIN)
    sessions.register(poll)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        sessions.look(ready, poll)
        if ended in ready:
            first = True
            poll.unregister(ended)
        if 0 in ready:
            data = os.read(0, 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                received = replace(received, **json.loads(line))
            if not data:
                return received, first


def _record(folder: RunFolder, fault: Fault, first: int) -> None:
    """Record the fault unless a better one is recorded.

    A rank on another host that lost the first rank has fewer facts than this process. A fault that
    it has recorded is replaced.
    """
    time.sleep(_RECORD_AFTER_S)
    try:
        run = folder.read_run()
    except MotleyError:  # it is damaged: the next start says so
        return
    failure = run.get("failure") or {}
    knows_less = (
        fault.kind is not FaultKind.KILLED
        and failure.get("rank") == first
        and (failure.get("kind") == FaultKind.KILLED)
    )
    if (run.get("status") != "finished" and not failure) or knows_less:
        with contextlib.suppress(MotleyError), folder.lock():  # another run has it already
            record_fault(folder, fault)


if __name__ == "__main__":
    _main()

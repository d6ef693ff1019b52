"""The reaper: a small process on each host that ends a hung launcher.

After the rank that started it has died, the reaper ends an mpirun or daemon that hangs. The reaper
also removes the files that a killed launcher leaves.

mpirun ends when its daemon on every host has ended. mpirun waits for ever for a daemon that is
frozen or cut off, and a daemon waits for mpirun in the same way. After a stop signal, mpirun
forwards no more output of its ranks, and kills them at once or after a tenth of a second. If mpirun
itself is killed, only the reaper can report and record this, and remove the files.
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
from motley.text import CLEAR_LINE

# sm_segment.HOST.USER.JOB.RANK, of Open MPI 5; 4.1 calls it vader_segment
_SEGMENT = re.compile(r"/dev/shm/((?:sm|vader)_segment\.\S+\.)\d+$", re.MULTILINE)


def segments_of_this_job() -> str:
    """Return the prefix of this job's shared memory files in /dev/shm; empty if it has none.

    The prefix is read from the memory map of this process.
    """
    with contextlib.suppress(OSError):
        result = _SEGMENT.search(Path("/proc/self/maps").read_text(errors="replace"))
        return result[1] if result else ""
    return ""


def session_folder(launcher: int, environ: Mapping[str, str]) -> str:
    """Return the folder that the launcher has made for its jobs; empty if it is unknown.

    Args:
        launcher: process id of the launcher.
        environ: environment of a rank.
    """
    folder = environ.get("PMIX_SERVER_TMPDIR", "")
    names = (f"/ompi.{launcher}", f"/pid.{launcher}", f"/prted.{launcher}")
    return folder if folder.endswith(names) else ""


def remove(segments: str, session: str) -> None:
    """Remove the files of a job that has ended. Files of other users are left alone.

    Args:
        segments: see :func:`segments_of_this_job`.
        session: see :func:`session_folder`.
    """
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
    """Return the host of each ssh session of a launcher, by the session's process id.

    Hosts are named as in hosts.txt.

    The result is empty unless ``launcher`` is an mpirun that has started sessions.
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
    """The ssh sessions of a launcher, watched to find the session that ends first.

    mpirun loses a host when the host's session ends, or just before. When mpirun itself ends, all
    other sessions end too.
    """

    def __init__(self, launcher: int) -> None:
        self._first = ""
        self._hosts: dict[int, str] = {}  # of those that are open, by a descriptor of the process
        for pid, host in find_sessions(launcher).items():
            with contextlib.suppress(OSError):  # an older kernel, or it has just ended
                self._hosts[os.pidfd_open(pid)] = host

    def register(self, poll: select.epoll) -> None:
        """Register all open sessions with ``poll``. Pass results of ``poll`` to :meth:`look`."""
        for descriptor in self._hosts:
            poll.register(descriptor, select.EPOLLIN)

    def look(self, ready: Sequence[int], poll: select.epoll) -> None:
        """Record the sessions that have ended, in the order in which ``poll`` returned them."""
        for descriptor in ready:
            if (host := self._hosts.pop(descriptor, None)) is not None:
                poll.unregister(descriptor)
                self._first = self._first or host

    def first(self, limit_s: float) -> str:
        """Return the host of the session that ended first; empty if no session ends in time.

        Args:
            limit_s: seconds to wait for the end of a session.
        """
        with select.epoll() as poll:
            self.register(poll)
            if not self._first and self._hosts:
                self.look([ready for ready, _ in poll.poll(limit_s)], poll)
        return self._first


_RECORD_AFTER_S = 0.5  # seconds in which a rank of another host may record its own fault
_GAVE_UP_S = 1.0  # seconds from mpirun's end to the end of its session to the host that it gave up
_TIMEOUT_S = 8.0  # seconds that the launcher may take to end; about 1 s if all hosts answer


class LauncherReaper:
    """A rank's connection to its reaper, the process that acts after the rank has died.

    The methods do nothing under a launcher other than mpirun.

    Args:
        rank: number of this rank in the group.
        number: number of this rank in the launch.
        host: host of this rank.
    """

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
                with contextlib.suppress(OSError):  # another user's pipe, for instance under sudo
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
        """Send facts to the reaper, which uses them after this rank or mpirun has ended.

        Args:
            **news: fields of :class:`_ReaperFacts`.

        Returns:
            True if there is a reaper.
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
        """Return True if mpirun's ssh session to a host has ended, or ends within ``limit_s``.

        Args:
            names: all names of the host, since hosts.txt may use any of them.
            limit_s: seconds to wait.
        """
        return any(
            host in names and _ends_within(session, limit_s)
            for session, host in self._sessions.items()
        )

    def dismiss(self) -> None:
        """Kill the reaper, because the job ends as it should."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class _ReaperFacts:
    """The facts that a rank has sent to its reaper, for use after the rank's end.

    Attributes:
        rank: number of the rank in the present group.
        number: number of the rank in the launch.
        host: host of the rank.
        launcher: name and process of the launcher.
        line: text to print where mpirun prints its errors; empty: none.
        fault: the reason why the job ends, if the reason is known and not printed yet.
        step: current step of the training.
        ended: True if the rank has announced that it ends.
        folder: folder of the run; on rank 0.
        hosts: lowest rank of each host in the launch, by the host's name and address; on rank 0.
        segments: see :func:`segments_of_this_job`.
        session: see :func:`session_folder`.
        supervisor: address, port and token of the rank that is informed when this rank has died but
            the host lives. None if the other ranks could not continue without this rank.
        timeout_s: seconds that the launcher may take to end.
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
    """Start a reaper, which ends a hanging launcher after this process has ended.

    Args:
        pid: process id of the launcher.
    """
    launcher = psutil.Process(pid)
    if _is_for_one_job(launcher):
        subprocess.Popen(
            [sys.executable, "-P", "-m", "motley.membership.reaper", str(pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def outlived_by_launcher() -> bool:
    """Return True if other ranks live on after a rank has ended early with status 0.

    Open MPI 5 lets the other ranks continue. Open MPI 4.1 ends the job.
    """
    launcher = psutil.Process().parent()
    return launcher is not None and launcher.name() in ("prted", "prterun")


def _is_for_one_job(launcher: psutil.Process) -> bool:
    if launcher.name() == "prted":  # it may also belong to a prte that serves many jobs
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
    """Return True if a process ends within ``limit_s`` seconds.

    A zombie counts as ended. Its parent may wait for the end of the zombie's output, while this
    process still holds an open end of the pipe.
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
        facts, launcher_first = _listen(launcher.pid, sessions)
        if launcher_first and facts.rank == 0 and not facts.ended:
            facts.fault = asdict(_why_gone(facts, sessions))
        if facts.supervisor and not (launcher_first or facts.ended):
            _report_host_alive(facts.rank, facts.host, *facts.supervisor)
        if facts.line:  # before mpirun ends, and the shell prints its prompt
            _print_line(facts.line, terminal)
        with contextlib.suppress(psutil.NoSuchProcess):
            _end_unless_gone(launcher, facts.timeout_s)
        fault = Fault.read(facts.fault) if facts.fault else None
        if facts.folder:
            known = fault or make_death_fault(facts.number, facts.host, facts.step)
            _record(RunFolder(facts.folder), known, facts.number)
        if fault and not facts.line:
            _print_line(fault.last_words(), terminal)
        if _ends_within(launcher, 0):
            session = facts.session or session_folder(launcher.pid, os.environ)
            remove(facts.segments, session)


def _print_line(line: str, terminal: str | None) -> None:
    """Print a line where mpirun prints.

    If mpirun prints to a ``tee`` that Ctrl-C has ended, print on mpirun's terminal.
    """
    try:
        clear = CLEAR_LINE if sys.stderr.isatty() else ""
        print(f"{clear}{line}", file=sys.stderr, flush=True)
    except OSError:
        with contextlib.suppress(OSError), Path(terminal or os.devnull).open("w") as screen:
            print(f"{CLEAR_LINE}{line}", file=screen, end="\r\n")


def _report_host_alive(rank: int, host: str, address: str, port: int, token: str) -> None:
    """Report to the first rank that this host lives, although its rank has died.

    This process then waits until the other ranks have trained, because their job still uses
    mpirun's daemon on this host.
    """
    with contextlib.suppress(OSError), socket.create_connection((address, port), 3.0) as line:
        line.sendall(greeting(token, ~rank, host))
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # that host may go too
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        line.recv(1)  # rank 0 sends nothing; the job's end closes the connection


def _why_gone(told: _ReaperFacts, sessions: SshSessions) -> Fault:
    """Return the fault that explains why the launcher ended before its ranks.

    This function runs on rank 0's host alone.
    """
    text = Fault.read(told.fault) if told.fault else None
    if text and text.kind is not FaultKind.KILLED:
        return text
    gave_up = bool(told.session) and not Path(told.session).exists()  # it had time to tidy up
    host = sessions.first(_GAVE_UP_S) if gave_up else ""
    if host in told.hosts:
        return make_daemon_fault(told.hosts[host], host, told.step)
    return text or make_launcher_fault(told.host, told.launcher, told.step)


def _listen(launcher: int, sessions: SshSessions) -> tuple[_ReaperFacts, bool]:
    """Return the facts that the rank sent until its end.

    The second value is True if the launcher ended before the rank.

    A rank may die within milliseconds because its launcher died. One poll may therefore report both
    ends.
    """
    facts, rest, first = _ReaperFacts(), b"", False
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
                facts = replace(facts, **json.loads(line))
            if not data:
                return facts, first


def _record(folder: RunFolder, fault: Fault, first: int) -> None:
    """Record a fault that the reaper has found, unless a more exact fault is recorded already.

    A rank on another host that lost rank 0 may have recorded a fault. The reaper has more facts, so
    its own fault replaces the recorded one.

    Args:
        folder: folder of the run.
        fault: the fault to record.
        first: number of rank 0 in the launch.
    """
    time.sleep(_RECORD_AFTER_S)
    try:
        run = folder.read_run()
    except MotleyError:  # the record is damaged: the next start reports that
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

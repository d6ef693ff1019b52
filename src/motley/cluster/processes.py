"""Processes of this machine.

The module runs other programs with a time limit. The module also sets handlers of signals that end
this process, and sends signals to other processes. A process is identified by its pid and start
time, because pids are used again.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from motley.errors import MotleyError


class ChildTimeoutError(MotleyError):
    """An error because a program did not end within its time limit."""


def run_child(
    words: Sequence[object], limit_s: float, fix: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program with empty stdin until it ends, and return its exit status and output.

    Args:
        words: command line of the program.
        limit_s: seconds that the program may take.
        fix: instruction to the user for the error message, if the program takes longer.
        cwd: working directory of the program; None: the directory of this process.

    Raises:
        ChildTimeoutError: the program took longer than ``limit_s``, and was killed.
        OSError: the program does not exist.
    """
    command = [str(word) for word in words]
    job = subprocess.Popen(
        command, cwd=cwd, text=True, errors="replace", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.kill()  # without a wait: a process that hangs in a network disk cannot end
        raise ChildTimeoutError(
            f"{shlex.join(command)} on {platform.node()} did not end within {limit_s:g} s; {fix}"
        ) from None
    except BaseException:
        job.kill()
        raise
    return subprocess.CompletedProcess(command, job.returncode, output, errors)


def handle_end(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    """Set the handler of a signal. SIGHUP stays ignored if it was ignored at the start.

    A shell that starts a program in the background makes it ignore SIGINT too. The handler of
    SIGINT is set anyway, because only a deliberate ``kill`` sends SIGINT to such a program.
    """
    if number != signal.SIGHUP or not ignores_hangup():
        signal.signal(number, handler)


def ignores_hangup() -> bool:
    """Return True if a closed terminal does not end this process, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def is_in_foreground() -> bool:
    """Return True if this process is in the foreground of a terminal, which Ctrl-C reaches."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


PATIENCE_S = 3.0  # seconds between SIGTERM, after which a rank notifies the others, and SIGKILL


def ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; OSError if it ended."""
    # The name, in parentheses, may hold anything; what follows is plain (proc(5), stat).
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if after[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(after[19])


def end(targets: Sequence[tuple[int, int]]) -> dict[int, str]:
    """End processes by SIGTERM. Processes that live after PATIENCE_S seconds get SIGKILL.

    Args:
        targets: pid and ticks of each process. Processes of other users are left alone.

    Returns:
        By pid: ``ended``, ``killed``, ``gone`` (ended before this call) or ``stuck``.
    """
    outcome = {
        pid: "ended" if _signal(pid, start, signal.SIGTERM) else "gone" for pid, start in targets
    }
    _wait(targets, PATIENCE_S)
    for pid, start in targets:
        if _signal(pid, start, signal.SIGKILL):
            outcome[pid] = "killed"
    _wait(targets, PATIENCE_S)
    return {**outcome, **{pid: "stuck" for pid, start in targets if is_alive(pid, start)}}


def send(pid: int, start: int, number: int) -> bool:
    """Send a signal to a process of this user if the process has a handler for it.

    Return True if the signal was sent.

    Args:
        pid: process id.
        start: start time of the process, in clock ticks since boot.
        number: number of the signal.
    """
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)  # from here on the signal can reach no other process
        try:
            words = Path(f"/proc/{pid}/status").read_text().split()
            caught = int(words[words.index("SigCgt:") + 1], 16) >> (number - 1) & 1
            if caught and is_alive(pid, start):
                signal.pidfd_send_signal(held, number)
                return True
        finally:
            os.close(held)
    return False


def is_alive(pid: int, start: int) -> bool:
    """Return True if a process of this user has this pid, and started at ``start`` (ticks)."""
    try:
        return ticks(pid) == start and Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def _signal(pid: int, start: int, number: int) -> bool:
    if not is_alive(pid, start):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait(targets: Sequence[tuple[int, int]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(is_alive(pid, start) for pid, start in targets) and time.monotonic() < deadline:
        time.sleep(0.05)

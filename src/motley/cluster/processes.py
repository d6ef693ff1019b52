"""Identifies processes by pid and start time, signals and ends them."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 3.0  # between SIGTERM, on which a rank tells the others, and SIGKILL


def ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; OSError if it is gone."""
    # The name, in parentheses, may hold anything; what follows is plain (proc(5), stat).
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if after[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(after[19])


def end(targets: Sequence[tuple[int, int]]) -> dict[int, str]:
    """End processes: SIGTERM, and SIGKILL to what is still there after PATIENCE_S.

    Args:
        targets: pid and ticks of each. One that is not this user's is left alone.

    Returns:
        ``ended``, ``killed``, ``gone`` (before we came) or ``stuck`` for each pid.
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
    """Send a signal to a process of this user's that has a handler for it; whether it was sent.

    Args:
        start: its ticks.
    """
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)  # from here on the pid is nobody else's
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
    """Whether a process is still the one that we mean."""
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

"""Identifies processes by pid and start time, and ends them."""

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
    return {**outcome, **{pid: "stuck" for pid, start in targets if _is(pid, start)}}


def _is(pid: int, start: int) -> bool:
    """Whether a process is still the one that we mean."""
    try:
        return ticks(pid) == start and Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def _signal(pid: int, start: int, number: int) -> bool:
    if not _is(pid, start):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait(targets: Sequence[tuple[int, int]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(_is(pid, start) for pid, start in targets) and time.monotonic() < deadline:
        time.sleep(0.05)

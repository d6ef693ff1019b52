"""Programs that Motley starts and waits for, each with a time limit."""

import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from motley.errors import MotleyError


class ChildTimeoutError(MotleyError):
    """A program did not end within its time limit."""


def run_child(
    words: Sequence[object], limit_s: float, fix: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; its input is empty.

    Args:
        words: its command line.
        limit_s: seconds that it may take.
        fix: what the user can do where it takes longer.

    Raises:
        ChildTimeoutError: it takes longer. The program is killed.
        OSError: there is no such program.
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

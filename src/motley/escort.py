"""See mpirun off: a small process beside the first rank, which outlives a job that failed.

mpirun ends when its daemon on every host says so, and waits without end for one that is
frozen or cut off. And when it is told to stop it passes nothing on of what its ranks say,
and kills them after a tenth of a second: too short to start anything then.
"""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import psutil

MPIRUN = frozenset({"prterun", "mpirun", "mpiexec", "prte", "orterun"})  # names of its process
_PATIENCE = 8.0  # seconds that mpirun may take; it needs about one where all hosts answer


class Escort:
    """This rank's end of it; does nothing where mpirun is not this process's parent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        parent = psutil.Process().parent()
        if parent is None or parent.name() not in MPIRUN:
            return
        errors: int | TextIO = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a pipe that another user made, under sudo say
                errors = stack.enter_context(Path(f"/proc/{parent.pid}/fd/2").open("a"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motley.escort", str(parent.pid)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip

    def say(self, text: str) -> bool:
        """Have it said when mpirun is gone, where mpirun's own errors go; whether it will be."""
        if self._process is None or self._process.stdin is None:
            return False
        with contextlib.suppress(OSError):
            print(text, file=self._process.stdin, flush=True)
            return True
        return False

    def dismiss(self) -> None:
        """All is well, and mpirun may take its time."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _see_off(process: psutil.Process) -> None:
    _, there = psutil.wait_procs([process], timeout=_PATIENCE)
    if not there:
        return
    children = process.children()  # an ssh to each host
    for end in (process.terminate, process.kill):
        if there:
            end()
            _, there = psutil.wait_procs(there, timeout=2)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


def _main() -> None:
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        process = psutil.Process(int(sys.argv[1]))
        said = sys.stdin.read()  # until the rank has ended
        with contextlib.suppress(psutil.NoSuchProcess):
            _see_off(process)
        print(said, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _main()

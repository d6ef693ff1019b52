"""Ends a hung mpirun or daemon after its rank has died: a small process on each host.

mpirun ends when its daemon on every host says so, and waits without end for one that is
frozen or cut off; a daemon waits so for mpirun. And once mpirun is told to stop, it passes
nothing on of what its ranks say and kills them, at once or after a tenth of a second.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil

_MPIRUN = {"prterun", "mpirun", "mpiexec", "orterun"}
_TIMEOUT_S = 8.0  # that they may take; it is about one where all hosts answer


class LauncherReaper:
    """A rank's end of it; does nothing under another launcher than mpirun."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._last = ""
        launcher = psutil.Process().parent()
        if launcher is None or not _is_for_one_job(launcher):
            return
        errors: int | TextIO = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            if launcher.name() in _MPIRUN:
                with contextlib.suppress(OSError):  # a pipe of another user's, under sudo say
                    errors = stack.enter_context(Path(f"/proc/{launcher.pid}/fd/2").open("a"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motley.launch.launcher_reaper", str(launcher.pid)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip

    def say(self, line: str) -> bool:
        """What to say, where mpirun's own errors go, when this rank and mpirun are gone.

        The last line counts; an empty one means nothing.

        Returns:
            Whether there is such a process to say it.
        """
        if self._process is None or self._process.stdin is None:
            return False
        if line != self._last:
            with contextlib.suppress(OSError):
                print(line, file=self._process.stdin, flush=True)
        self._last = line
        return True

    def dismiss(self) -> None:
        """All is well, and the launcher may take its time."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def reap_after_this_process(pid: int) -> None:
    """End a launcher, should it hang, once this process has ended."""
    launcher = psutil.Process(pid)
    if _is_for_one_job(launcher):
        subprocess.Popen(
            [sys.executable, "-m", "motley.launch.launcher_reaper", str(pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def _is_for_one_job(launcher: psutil.Process) -> bool:
    if launcher.name() == "prted":  # may also be of a prte that serves many jobs
        return any("prterun-" in word for word in launcher.cmdline())
    return launcher.name() in _MPIRUN | {"orted"}


def _end_unless_gone(launcher: psutil.Process) -> None:
    if _gone(launcher, _TIMEOUT_S):
        return
    children = launcher.children()  # mpirun's: an ssh to each host
    for end in (launcher.terminate, launcher.kill):
        end()
        if _gone(launcher, 2):
            break
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


def _gone(process: psutil.Process, limit_s: float) -> bool:
    """Whether it ends in time. A zombie has ended: whoever started it may first read all of its
    output, of which this process holds one end."""
    deadline = time.monotonic() + limit_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _main() -> None:
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        launcher = psutil.Process(int(sys.argv[1]))
        last = sys.stdin.read().removesuffix("\n").rpartition("\n")[2]  # until the rank has ended
        with contextlib.suppress(psutil.NoSuchProcess):
            _end_unless_gone(launcher)
        if last:
            print(last, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _main()

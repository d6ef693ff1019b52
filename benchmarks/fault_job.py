"""A command that was started: each line that it prints, with its time, and its end."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = ("motley: ", "keep_training: ")  # what lines of ours begin with


@dataclass(frozen=True)
class Line:
    """When it was read, in seconds since the epoch, and what it says."""

    time: float
    text: str


class Job:
    """Reads a command's output and errors until it ends.

    Args:
        words: the command. environ: its whole environment. folder: where it runs.
        into: another command that reads its output first.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], folder: Path, into: str = ""
    ) -> None:
        command = ["bash", "-c", f'"$@" 2>&1 | {into}', "bash", *words] if into else [*words]
        self.process = subprocess.Popen(
            command, env=dict(environ), cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[Line] = []
        self.ended: float | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for data in self.process.stdout or ():
            text = data.replace(b"\0", b"").decode(errors="replace").rstrip("\n")
            self.lines.append(Line(time.time(), text))

    def said(self, since: float = 0.0) -> list[Line]:
        """Our own lines."""
        return [line for line in self.lines if line.text.startswith(OURS) and line.time >= since]

    @property
    def output(self) -> str:
        """All of it."""
        return "\n".join(line.text for line in self.lines)

    def wait(self, limit_s: float) -> int | None:
        """Its status; None where it does not end, and is killed. Its last words may come later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(limit_s)
            self.ended = self.ended or time.time()
            self._reader.join(12)
            return code
        self.kill()
        return None

    def kill(self) -> None:
        """It, and what shares its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def until(condition: Callable[[], object], limit_s: float) -> bool:
    """Poll; whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True

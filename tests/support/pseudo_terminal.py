"""A program in a terminal of some size, and what is on its screen."""

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

from project import LIMIT_S, ROOT, environment

_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
HOME = "\x1b[H"


class PseudoTerminal:
    """One program, started; a context manager that ends it.

    Args:
        words: after Python. columns, lines: of its screen.

    Attributes:
        output: all that it wrote.
    """

    def __init__(self, *words: object, columns: int, lines: int, **extra: str) -> None:
        self.output, self.columns, self.lines = "", columns, lines
        self._screen, keyboard = os.openpty()
        self.resize(columns, lines)
        self.job = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, start_new_session=True,
            env=environment(PYTHONPATH=str(ROOT / "src"), TERM="xterm-256color", **extra),
            stdin=keyboard, stdout=keyboard, stderr=keyboard,
        )  # fmt: skip
        os.close(keyboard)

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.job.poll() is None:
            self.job.kill()
        self.job.wait()
        os.close(self._screen)

    def resize(self, columns: int, lines: int) -> None:
        """Its window has another size now."""
        self.columns, self.lines = columns, lines
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type them."""
        os.write(self._screen, keys.encode())

    def read(self, seconds: float) -> None:
        """Take what it writes in that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._screen], [], [], left)[0]:
                with contextlib.suppress(OSError):  # Linux's word for: nobody has it open any more
                    self.output += os.read(self._screen, 65536).decode(errors="replace")
                    continue
                return

    def frame(self) -> list[str]:
        """The lines of the last whole screen."""
        *_, last, _ = ["", "", *self.output.split(HOME)]
        return _CODE.sub("", last).replace("\r\n", "\n").split("\n")

    def await_frame(self, shows: Callable[[str], bool], limit: float = LIMIT_S) -> list[str]:
        """Wait until a whole screen shows something; its lines."""
        deadline = time.monotonic() + limit
        while not shows("\n".join(self.frame())):
            assert time.monotonic() < deadline, "\n".join(self.frame())
            self.read(0.1)
        return self.frame()

    @property
    def colours(self) -> set[str]:
        """Codes that change how letters look."""
        return set(_COLOUR.findall(self.output))

    def end(self, limit: float = 10) -> int:
        """Wait for its end; the exit status."""
        deadline = time.monotonic() + limit
        while self.job.poll() is None:
            assert time.monotonic() < deadline, self.output
            self.read(0.1)
        return self.job.wait()

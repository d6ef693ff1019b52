"""Keys of a terminal, as they are pressed."""

import os
import select
import sys
import termios
import time
import tty
from enum import Enum


class Key(Enum):
    """What somebody asks for."""

    QUIT = "quit"
    SORT = "sort"
    UP = "up"
    DOWN = "down"
    OPEN = "open"
    BACK = "back"


_KEYS = {
    b"q": Key.QUIT, b"Q": Key.QUIT, b"\x03": Key.QUIT, b"\x04": Key.QUIT, b"s": Key.SORT,
    b"\x1b[A": Key.UP, b"\x1bOA": Key.UP, b"k": Key.UP, b"\x1b[B": Key.DOWN, b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN, b"\r": Key.OPEN, b"\n": Key.OPEN, b" ": Key.OPEN, b"\x1b": Key.BACK,
    b"\x7f": Key.BACK,
}  # fmt: skip
_ESCAPE_S = 0.05  # in which the rest of a key comes that begins with an escape


class Keys:
    """The keyboard, a context manager; without one nothing is ever pressed."""

    def __enter__(self) -> "Keys":
        self._file = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._typed = b""
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    @property
    def there(self) -> bool:
        """Somebody can press one."""
        return self._file is not None

    def wait(self, seconds: float) -> Key | None:
        """The next key within some seconds; None of others, and if there is none."""
        if self._file is None:
            time.sleep(max(0.0, seconds))
            return None
        if not self._typed and not _ready(self._file, seconds):
            return None
        pressed = self._next()
        if pressed == b"\x1b" and (self._typed or _ready(self._file, _ESCAPE_S)):
            follows = self._next()
            if follows in (b"[", b"O"):
                pressed += follows + self._next()
            else:  # of a key of its own
                self._typed = follows + self._typed
        if not pressed:  # the terminal is gone
            return Key.QUIT
        return _KEYS.get(pressed)

    def _next(self) -> bytes:
        if not self._typed and self._file is not None:
            self._typed = os.read(self._file, 64)
        first, self._typed = self._typed[:1], self._typed[1:]
        return first


def _ready(file: int, seconds: float) -> bool:
    return bool(select.select([file], [], [], max(0.0, seconds))[0])

"""Who works on what, told by files alone: for processes that share a folder and nothing else.

A lease is a file that its owner touches now and then, and that says who that is. One that nobody
has touched for a while is of an owner that is gone, and whoever sees that may take it; on the
owner's own machine that is seen at once.
"""

import contextlib
import os
import threading
from pathlib import Path

_RENEW_S = 5.0
GONE_S = 60.0  # NFS shows another machine's touch up to 30 s late


class Leases:
    """The leases of one process in a folder; use it as a context, in which they are renewed.

    Args:
        folder: that all share; it exists.
        gone_s: after so many seconds without a touch an owner is gone.
    """

    def __init__(self, folder: Path, gone_s: float = GONE_S) -> None:
        self._folder, self._gone_s, self._host = folder, gone_s, os.uname().nodename
        self._owner = f"{self._host}.{os.getpid()}"
        self._held: set[Path] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Leases":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for path in list(self._held):
            self._drop(path)

    def take(self, name: str) -> bool:
        """Take a lease, if nobody has it or its owner is gone."""
        path = self._folder / f"{name}.lease"
        if self._is_gone(path):
            # Of many who see it, one alone can rename it.
            left = path.with_name(f".{path.name}.{self._owner}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(left)
                left.unlink()
        try:
            with path.open("x") as file:
                file.write(self._owner + "\n")
        except FileExistsError:
            return False
        self._held.add(path)
        return True

    def is_free(self, name: str) -> bool:
        """Nobody has it, or its owner is gone."""
        path = self._folder / f"{name}.lease"
        return not path.exists() or self._is_gone(path)

    def drop(self, name: str) -> None:
        """Give a lease back."""
        self._drop(self._folder / f"{name}.lease")

    def _drop(self, path: Path) -> None:
        self._held.discard(path)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def _is_gone(self, path: Path) -> bool:
        """By the clock of the disk: machines' clocks differ."""
        try:
            touched = path.stat().st_mtime
            host, _, pid = path.read_text().strip().rpartition(".")
        except FileNotFoundError:
            return False
        if host == self._host and not Path("/proc", pid).exists():
            return True
        now = self._folder / f".now.{self._owner}"
        now.write_bytes(b"")
        here = now.stat().st_mtime
        now.unlink()
        return here - touched > self._gone_s

    def _renew(self) -> None:
        while not self._end.wait(min(_RENEW_S, self._gone_s / 4)):
            for path in list(self._held):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(path)

"""A progress bar on a terminal, of bytes; in a log there is nothing of it."""

import sys
import threading
import time

from stage_blocks import said

_WIDTH = 24
_EVERY_S = 0.1


class Bar:
    """One line that is written again and again: what is done of ``total`` bytes, in several parts.

    Use it as a context manager: at the end the line is wiped.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, max(1, total)
        self._done: dict[str, int] = {}
        self._start = self._shown = time.monotonic()
        self._on = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._on:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._on = False

    def at(self, size: int, part: str = "") -> None:
        """So many bytes are done of a part; from any thread."""
        with self._lock:
            self._done[part] = size
            now = time.monotonic()
            if self._on and now > self._shown + _EVERY_S:
                self._shown = now
                print(f"\r\033[K{self._line(now)}", end="", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        done = min(sum(self._done.values()), self._total)
        share, rate = done / self._total, done / max(1e-3, now - self._start)
        left = f", {(self._total - done) / rate:,.0f} s left" if rate else ""
        bar = "#" * round(_WIDTH * share)
        return (
            f"{self._title} [{bar:{_WIDTH}}] {share:4.0%} of {said(self._total)}, "
            f"{said(rate)}/s{left}"
        )

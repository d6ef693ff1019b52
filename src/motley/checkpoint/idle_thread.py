"""Writes behind the training, in time that nobody else wants.

What is hashed and copied to the disk took processors from ranks that compute on them: 1.7 s of the
training for a checkpoint of 1 GB, beside two ranks on two processors, and 0.2 s at the lowest
priority, since ranks wait for each other now and then. It takes longer so. Who waits for it does
not want that, least of all beside other people's programs; but a thread without rights never gets
its priority back. So what is left is done by another one then; and where others leave no time at
all, after half a minute.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_LOWEST = 19  # niceness
PATIENCE_S = 30.0  # until it is better to have the checkpoint than the time


class IdleThread:
    """A thread of the lowest priority, which does one thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint", self._begin)
        self._usual = ThreadPoolExecutor(1, "checkpoint_awaited")
        self._until = 0.0  # by the monotonic clock, it takes idle time alone
        self._ident: int | None = None

    def _begin(self) -> None:
        self._ident = threading.get_ident()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

    def submit(self, work: Callable[..., Path], *values: Any) -> Future[Path]:
        """What the work gives, in time."""
        self._until = time.monotonic() + PATIENCE_S
        self._usual.submit(int)  # starts it, here: a thread has the priority of who starts it
        return self._thread.submit(work, *values)

    def hurry(self) -> None:
        """Somebody waits: do the rest of it at the usual priority."""
        self._until = 0.0

    def run(self, pieces: Iterator[None]) -> None:
        """Do all pieces of some work; from any thread."""
        for _ in pieces:
            if time.monotonic() > self._until and threading.get_ident() == self._ident:
                try:
                    rest = self._usual.submit(deque, pieces, 0)
                except RuntimeError:  # Python ends, once this thread has
                    continue
                rest.result()

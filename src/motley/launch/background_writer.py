"""Writes to disk in a thread of its own, so that a slow disk holds up nobody who must not wait."""

import queue
import threading
from collections.abc import Callable


class BackgroundWriter:
    """Does what it is given, one after another.

    Attributes:
        error: of the first that failed.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="background writer", daemon=True).start()

    def write(self, work: Callable[[], None]) -> None:
        """Have it done, some time after all that was given before."""
        self._queue.put(work)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was given is done; whether it is.

        Args:
            timeout_s: to wait at most; None: as long as it takes.
        """
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                work()
            except Exception as error:
                self.error = self.error or error

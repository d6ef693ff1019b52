"""Iterators over a rank's micro-batches, which arrive on the device that computes them.

Without loader processes the training thread itself reads each micro-batch. With them a thread takes
each micro-batch as soon as it is made, copies it to the device and holds it ready. The training
thread then waits only where the processes are late, and that wait is input.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from motley.data.batch import Batch
from motley.data.loader_memory import explain_workers
from motley.data.slots import Passed, Slots


class Batches:
    """Micro-batches that the training thread reads when it needs them.

    Attributes:
        closed: the pass was ended, at its end or before.
    """

    def __init__(self, batches: Iterator[Passed | Batch], slots: Slots) -> None:
        self._batches, self._slots = batches, slots
        self.closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._slots.take(next(self._batches))

    def read_ahead(self) -> None:
        """Read the next micro-batch now; called where the device has enough to do meanwhile."""

    def close(self) -> None:
        """End the pass: nothing reads or copies any more once this returns."""
        self.closed = True


class BatchesOnGpu(Batches):
    """Micro-batches that the training thread reads and a stream of their own copies to the GPU.

    Args:
        stream: for the copies.
    """

    def __init__(
        self, batches: Iterator[Passed | Batch], slots: Slots, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(batches, slots)
        self._stream = stream
        self._ready: Batch | None = None

    def __next__(self) -> Batch:
        self.read_ahead()
        batch, self._ready = self._ready, None
        if batch is None:
            raise StopIteration
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_stream(self._stream)
        return _used_by(batch, computing)

    def read_ahead(self) -> None:
        """See Batches."""
        if self._ready is not None:
            return
        self._stream.synchronize()  # the copy before is long done
        if (found := next(self._batches, None)) is not None:
            with torch.cuda.stream(self._stream):
                self._ready = self._slots.take(found)

    def close(self) -> None:
        """See Batches."""
        super().close()
        self._stream.synchronize()


class PrefetchedBatches(Batches):
    """Micro-batches that a thread takes from loader processes and copies to the device.

    It begins with the next one when :meth:`read_ahead` says that the device has work for a while:
    what it runs in Python would delay the first kernels of a step, for which a GPU waits. The
    thread ends with the pass, with :meth:`close`, or when nobody refers to this object any more.

    Args:
        stream: for the copies to a GPU; None for a CPU.
        workers: loader processes, for what is said when one dies.
    """

    def __init__(
        self,
        batches: Iterator[Passed | Batch],
        slots: Slots,
        stream: torch.cuda.Stream | None,
        workers: int,
    ) -> None:
        super().__init__(batches, slots)
        self._stream, self._workers = stream, workers
        self._exchange = _Exchange()
        self._thread = threading.Thread(
            target=_prefetch, args=(batches, slots, stream, self._exchange),
            name="motley-prefetch", daemon=True,
        )  # fmt: skip
        self._thread.start()
        weakref.finalize(self, self._exchange.stop).atexit = False

    def __next__(self) -> Batch:
        # A process that dies may interrupt any line of the training thread, this one too.
        with explain_workers(self._workers):
            batch = self._exchange.get()
        if batch is None:
            raise StopIteration
        if self._stream is None:
            return batch
        return _used_by(batch, torch.cuda.current_stream(self._stream.device))

    def read_ahead(self) -> None:
        """See Batches. Returns at once."""
        self._exchange.ask()

    def close(self) -> None:
        """See Batches. Wait for a batch that is being made, and leave it."""
        super().close()
        self._exchange.stop()
        self._thread.join()


class _Exchange:
    """One place through which the prefetching thread passes micro-batches to the training thread.

    A batch of None ends the pass. An error of the prefetching thread is raised in the other.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[Batch | None] = deque()
        self._error: BaseException | None = None
        self._asked, self._stopped = True, False

    def get(self) -> Batch | None:
        """Wait for the next micro-batch and take it."""
        with self._changed:
            if not self._ready:
                self.ask()
            self._changed.wait_for(lambda: self._ready or self._error)
            if not self._ready:
                assert self._error is not None
                raise self._error
            if self._ready[0] is None:
                return None  # the end of the pass stays, to be found again
            return self._ready.popleft()

    def ask(self) -> None:
        """Have the thread make the next micro-batch."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Wait until a micro-batch is asked for and none is ready; False if the pass is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (self._asked and not self._ready))
            self._asked = False
            return not self._stopped

    def put(self, batch: Batch | None) -> None:
        """Pass a micro-batch."""
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Pass an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Have the thread end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _prefetch(
    batches: Iterator[Passed | Batch],
    slots: Slots,
    stream: torch.cuda.Stream | None,
    exchange: _Exchange,
) -> None:
    """Pass all micro-batches; the body of the thread.

    A loader process writes into a slot again once the next batch is asked for. The copy from the
    slot is done by then, since this thread waits for it.
    """
    try:
        while exchange.is_wanted():
            if (found := next(batches, None)) is None:
                exchange.put(None)
                return
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                batch = slots.take(found)
            if stream is not None:
                stream.synchronize()
            exchange.put(batch)
            del batch, found
    except BaseException as error:
        exchange.fail(error)


def _used_by(batch: Batch, computing: torch.cuda.Stream) -> Batch:
    """Keep the memory of a batch, which another stream filled, until this one is past it."""
    for tensor in batch.data.values():
        tensor.record_stream(computing)
    return batch

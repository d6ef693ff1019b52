"""The loader, which gives every rank its own micro-batches of the global order.

The loader reads micro-batches ahead, and copies them to the rank's device. The module
motley.data.source defines the order.

Without loader processes, the training thread itself reads each micro-batch. With loader processes,
a prefetching thread takes each micro-batch as soon as it is ready, and copies it to the device. The
training thread then waits only if the processes are late, and this wait counts as input time.
"""

import contextlib
import itertools
import math
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from motley.cluster.launcher import cores_per_rank
from motley.config.options import Config
from motley.data.loader_memory import (
    PREFETCH,
    Passed,
    Slots,
    count_bytes,
    explain_workers,
    free_memory,
    workers_that_fit,
)
from motley.data.source import (
    Answer,
    Batch,
    Both,
    Key,
    Keyed,
    MicroBatchKeys,
    Order,
    Samples,
    make_seed,
    make_seeds,
    slices,
)
from motley.errors import MotleyError
from motley.launch.process import die_with_parent, keep_freed_memory
from motley.plan.length import make_ramp
from motley.plan.plan import Plan


class Batches:
    """An iterator over micro-batches, which the training thread reads when it needs them.

    One object serves one pass: one iteration over the training data or the held-out data.

    Attributes:
        closed: True if the pass has ended, or was stopped early.
    """

    def __init__(self, batches: Iterator[Passed | Batch], slots: Slots) -> None:
        self._batches, self._slots = batches, slots
        self.closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._slots.take(next(self._batches))

    def read_ahead(self) -> None:
        """Read the next micro-batch now. The caller calls it while the device has queued work."""

    def close(self) -> None:
        """End the pass. When this method returns, no thread reads or copies micro-batches."""
        self.closed = True


class BatchesOnGpu(Batches):
    """An iterator over micro-batches, which the training thread reads.

    A separate CUDA stream copies each micro-batch to the GPU.

    Args:
        batches: iterator of the micro-batches.
        slots: shared memory of the loader processes.
        stream: stream for the copies.
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
        """Read the next micro-batch, and start its copy to the GPU."""
        if self._ready is not None:
            return
        self._stream.synchronize()  # the previous copy has finished long ago
        if (result := next(self._batches, None)) is not None:
            with torch.cuda.stream(self._stream):
                self._ready = self._slots.take(result)

    def close(self) -> None:
        """End the pass, and wait until all copies to the GPU have finished."""
        super().close()
        self._stream.synchronize()


class PrefetchedBatches(Batches):
    """An iterator over micro-batches, which a thread takes from loader processes.

    The thread also copies each micro-batch to the device.

    The thread starts to take the next micro-batch when the training thread calls
    :meth:`read_ahead`, because the device then has queued work. At an earlier time, the thread's
    Python code would delay the first kernels of a step, and the GPU would be idle. The thread ends
    with the pass, with :meth:`close`, or when the last reference to this object is gone.

    Args:
        batches: iterator of the micro-batches.
        slots: shared memory of the loader processes.
        stream: stream for the copies to a GPU; None for a CPU.
        workers: number of loader processes, for the message when a process dies.
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
        """Request the next micro-batch from the thread, and return at once."""
        self._exchange.ask()

    def close(self) -> None:
        """End the pass. The thread finishes and discards its current micro-batch."""
        super().close()
        self._exchange.stop()
        self._thread.join()


class _Exchange:
    """A queue through which the prefetching thread passes micro-batches to the training thread.

    The item None means that the pass has ended. :meth:`get` raises an error of the prefetching
    thread in the training thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[Batch | None] = deque()
        self._error: BaseException | None = None
        self._asked, self._stopped = True, False

    def get(self) -> Batch | None:
        """Wait for the next micro-batch and return it, or None at the end of the pass."""
        with self._changed:
            if not self._ready:
                self.ask()
            self._changed.wait_for(lambda: self._ready or self._error)
            if not self._ready:
                assert self._error is not None
                raise self._error
            if self._ready[0] is None:
                return None  # the mark stays, so that the next call finds it too
            return self._ready.popleft()

    def ask(self) -> None:
        """Request the next micro-batch from the prefetching thread."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Wait until the training thread requests a micro-batch and the queue is empty.

        Return False if the prefetching thread must end, else True.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (self._asked and not self._ready))
            self._asked = False
            return not self._stopped

    def put(self, batch: Batch | None) -> None:
        """Pass a micro-batch, or None for the end of the pass, to the training thread."""
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Pass an error to the training thread, where :meth:`get` raises the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Make :meth:`is_wanted` return False, so that the prefetching thread ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _prefetch(
    batches: Iterator[Passed | Batch],
    slots: Slots,
    stream: torch.cuda.Stream | None,
    exchange: _Exchange,
) -> None:
    """Pass all micro-batches to the training thread. The prefetching thread runs this function.

    A loader process may overwrite a slot of shared memory after the next batch is requested. The
    thread therefore waits for the end of the copy from a slot before it requests the next batch.
    """
    try:
        while exchange.is_wanted():
            if (result := next(batches, None)) is None:
                exchange.put(None)
                return
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                batch = slots.take(result)
            if stream is not None:
                stream.synchronize()
            exchange.put(batch)
            del batch, result
    except BaseException as error:
        exchange.fail(error)


def _used_by(batch: Batch, computing: torch.cuda.Stream) -> Batch:
    """Mark a batch as used by a stream, and return the batch.

    Another stream has filled the batch. Without the mark, the allocator could reuse the memory
    before the stream ``computing`` is done.
    """
    for tensor in batch.data.values():
        tensor.record_stream(computing)
    return batch


_USUAL = 8  # loader processes if the rate of one process has not been measured
_KEPT = 2**28  # freed bytes that a process reuses: it reads 256 images 1.2 times as fast


class Loader:
    """The source of one rank's micro-batches, which loader processes read ahead.

    Args:
        samples: the object that reads samples.
        config: the options.
        rank: number of the rank in the process group.
        device: device of the rank.
        example: batch whose samples have the usual size; None: do not check the memory.
        micro_batch: largest number of samples in a micro-batch of this rank.
        readers: measured number of loader processes that read as fast as the device computes.
            None: not measured.

    Attributes:
        note: reason why the number of loader processes is smaller than usual, or larger than the
            number of cores. Empty: the number is as usual.
        workers: current number of loader processes.
        most_workers: largest number of loader processes that the cores of this rank allow.
    """

    def __init__(
        self,
        samples: Samples,
        config: Config,
        rank: int,
        device: torch.device,
        example: Batch | None = None,
        micro_batch: int = 1,
        readers: int | None = None,
    ) -> None:
        samples = samples_on(samples, config, device)
        self._samples, self._rank, self._device = samples, rank, device
        self._seed, self._eval_samples = config.seed, config.eval_samples
        self._ramp = make_ramp(config.batch_size)
        self._sample = 0.0 if example is None else count_bytes(example)  # bytes of a sample
        self._micro_batch = micro_batch
        wanted = count_workers(samples, config, device, readers)
        self.workers, self.note = self._that_fit(wanted)
        if self.workers > (cores := 1 + spare_cores()):
            self.note = self.note or (
                f"--workers {self.workers} starts more loader processes than this rank has cores "
                f"({cores}), so they slow each other and the training thread; --workers "
                f"{max(1, spare_cores())} leaves a core for training"
            )
        # A number that the user has chosen stays.
        grows = config.workers is None and samples.needs_workers and not self.note
        self.most_workers = spare_cores() if grows else self.workers
        self._train = Keyed(samples, True)
        self._tests = {"": Keyed(samples, False)} | {
            name: Keyed(samples, False, source) for name, source in samples.held_out_sets().items()
        }
        self._asked = MicroBatchKeys()
        self._slots = self._make_slots()
        # Torch hands out the same 32 streams in turn, also for work after an all-reduce, but seldom
        # one of this priority. With a usual stream, 1 in 16 steps on two GPUs waited for 6 ms.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._loader: DataLoader[Any] | None = self._make_loader()
        self._pass = Batches(iter(()), self._slots)
        self._prepared: tuple[tuple[int, int, Plan], Steps] | None = None
        self.order = Order(
            len(self._train), config.seed, config.data_fraction, samples.balanced_classes()
        )

    def steps(self, epoch: int, consumed: int, plan: Plan) -> "Steps":
        """Return the remaining global batches of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            consumed: number of samples of the epoch that training has used already.
            plan: division of each global batch among the ranks.
        """
        prepared, self._prepared = self._prepared, None
        if prepared and prepared[0] == (epoch, consumed, plan):
            return prepared[1]
        return self._make_steps(epoch, consumed, plan)

    def _make_steps(self, epoch: int, consumed: int, plan: Plan) -> "Steps":
        order = self.order.epoch(epoch)
        batches = []
        while consumed < len(order):
            used = epoch * len(order) + consumed
            size = self._ramp.at(used) if used < self._ramp.over else plan.global_batch
            part = order[consumed : consumed + size]
            batches.append((self._cut(plan.for_batch(len(part)), part), part))
            consumed += size
        first = make_seed(self._seed, epoch)

        def list_keys(done: int) -> Iterator[list[Key]]:
            return (
                list(map(Key, cut, make_seeds(first, cut)))
                for plan_of, part in batches[done:]
                for cut in slices(part, plan_of, self._rank)
            )

        return Steps([plan_of for plan_of, _ in batches], list_keys, self._read, self._rank)

    def _cut(self, plan: Plan, part: Sequence[int]) -> Plan:
        costs = self._samples.costs(part)
        if costs is None:
            return plan
        known = len(costs) == len(part) and all(0 <= cost < math.inf for cost in costs)
        if not known or not sum(costs):
            raise MotleyError(
                f"costs() of {type(self._samples).__name__} returns {len(costs)} numbers for "
                f"{len(part)} samples, from {min(costs, default=math.nan):g} to "
                f"{max(costs, default=math.nan):g}. Return one number of 0 or more per sample, at "
                "least one of them above 0, or None if all samples take the same time"
            )
        return plan.by_cost(costs)

    def test_batches(
        self, plan: Plan, then: tuple[int, int] | None = None, part: str = ""
    ) -> Iterator[Batch]:
        """Return the batches of this rank's share of the held-out samples.

        All ranks together read each sample once.

        Args:
            plan: division of the samples among the ranks.
            then: position at which training continues with this plan: the epoch, and the number of
                its consumed samples. Loader processes read ahead from this position, and the next
                call of :meth:`steps` uses these samples unless another pass has started since.
            part: name of an additional set of held-out samples; empty: the usual held-out samples.
        """
        total = len(self._tests[part])
        count = min(total, self._eval_samples or total)
        chosen = [number * total // count for number in range(count)]  # folders are sorted by class
        cuts = slices(chosen, replace(plan, grain=1).for_batch(count), self._rank)
        keys = [[Key(index, 0, held_out=True, part=part) for index in cut] for cut in cuts]
        if then is None or not self.workers:
            return self._read(keys)
        steps = self._make_steps(*then, plan)
        batches = self._read(itertools.chain(keys, steps.list_keys(0)))
        steps.begin(batches)
        self._prepared = (*then, plan), steps
        return (batch for batch, _ in _micro_batches(batches, len(keys)))

    def set_workers(self, workers: int) -> None:
        """Change the number of loader processes, as far as memory allows.

        The caller calls it between two global batches. The new processes start with the next one.
        """
        workers, _ = self._that_fit(workers)
        if workers == self.workers:
            return
        self._pass.close()
        self._pass, self._loader = Batches(iter(()), self._slots), None  # this ends the processes
        self.workers = workers
        self._slots = self._make_slots()
        self._loader = self._make_loader()

    def _that_fit(self, workers: int) -> tuple[int, str]:
        """Return the number of processes that fit into memory, and a message if fewer than wanted.

        See :func:`workers_that_fit`.
        """
        return workers_that_fit(
            workers, self._sample, self._micro_batch, lambda: free_memory(ranks_here())
        )

    def _make_slots(self) -> Slots:
        size = math.ceil(self._sample * self._micro_batch)
        return Slots(self.workers, size, self._device, self._samples.complete)

    def _make_loader(self) -> "DataLoader[Any]":
        train, slots = self._train, self._slots  # put() must hold no reference to this object

        def put(answers: list[Answer]) -> Passed | Batch:
            return slots.put(train.batch(answers))

        with _without_torchs_advice():
            return DataLoader(
                Both(self._train, self._tests),
                batch_sampler=self._asked,
                num_workers=self.workers,
                # Starting 8 processes beside a GPU takes a second.
                persistent_workers=self.workers > 0,
                collate_fn=put if self.workers else train.batch,
                pin_memory=self._device.type == "cuda" and not self.workers,
                worker_init_fn=_start_worker if self.workers else None,
                # With fork, objects need not be pickled for the processes. Without a separate
                # generator, each pass would draw from the one that drop-out uses.
                multiprocessing_context="fork" if self.workers else None,
                generator=torch.Generator(),
                prefetch_factor=PREFETCH if self.workers else None,
            )

    def _read(self, keys: Iterable[list[Key]]) -> "Batches":
        """Start a pass over micro-batches, and end the previous pass."""
        self._pass.close()
        self._asked.keys = keys
        assert self._loader is not None
        with explain_workers(self.workers), _without_torchs_advice():
            batches = iter(self._loader)
        if self.workers:
            self._pass = PrefetchedBatches(batches, self._slots, self._stream, self.workers)
        elif self._stream is not None:
            self._pass = BatchesOnGpu(batches, self._slots, self._stream)
        else:
            self._pass = Batches(batches, self._slots)
        return self._pass


class Steps:
    """The remaining global batches of an epoch, for this rank.

    Args:
        plans: plan of each global batch.
        list_keys: function that lists the keys of this rank's micro-batches. Its argument is the
            number of global batches to skip.
        read: function that starts a pass over micro-batches.
        rank: number of this rank in the process group.
    """

    def __init__(
        self,
        plans: list[Plan],
        list_keys: Callable[[int], Iterator[list[Key]]],
        read: Callable[[Iterable[list[Key]]], Batches],
        rank: int,
    ) -> None:
        self._plans, self.list_keys, self._read, self._rank = plans, list_keys, read, rank
        self._begun: Batches | None = None

    def begin(self, batches: Batches) -> None:
        """Make the first iteration use a pass whose micro-batches are already being read."""
        self._begun = batches

    def __iter__(self) -> Iterator[tuple[Plan, Iterator[tuple[Batch, bool]]]]:
        """Yield the plan of each global batch, with an iterator over its micro-batches.

        The iterator yields pairs: a micro-batch, and True for the last micro-batch.
        """
        begun, self._begun = self._begun, None
        batches = begun or self._read(self.list_keys(0))
        for done, plan in enumerate(self._plans):
            if batches.closed:  # the loader processes have been replaced
                batches = self._read(self.list_keys(done))
            yield plan, _micro_batches(batches, len(plan.micro_batches[self._rank]))


def _micro_batches(batches: Batches, count: int) -> Iterator[tuple[Batch, bool]]:
    for number in range(1, count + 1):
        yield next(batches), number == count
        # The device has enough to compute while the host reads what comes next.
        batches.read_ahead()


def samples_on(samples: Samples, config: Config, device: torch.device) -> Samples:
    """Return the object that reads samples for a rank with this device.

    If a core is free for loader processes, these processes do all the work of reading. Otherwise
    the GPU does a part of this work in 1 % of its time (ViT-B/16, 256 images of 224 pixels, H200).
    A core that loader processes share with the training thread would take much longer.
    """
    return samples if config.workers or spare_cores() >= 1 else samples.on(device)


def count_workers(
    samples: Samples, config: Config, device: torch.device, readers: int | None = None
) -> int:
    """Return the number of loader processes of this rank, without regard to memory.

    Args:
        samples: the object that reads samples.
        config: the options.
        device: device of this rank.
        readers: number of loader processes that read as fast as the device computes. None: not
            measured.
    """
    if config.workers is not None:
        return config.workers
    if device.type == "cpu" or not samples.needs_workers:
        return 0  # CPU ranks need their cores
    return min(max(1, spare_cores()), _USUAL if readers is None else readers)


def spare_cores() -> int:
    """Return the number of this rank's CPU cores, minus the one core for its training thread."""
    return cores_per_rank(ranks_here()) - 1


def ranks_here() -> int:
    """Return the number of ranks on this host, which share its cores and memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def _without_torchs_advice() -> Iterator[None]:
    """Suppress torch's warning about more processes than cores.

    Motley's own warning also names the option to change.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def _start_worker(_: int) -> None:
    die_with_parent()
    keep_freed_memory(_KEPT)
    torch.set_num_threads(1)

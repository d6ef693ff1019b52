"""Gives every rank its own micro-batches of the global order (order.py), read ahead."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from motley.cluster.binding import cores_per_rank
from motley.config.options import Config
from motley.data.batch import Batch
from motley.data.keyed import Answer, Asked, Both, Key, Keyed
from motley.data.loader_memory import bytes_of, explained, free_memory, workers_that_fit
from motley.data.order import Order, seed_of, seeds_of, slices
from motley.data.slots import PREFETCH, Passed, Slots
from motley.data.source import Samples
from motley.launch.process import die_with_parent, keep_freed_memory
from motley.plan.plan import Plan
from motley.plan.ramp import ramp_of

_USUAL = 8  # loader processes, where nobody has measured what one reads
_KEPT = 2**28  # bytes of a process, for its next batch: it makes 256 images 1.2 times as fast


class Loader:
    """Gives one rank its micro-batches, read ahead by worker processes.

    Args:
        rank: number in the process group.
        example: samples whose size is that of others; None: any number of processes fits.
        micro_batch: the most samples of this rank at once.
        readers: processes that keep the device busy, where that was measured.

    Attributes:
        note: why there are fewer processes than usual, or than were asked for; else empty.
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
        self._samples, self._rank, self._device = samples, rank, device
        self._seed, self._eval_samples = config.seed, config.eval_samples
        self._ramp = ramp_of(config.batch_size)
        sample = 0.0 if example is None else bytes_of(example)
        self._workers, self.note = workers_that_fit(
            workers_of(samples, config, device, readers), sample, micro_batch,
            lambda: free_memory(ranks_here()),
        )  # fmt: skip
        self._train, self._test = Keyed(samples, True), Keyed(samples, False)
        self._asked = Asked()
        size = math.ceil(sample * micro_batch)
        self._slots = Slots(self._workers, size, device)
        # Torch hands out the same 32 streams in turn, to what follows an all-reduce too, and nearly
        # none of this priority: with one of those, a step in 16 of two GPUs waited for 6 ms.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._loader = self._make_loader()
        self._pass = Batches(iter(()), self._slots)
        self.order = Order(len(self._train), config.seed, config.data_fraction)

    def steps(self, epoch: int, consumed: int, plan: Plan) -> "Steps":
        """The steps of one epoch after its first ``consumed`` samples."""
        order = self.order.epoch(epoch)
        batches = []
        while consumed < len(order):
            used = epoch * len(order) + consumed
            size = self._ramp.at(used) if used < self._ramp.over else plan.global_batch
            part = order[consumed : consumed + size]
            batches.append((self._cut(plan.of_batch(len(part)), part), part))
            consumed += size
        first = seed_of(self._seed, epoch)
        keys = (
            list(map(Key, cut, seeds_of(first, cut)))
            for plan_of, part in batches
            for cut in slices(part, plan_of, self._rank)
        )
        return Steps([plan_of for plan_of, _ in batches], self._read(keys), self._rank)

    def _cut(self, plan: Plan, part: Sequence[int]) -> Plan:
        costs = self._samples.costs(part)
        return plan if costs is None else plan.by_cost(costs)

    def test_batches(self, plan: Plan) -> Iterator[Batch]:
        """This rank's share of the held-out samples, each of them once over all ranks."""
        total = len(self._test)
        count = min(total, self._eval_samples or total)
        chosen = [number * total // count for number in range(count)]  # a folder's are by class
        cuts = slices(chosen, replace(plan, grain=1).of_batch(count), self._rank)
        return self._read([[Key(index, 0, held_out=True) for index in cut] for cut in cuts])

    def _make_loader(self) -> "DataLoader[Any]":
        train, slots = self._train, self._slots  # not this object, with which they end

        def put(answers: list[Answer]) -> Passed | Batch:
            return slots.put(train.batch(answers))

        return DataLoader(
            Both(self._train, self._test),
            batch_sampler=self._asked,
            num_workers=self._workers,
            persistent_workers=self._workers
            > 0,  # 8 take a second to start, behind a GPU's process
            collate_fn=put if self._workers else train.batch,
            pin_memory=self._device.type == "cuda" and not self._workers,
            worker_init_fn=_start_worker if self._workers else None,
            # Fork: what a worker gets need not be pickled. A generator of its own: else each
            # pass over the data would move the one that drop-out draws from.
            multiprocessing_context="fork" if self._workers else None,
            generator=torch.Generator(),
            prefetch_factor=PREFETCH if self._workers else None,
        )

    def _read(self, keys: Iterable[list[Key]]) -> "Batches":
        """One pass; it ends the one before, if that has not ended."""
        self._pass.settle()
        self._asked.keys = keys
        batches = explained(iter(self._loader), self._workers)
        if self._stream is None:
            self._pass = Batches(batches, self._slots)
        else:
            self._pass = OnGpu(batches, self._slots, self._stream)
        return self._pass


class Batches:
    """Micro-batches on the device that computes them, one after another."""

    def __init__(self, batches: Iterator[Passed | Batch], slots: Slots) -> None:
        self._batches, self._slots = batches, slots

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._slots.take(next(self._batches))

    def read_ahead(self) -> None:
        """Have the next one ready; called where the device has enough to do meanwhile."""

    def settle(self) -> None:
        """Have what was taken copied from where others may write once more is asked for."""


class OnGpu(Batches):
    """Copied to the GPU, in a stream of their own, beside what it computes."""

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
        for tensor in batch.data.values():
            tensor.record_stream(computing)
        return batch

    def read_ahead(self) -> None:
        """See Batches."""
        if self._ready is not None:
            return
        self.settle()
        if (found := next(self._batches, None)) is not None:
            with torch.cuda.stream(self._stream):
                self._ready = self._slots.take(found)

    def settle(self) -> None:
        """See Batches. Long done: it waits for nothing that is computed."""
        self._stream.synchronize()


class Steps:
    """The remaining global batches of an epoch, as this rank sees them."""

    def __init__(self, plans: list[Plan], batches: Batches, rank: int) -> None:
        self._plans, self._batches, self._rank = plans, batches, rank

    def __iter__(self) -> Iterator[tuple[Plan, Iterator[tuple[Batch, bool]]]]:
        """The plan of each global batch, and its micro-batches with "is it the last"."""
        for plan in self._plans:
            yield plan, self._micro_batches(len(plan.micro_batches[self._rank]))

    def _micro_batches(self, count: int) -> Iterator[tuple[Batch, bool]]:
        for number in range(1, count + 1):
            yield next(self._batches), number == count
        # The host is about to wait for the step of all ranks, while its device computes.
        self._batches.read_ahead()


def workers_of(
    samples: Samples, config: Config, device: torch.device, readers: int | None = None
) -> int:
    """Loader processes of this rank, as far as memory allows.

    Args:
        readers: that keep the device busy; None: not measured.
    """
    if config.workers is not None:
        return config.workers
    if device.type == "cpu" or not samples.needs_workers:
        return 0  # CPU ranks need their cores
    most = max(1, cores_per_rank(ranks_here()) - 1)
    return min(most, _USUAL if readers is None else readers)


def ranks_here() -> int:
    """Ranks of this machine, of which each has its part of the cores and the memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _start_worker(_: int) -> None:
    die_with_parent()
    keep_freed_memory(_KEPT)
    torch.set_num_threads(1)

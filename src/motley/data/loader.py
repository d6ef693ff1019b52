"""Gives every rank its own micro-batches of the global order (order.py), read ahead."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from motley.config.options import Config
from motley.data.batch import Batch, Tensors
from motley.data.loader_memory import PREFETCH, Free, bytes_of, explained, workers_that_fit
from motley.data.order import Order, seed_of, seeds_of, slices
from motley.data.source import Samples, UnreadableSample, read
from motley.errors import MotleyError
from motley.launch.process import die_with_parent
from motley.plan.plan import Plan


@dataclass(frozen=True)
class Key:
    """What a worker is asked for: a sample, and the seed of its augmentation."""

    index: int
    seed: int


@dataclass(frozen=True)
class _Sample:
    content: Mapping[str, Any] | None
    index: int
    unreadable: tuple[str, ...]


class _Keyed(Dataset[_Sample]):
    """Answers keys: reads, and changes under the key's own random numbers.

    In training an unreadable sample gives its place to the next readable one, so that the
    global batch keeps its size; in evaluation it is left out.
    """

    def __init__(self, samples: Samples, training: bool) -> None:
        self._samples, self._training = samples, training
        self._source = samples.data(held_out=not training)

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, keys: list[Key]) -> list[_Sample]:
        with torch.random.fork_rng(devices=[]):  # once a batch: it costs more than a digit
            return [self[key] for key in keys]

    def __getitem__(self, key: Key) -> _Sample:
        index, unreadable = key.index, []
        for _ in range(len(self._source)):
            try:
                item = read(self._source, index)
            except UnreadableSample as error:
                unreadable.append(f"{self._samples.name_of(self._source, index)} ({error})")
                if not self._training:
                    return _Sample(None, index, tuple(unreadable))
                index = (index + 1) % len(self._source)
                continue
            torch.default_generator.manual_seed(key.seed)
            content = self._samples.sample(item, self._training)
            if not isinstance(content, Mapping):
                raise MotleyError(
                    f"sample() of {type(self._samples).__name__} gives a {type(content).__name__}; "
                    'a sample is what the model gets by name, as in {"x": ..., "y": ...}'
                )
            return _Sample(content, index, tuple(unreadable))
        raise MotleyError(f"no sample can be read; the first: {unreadable[0]}")

    def batch(self, samples: list[_Sample]) -> Batch:
        """Samples put together, those that could be read."""
        content = [each.content for each in samples if each.content is not None]
        data = self._samples.collate(content) if content else {}
        self._check_rows(data, len(content))
        weights = self._samples.weights(data) if content else None
        if weights is None and self._samples.weight != 1:
            weights = torch.full((len(content),), self._samples.weight)
        return Batch(
            data,
            tuple(each.index for each in samples if each.content is not None),
            weights,
            tuple(name for each in samples for name in each.unreadable),
        )

    def shared_batch(self, samples: list[_Sample]) -> Batch:
        """The same, where other processes see it. Done later, by the thread that passes it on, an
        error would be printed, and the batch waited for until the run is taken for stuck."""
        batch = self.batch(samples)
        for tensor in (*batch.data.values(), *([] if batch.weights is None else [batch.weights])):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return batch

    def _check_rows(self, data: Tensors, n: int) -> None:
        for name, value in data.items():
            rows = len(value) if isinstance(value, Tensor) and value.dim() else None
            if rows != n:
                kind = f"shape {tuple(value.shape)}" if rows is not None else "no rows"
                raise MotleyError(
                    f"collate() of {type(self._samples).__name__} gives {name!r} with {kind} for "
                    f"{n} samples; a batch is tensors by name, whose first dimension is the sample"
                )


def first_batch(samples: Samples, count: int) -> tuple[Batch, int]:
    """The first training samples, for a pass that only is to be made; and how many there are."""
    keyed = _Keyed(samples, training=True)
    check_length(samples, len(keyed), held_out=False)
    keys = [Key(index, index) for index in range(min(count, len(keyed)))]
    return keyed.batch(keyed.__getitems__(keys)), len(keyed)


def check_length(samples: Samples, length: int, held_out: bool) -> None:
    """Raise MotleyError if there is nothing to train on, or to judge by."""
    if not length:
        raise MotleyError(
            f"{type(samples).__name__} has no {'held-out' if held_out else 'training'} samples: "
            f"data(held_out={held_out}) is empty; does it look in the right place?"
        )


def first_sample(samples: Samples) -> Mapping[str, Any]:
    """The first training sample, before it is in a batch."""
    (found,) = _Keyed(samples, training=True).__getitems__([Key(0, 0)])
    assert found.content is not None  # in training another one takes its place
    return found.content


class Loader:
    """Gives one rank its micro-batches, read ahead by worker processes.

    Args:
        rank: number in the process group.
        example: samples whose size is that of others; None: any number of processes fits.
        micro_batch: the most samples of this rank at once.

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
    ) -> None:
        self._samples, self._rank, self._device = samples, rank, device
        self._seed, self._eval_samples = config.seed, config.eval_samples
        self._workers, self.note = workers_that_fit(
            _workers(samples, config, device), 0.0 if example is None else bytes_of(example),
            micro_batch, lambda: Free.here(_ranks_here()),
        )  # fmt: skip
        self._train, self._test = _Keyed(samples, True), _Keyed(samples, False)
        self.order = Order(len(self._train), config.seed, config.data_fraction)

    def steps(self, epoch: int, consumed: int, plan: Plan) -> "Steps":
        """The steps of one epoch after its first ``consumed`` samples."""
        order = self.order.epoch(epoch)
        batches = []
        for start in range(consumed, len(order), plan.global_batch):
            part = order[start : start + plan.global_batch]
            batches.append((self._cut(plan.of_batch(len(part)), part), part))
        first = seed_of(self._seed, epoch)
        keys = (
            list(map(Key, cut, seeds_of(first, cut)))
            for plan_of, part in batches
            for cut in slices(part, plan_of, self._rank)
        )
        return Steps([plan_of for plan_of, _ in batches], self._read(self._train, keys), self._rank)

    def _cut(self, plan: Plan, part: Sequence[int]) -> Plan:
        costs = self._samples.costs(part)
        return plan if costs is None else plan.by_cost(costs)

    def test_batches(self, plan: Plan) -> Iterator[Batch]:
        """This rank's share of the held-out samples, each of them once over all ranks."""
        total = len(self._test)
        count = min(total, self._eval_samples or total)
        chosen = [number * total // count for number in range(count)]  # a folder's are by class
        cuts = slices(chosen, replace(plan, grain=1).of_batch(count), self._rank)
        return self._read(self._test, [[Key(index, 0) for index in cut] for cut in cuts])

    def _read(self, dataset: _Keyed, keys: Iterable[list[Key]]) -> "Batches":
        loader = DataLoader(
            dataset,
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=dataset.shared_batch if self._workers else dataset.batch,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_start_worker if self._workers else None,
            # Fork: what a worker gets need not be pickled. A generator of its own: else each
            # pass over the data would move the one that drop-out draws from.
            multiprocessing_context="fork" if self._workers else None,
            generator=torch.Generator(),
            prefetch_factor=PREFETCH if self._workers else None,
        )
        batches = explained(iter(loader), self._workers)
        return (OnGpu if self._device.type == "cuda" else Batches)(batches, self._device)


class Batches:
    """Micro-batches on the device that computes them, one after another."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def read_ahead(self) -> None:
        """Have the next one ready; called where the device has enough to do meanwhile."""


class OnGpu(Batches):
    """Copied to the GPU beside what it computes."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        super().__init__(batches, device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: Batch | None = None

    def __next__(self) -> Batch:
        self.read_ahead()
        batch, self._ready = self._ready, None
        if batch is None:
            raise StopIteration
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in batch.data.values():
            tensor.record_stream(computing)
        return batch

    def read_ahead(self) -> None:
        """See Batches."""
        if self._ready is None and (batch := next(self._batches, None)) is not None:
            with torch.cuda.stream(self._stream):
                self._ready = batch.to(self._device)


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


def _workers(samples: Samples, config: Config, device: torch.device) -> int:
    if config.workers is not None:
        return config.workers
    if device.type == "cpu" or not samples.needs_workers:
        return 0  # CPU ranks need their cores
    return max(1, min(8, len(os.sched_getaffinity(0)) // _ranks_here() - 1))


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _start_worker(_: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)

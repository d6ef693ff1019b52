"""The sampler that gives every rank its own share of one global order.

An epoch is one permutation drawn from (seed, epoch); a step takes N consecutive entries
of it, and the ranks take consecutive slices of those. Augmentation draws from (seed,
epoch, sample index). So the samples of a step, and what is done to them, do not depend
on how many ranks there are or who takes how much, and a run may go on elsewhere.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from motley.data import (
    UNREADABLE,
    Images,
    Source,
    Transform,
    evaluation_transform,
    training_transform,
)
from motley.errors import MotleyError
from motley.launch import die_with_parent
from motley.options import Config
from motley.plan import Plan

# -- one sample, one batch


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        images: uint8 [n, C, H, W]. labels: int64 [n]. n may be 0.
        indices: of the samples in the dataset, n of them.
        unreadable: names of images that could not be read.
    """

    images: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    unreadable: tuple[str, ...] = ()

    def to(self, device: torch.device) -> "Batch":
        """A copy on ``device``; the copy runs beside the host where the memory is pinned."""
        images = self.images.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        return Batch(images, labels, self.indices, self.unreadable)

    def __getitem__(self, part: slice) -> "Batch":
        """Some of its samples; unreadable images stay with the first of them."""
        return Batch(
            self.images[part], self.labels[part], self.indices[part],
            () if part.start else self.unreadable,
        )  # fmt: skip

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory; DataLoader calls it."""
        return Batch(
            self.images.pin_memory(), self.labels.pin_memory(), self.indices, self.unreadable
        )


@dataclass(frozen=True)
class Key:
    """What a worker is asked for: a sample, and the seed of its augmentation."""

    index: int
    seed: int


@dataclass(frozen=True)
class _Sample:
    image: Tensor | None
    label: int
    index: int
    unreadable: tuple[str, ...]


class _Keyed(Dataset[_Sample]):
    """Answers keys: reads, and transforms under the key's own random numbers.

    In training an unreadable image gives its place to the next readable one, so that the
    global batch keeps its size; in evaluation it is left out.
    """

    def __init__(self, source: Source, transform: Transform, images: Images, train: bool) -> None:
        self._source, self._transform = source, transform
        self._name_of, self._train = images.name_of, train

    def __getitems__(self, keys: list[Key]) -> list[_Sample]:
        with torch.random.fork_rng(devices=[]):  # once a batch: it costs more than a digit
            return [self[key] for key in keys]

    def __getitem__(self, key: Key) -> _Sample:
        index, unreadable = key.index, []
        for _ in range(len(self._source)):
            try:
                image, label = self._source[index]
            except UNREADABLE as error:
                unreadable.append(f"{self._name_of(self._source, index)} ({error})")
                if not self._train:
                    return _Sample(None, 0, index, tuple(unreadable))
                index = (index + 1) % len(self._source)
                continue
            torch.default_generator.manual_seed(key.seed)
            return _Sample(self._transform(image), label, index, tuple(unreadable))
        raise MotleyError(f"no image can be read; the first: {unreadable[0]}")


def _collate(shape: tuple[int, ...]) -> Callable[[list[_Sample]], Batch]:
    def collate(samples: list[_Sample]) -> Batch:
        kept = [sample for sample in samples if sample.image is not None]
        images = torch.empty((len(kept), *shape), dtype=torch.uint8)
        for row, sample in enumerate(kept):
            assert sample.image is not None
            images[row] = sample.image.expand(shape)
        return Batch(
            images,
            torch.tensor([sample.label for sample in kept], dtype=torch.int64),
            tuple(sample.index for sample in kept),
            tuple(name for sample in samples for name in sample.unreadable),
        )

    return collate


# -- the global order


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from several numbers; SeedSequence is stable across versions of NumPy."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seeds_of(first: int, indices: Sequence[int]) -> list[int]:
    """A 63-bit seed for each index: the SplitMix64 stream of ``first``, at these places.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    :func:`seed_of` takes 9 us, so a GPU would wait 4 ms for a batch of 450.
    """
    mixed = np.asarray(indices, dtype=np.uint64) + np.uint64(1)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(first)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: list[int] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).tolist()
    return seeds


@dataclass(frozen=True)
class Order:
    """The global order of training samples.

    Attributes:
        samples: number of images in the training set.
        fraction: part of them that takes part, the same part in every epoch.
    """

    samples: int
    seed: int
    fraction: float = 1.0

    @property
    def epoch_samples(self) -> int:
        """Samples in one epoch."""
        return max(1, round(self.samples * self.fraction))

    def epoch(self, epoch: int) -> list[int]:
        """Indices of one epoch in the order in which they are used, over all ranks."""
        chosen = self._permutation(self.samples, self.seed)[: self.epoch_samples]
        if self.fraction == 1.0:
            chosen = list(range(self.samples))
        return [chosen[at] for at in self._permutation(len(chosen), self.seed, epoch)]

    @staticmethod
    def _permutation(length: int, *seeds: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed_of(*seeds))
        permutation: list[int] = torch.randperm(length, generator=generator).tolist()
        return permutation


def slices(order: Sequence[int], plan: Plan, rank: int) -> list[list[int]]:
    """This rank's micro-batches of one global batch ``order``, as ``plan`` cuts it."""
    start, cuts = plan.starts[rank], []
    for size in plan.micro_batches[rank]:
        cuts.append(list(order[start : start + size]))
        start += size
    return cuts


class Loader:
    """Gives one rank its micro-batches, read ahead by worker processes.

    Args:
        rank: number in the process group.
    """

    def __init__(
        self, images: Images, config: Config, img_size: int, rank: int, device: torch.device
    ) -> None:
        self.order = Order(len(images.train), config.seed, config.data_fraction)
        self._images, self._rank, self._device = images, rank, device
        self._seed, self._eval_images = config.seed, config.eval_images
        self._workers = _default_workers(config, device)
        self._shape = (images.channels, img_size, img_size)
        self._train = _Keyed(
            images.train, training_transform(images, img_size, config.augment), images, train=True
        )
        self._test = _Keyed(
            images.test, evaluation_transform(images, img_size), images, train=False
        )

    def steps(self, epoch: int, consumed: int, plan: Plan) -> "Steps":
        """The steps of one epoch after its first ``consumed`` samples."""
        order = self.order.epoch(epoch)
        batches = []
        for start in range(consumed, len(order), plan.global_batch):
            part = order[start : start + plan.global_batch]
            batches.append((plan.of_batch(len(part)), part))
        first = seed_of(self._seed, epoch)
        keys = (
            list(map(Key, cut, seeds_of(first, cut)))
            for plan_of, part in batches
            for cut in slices(part, plan_of, self._rank)
        )
        return Steps([plan_of for plan_of, _ in batches], self._read(self._train, keys), self._rank)

    def test_batches(self, plan: Plan) -> Iterator[Batch]:
        """This rank's share of the held-out images, each of them once over all ranks."""
        total = len(self._images.test)
        count = min(total, self._eval_images or total)
        chosen = [number * total // count for number in range(count)]  # a folder's are by class
        cuts = slices(chosen, plan.of_batch(count), self._rank)
        return self._read(self._test, [[Key(index, 0) for index in cut] for cut in cuts])

    def _read(self, dataset: _Keyed, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        loader = DataLoader(
            dataset,
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=_collate(self._shape),
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_start_worker if self._workers else None,
            # Fork: what a worker gets need not be pickled. A generator of its own: else each
            # pass over the data would move the one that drop-out draws from.
            multiprocessing_context="fork" if self._workers else None,
            generator=torch.Generator(),
            prefetch_factor=2 if self._workers else None,
        )
        return _ahead(iter(loader), self._device)


class Steps:
    """The remaining global batches of an epoch, as this rank sees them."""

    def __init__(self, plans: list[Plan], batches: Iterator[Batch], rank: int) -> None:
        self._plans, self._batches, self._rank = plans, batches, rank

    def __iter__(self) -> Iterator[tuple[Plan, Iterator[tuple[Batch, bool]]]]:
        """The plan of each global batch, and its micro-batches with "is it the last"."""
        for plan in self._plans:
            yield plan, self._micro_batches(len(plan.micro_batches[self._rank]))

    def _micro_batches(self, count: int) -> Iterator[tuple[Batch, bool]]:
        for number in range(1, count + 1):
            yield next(self._batches), number == count


def _default_workers(config: Config, device: torch.device) -> int:
    if config.workers is not None:
        return config.workers
    if config.dataset == "digits" or device.type == "cpu":
        return 0  # reading digits is cheaper than a process; CPU ranks need their cores
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks_here - 1))


def _start_worker(_: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)


def _ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on ``device``; on a GPU the next one is copied while this one computes."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = batch.to(device)
        if waiting is not None:
            yield waiting
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in (copied.images, copied.labels):
            tensor.record_stream(torch.cuda.current_stream(device))
        waiting = copied
    if waiting is not None:
        yield waiting

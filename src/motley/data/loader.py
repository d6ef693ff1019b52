"""Gives every rank its own micro-batches of the global order (order.py), read ahead."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from motley.config.options import Config
from motley.data.batch import Batch
from motley.data.dataset import find_dataset
from motley.data.images import Images, Source, UnreadableImage, read
from motley.data.order import Order, seed_of, seeds_of, slices
from motley.data.transforms import Transform, evaluation_transform, training_transform
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
                image, label = read(self._source, index)
            except UnreadableImage as error:
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
        labels = torch.tensor([sample.label for sample in kept], dtype=torch.int64)
        return Batch(
            {"images": images, "labels": labels},
            tuple(sample.index for sample in kept),
            tuple(name for sample in samples for name in sample.unreadable),
        )

    return collate


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
    if device.type == "cpu" or not find_dataset(config.dataset).needs_workers:
        return 0  # CPU ranks need their cores
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
        for tensor in copied.data.values():
            tensor.record_stream(torch.cuda.current_stream(device))
        waiting = copied
    if waiting is not None:
        yield waiting

"""Answers the keys of samples, in whatever process: what is read, and changed by random numbers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from motley.data.source import Batch, Samples, Tensors, UnreadableSample, read
from motley.errors import MotleyError


@dataclass(frozen=True)
class Key:
    """What a worker is asked for: a sample, held out or not, and the seed of its augmentation."""

    index: int
    seed: int
    held_out: bool = False


@dataclass(frozen=True)
class Answer:
    content: Mapping[str, Any] | None
    index: int
    unreadable: tuple[str, ...]


class Keyed(Dataset[Answer]):
    """Answers keys: reads, and changes under the key's own random numbers.

    In training an unreadable sample gives its place to the next readable one, so that the
    global batch keeps its size; in evaluation it is left out.
    """

    def __init__(self, samples: Samples, training: bool) -> None:
        self._samples, self._training = samples, training
        self._source = samples.data(held_out=not training)

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, keys: list[Key]) -> list[Answer]:
        with torch.random.fork_rng(devices=[]):  # once a batch: it costs more than a digit
            return [self[key] for key in keys]

    def __getitem__(self, key: Key) -> Answer:
        index, unreadable = key.index, []
        for _ in range(len(self._source)):
            try:
                item = read(self._source, index)
            except UnreadableSample as error:
                unreadable.append(f"{self._samples.name_of(self._source, index)} ({error})")
                if not self._training:
                    return Answer(None, index, tuple(unreadable))
                index = (index + 1) % len(self._source)
                continue
            torch.default_generator.manual_seed(key.seed)
            content = self._samples.sample(item, self._training)
            if not isinstance(content, Mapping):
                raise MotleyError(
                    f"sample() of {type(self._samples).__name__} gives a {type(content).__name__}; "
                    'a sample is what the model gets by name, as in {"x": ..., "y": ...}'
                )
            return Answer(content, index, tuple(unreadable))
        raise MotleyError(f"no sample can be read; the first: {unreadable[0]}")

    def batch(self, samples: list[Answer]) -> Batch:
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

    def _check_rows(self, data: Tensors, n: int) -> None:
        for name, value in data.items():
            rows = len(value) if isinstance(value, Tensor) and value.dim() else None
            if rows != n:
                kind = f"shape {tuple(value.shape)}" if rows is not None else "no rows"
                raise MotleyError(
                    f"collate() of {type(self._samples).__name__} gives {name!r} with {kind} for "
                    f"{n} samples; a batch is tensors by name, whose first dimension is the sample"
                )


class Both(Dataset[Answer]):
    """Training samples and held-out ones, for processes that serve a whole run."""

    def __init__(self, train: Keyed, test: Keyed) -> None:
        self._train, self._test = train, test

    def __getitems__(self, keys: list[Key]) -> list[Answer]:
        return (self._test if keys and keys[0].held_out else self._train).__getitems__(keys)


class Asked:
    """The keys of each micro-batch of the pass that is made now."""

    def __init__(self) -> None:
        self.keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def first_batch(samples: Samples, count: int) -> tuple[Batch, int]:
    """The first training samples, for a pass that only is to be made; and how many there are."""
    keyed = Keyed(samples, training=True)
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
    (found,) = Keyed(samples, training=True).__getitems__([Key(0, 0)])
    assert found.content is not None  # in training another one takes its place
    return found.content

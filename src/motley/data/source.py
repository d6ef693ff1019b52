"""Samples: their global order, the reading of single samples, and micro-batches.

Every rank reads its own share of the order. A key identifies a sample and the seed of its
augmentation, so any process can read the sample of a key.

An epoch is a permutation of the samples, drawn from (seed, epoch). A step takes the next N entries
of the permutation, and each rank takes a consecutive slice of the N entries. Augmentation draws
from (seed, epoch, sample index). The samples of a step and their augmentation therefore depend
neither on the number of ranks nor on their shares. A run may continue on other hosts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from motley.errors import MotleyError
from motley.plan.plan import Plan


def make_seed(*numbers: int) -> int:
    """Return a 63-bit seed that is derived from several numbers.

    The result is the same in all versions of NumPy.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def make_seeds(first: int, indices: Sequence[int]) -> list[int]:
    """Return a 63-bit seed for each index: the entry at that index of a SplitMix64 stream.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    :func:`make_seed` takes 9 us per seed, so a GPU would wait 4 ms for a batch of 450.

    Args:
        first: start of the stream.
        indices: indices into the stream.
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
        samples: number of samples in the training set.
        seed: seed of the permutations.
        fraction: fraction of the samples that training uses. Every epoch uses the same samples.
        classes: class of each sample, if epochs are balanced to have equally many samples of each
            class. None: an epoch has each sample once.
    """

    samples: int
    seed: int
    fraction: float = 1.0
    classes: Sequence[int] | None = None

    @property
    def epoch_samples(self) -> int:
        """Number of samples in one epoch."""
        return max(1, round(self.samples * self.fraction))

    def epoch(self, epoch: int) -> list[int]:
        """Return the sample indices of one epoch, in the order in which all ranks use them."""
        chosen = self._permutation(self.samples, self.seed)[: self.epoch_samples]
        if self.fraction == 1.0:
            chosen = list(range(self.samples))
        if self.classes is not None:
            chosen = self._balance(chosen, self.classes, epoch)
        return [chosen[at] for at in self._permutation(len(chosen), self.seed, epoch)]

    def _balance(self, chosen: list[int], classes: Sequence[int], epoch: int) -> list[int]:
        """Return the sample indices of a balanced epoch, with as many samples as ``chosen`` has.

        The numbers of samples of two classes differ by one at most. All samples of a small class
        are used equally often, up to a difference of one. The samples of a large class that are
        left out differ from epoch to epoch.
        """
        members: dict[int, list[int]] = {}
        for index in chosen:
            members.setdefault(classes[index], []).append(index)
        each, rest = divmod(len(chosen), len(members))
        result = list[int]()
        for place, label in enumerate(sorted(members)):
            own = members[label]
            count = each + ((place + epoch) % len(members) < rest)
            for turn in range(-(-count // len(own))):
                order = self._permutation(len(own), self.seed, epoch, place, turn)
                result += [own[at] for at in order[: count - turn * len(own)]]
        return result

    @staticmethod
    def _permutation(length: int, *seeds: int) -> list[int]:
        generator = torch.Generator().manual_seed(make_seed(*seeds))
        permutation: list[int] = torch.randperm(length, generator=generator).tolist()
        return permutation


def slices(order: Sequence[int], plan: Plan, rank: int) -> list[list[int]]:
    """Return this rank's micro-batches of one global batch, as lists of indices.

    If samples stay together in groups of g, the G groups of a micro-batch are interleaved: row
    k * G + j is sample k of group j. A view of the shape [g, G * channels, ...] then allows one
    call to compute the statistics of all groups.

    Args:
        order: indices of the global batch.
        plan: division of the batch among ranks and micro-batches.
        rank: number of the rank.
    """
    start, cuts = plan.starts[rank], []
    for size in plan.micro_batches[rank]:
        groups = max(1, size // plan.grain)
        part = order[start : start + size]
        each = size // groups
        cuts.append([part[j * each + k] for k in range(each) for j in range(groups)])
        start += size
    return cuts


Tensors = dict[str, Tensor]  # tensors by name; each has one row per sample


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        data: the task's tensors by name, one row per sample; empty without samples. For images:
            ``images``, uint8 [n, C, H, W], and ``labels``, int64 [n].
        indices: indices of the n samples in the data set; n may be 0.
        weights: weight of each sample in the mean loss, [n], on the CPU; None: 1 each.
        unreadable: names of samples that could not be read.
    """

    data: Tensors
    indices: tuple[int, ...]
    weights: Tensor | None = None
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def weight(self) -> float:
        """Total weight of the samples in the mean loss."""
        return float(len(self)) if self.weights is None else float(self.weights.sum())

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch. The tensor of weights is the last one."""
        return [*self.data.values(), *([] if self.weights is None else [self.weights])]

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on ``device``. The copy is asynchronous if the memory is pinned."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def __getitem__(self, part: slice) -> "Batch":
        """Return a part of the batch. Only the first part has names of unreadable samples."""
        return replace(
            self._changed(lambda tensor: tensor[part]), indices=self.indices[part],
            weights=None if self.weights is None else self.weights[part],
            unreadable=() if part.start else self.unreadable,
        )  # fmt: skip

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory. Torch's DataLoader calls this method."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, data={name: change(tensor) for name, tensor in self.data.items()})


class UnreadableSample(Exception):  # noqa: N818 - the sample is at fault, not the program
    """A sample that cannot be read. The message gives the reason."""


class Source(Protocol):
    """A sequence of samples that are read by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample in the form in which the source stores it; see :func:`read`."""


class Samples(Protocol):
    """The methods of motley.tasks.task.Task that the loader uses."""

    @property
    def needs_workers(self) -> bool:
        """True if reading a sample takes longer than passing it between processes."""

    @property
    def weight(self) -> float:
        """Weight of a usual sample in the mean loss."""

    def data(self, held_out: bool) -> Source:
        """Return the source of the training samples or of the held-out samples."""

    def held_out_sets(self) -> Mapping[str, Source]:
        """Return the sources of further held-out samples by name."""

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of one item of a source, by name."""

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """Return a batch of samples: tensors by name, with one row for each sample."""

    def weights(self, batch: Tensors) -> Tensor | None:
        """Return the weight of each sample in the mean loss, [n].

        None: each sample has the weight :attr:`weight`.
        """

    def balanced_classes(self) -> Sequence[int] | None:
        """Return the class of each training sample for a balanced order; None: do not balance."""

    def on(self, device: torch.device) -> "Samples":
        """Return an object that reads the same samples for a rank with this device."""

    def complete(self, batch: Tensors) -> Tensors:
        """Complete a batch on the device, if :meth:`collate` has left work to the device.

        Return the complete batch.
        """

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Return the relative compute time of training samples; None: all samples cost the same."""

    def name_of(self, source: Source, index: int) -> str:
        """Return the name of a sample for an error message."""


def read(source: Source, index: int) -> Any:
    """Return ``source[index]``.

    For damaged or hostile files, Pillow's decoders raise OSError, SyntaxError, ValueError,
    DecompressionBombError, TypeError and other types. Other libraries do the same. All of these
    errors are converted, but not an out-of-memory error, which does not come from the sample.

    Raises:
        UnreadableSample: the decoder raised any other error.
    """
    try:
        return source[index]
    except (MemoryError, MotleyError):
        raise
    except Exception as error:
        raise UnreadableSample(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Key:
    """A request to a loader process for one sample.

    Attributes:
        index: index of the sample.
        seed: seed of the sample's augmentation.
        held_out: True for a held-out sample.
        part: name of an additional set of held-out samples; empty: the usual held-out samples.
    """

    index: int
    seed: int
    held_out: bool = False
    part: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer of a loader process to a :class:`Key`, the request for one sample.

    Attributes:
        content: tensors of the sample by name; None: a held-out sample could not be read.
        index: index of the sample that was read. In training, the next readable sample replaces an
            unreadable sample.
        unreadable: names of samples that could not be read, each with the reason.
    """

    content: Mapping[str, Any] | None
    index: int
    unreadable: tuple[str, ...]


class Keyed(Dataset[Answer]):
    """A data set that reads and augments the sample of each :class:`Key`, with the key's seed.

    In training, the next readable sample replaces an unreadable one, so that the global batch keeps
    its size. In evaluation an unreadable sample is left out.

    Args:
        samples: the object that reads samples.
        training: True for training samples, False for held-out samples.
        source: source of the samples; None: the source that ``samples.data()`` returns.
    """

    def __init__(self, samples: Samples, training: bool, source: Source | None = None) -> None:
        self._samples, self._training = samples, training
        self._source = samples.data(held_out=not training) if source is None else source

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, keys: list[Key]) -> list[Answer]:
        # Once per batch, because it takes longer than reading a digit.
        with torch.random.fork_rng(devices=[]):
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
                    f"sample() of {type(self._samples).__name__} returns a "
                    f"{type(content).__name__}; return a dictionary of the model's inputs by "
                    'name, as in {"x": ..., "y": ...}'
                )
            return Answer(content, index, tuple(unreadable))
        raise MotleyError(f"no sample can be read; the first one is {unreadable[0]}")

    def batch(self, samples: list[Answer]) -> Batch:
        """Return a batch of the samples that could be read.

        Raises:
            MotleyError: a tensor of the batch does not have one row per sample.
        """
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
                    f"collate() of {type(self._samples).__name__} returns {name!r} with {kind} "
                    f"for {n} samples; return a dictionary of tensors whose first dimension is "
                    "the sample"
                )


class Both(Dataset[Answer]):
    """A data set of training samples and held-out samples, for loader processes of a whole run."""

    def __init__(self, train: Keyed, tests: Mapping[str, Keyed]) -> None:
        self._train, self._tests = train, tests

    def __getitems__(self, keys: list[Key]) -> list[Answer]:
        is_held_out = keys and keys[0].held_out
        return (self._tests[keys[0].part] if is_held_out else self._train).__getitems__(keys)


class MicroBatchKeys:
    """An iterable of the keys of each micro-batch in the current pass over the data."""

    def __init__(self) -> None:
        self.keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def first_batch(samples: Samples, count: int) -> tuple[Batch, int]:
    """Return a batch of the first training samples, and the number of all training samples.

    Raises:
        MotleyError: there are no training samples.
    """
    keyed = Keyed(samples, training=True)
    check_length(samples, len(keyed), held_out=False)
    keys = [Key(index, index) for index in range(min(count, len(keyed)))]
    return keyed.batch(keyed.__getitems__(keys)), len(keyed)


def check_length(samples: Samples, length: int, held_out: bool, part: str = "") -> None:
    """Raise MotleyError if there are no samples to train on, or to evaluate with.

    Args:
        samples: the object that reads samples.
        length: number of samples in the set.
        held_out: True for held-out samples.
        part: name of an additional set of held-out samples; empty: the usual held-out samples.
    """
    if not length and part:
        raise MotleyError(
            f"the held-out set {part} of {type(samples).__name__} has no samples; check where the "
            "task looks for its data"
        )
    if not length:
        raise MotleyError(
            f"{type(samples).__name__} has no {('held-out' if held_out else 'training')} samples: "
            f"data(held_out={held_out}) returns none; check where the task looks for its data"
        )


def first_sample(samples: Samples) -> Mapping[str, Any]:
    """Return the first training sample, before collation."""
    (result,) = Keyed(samples, training=True).__getitems__([Key(0, 0)])
    assert result.content is not None  # training replaces an unreadable sample
    return result.content

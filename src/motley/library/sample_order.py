"""The order of samples in a user's own DataLoader, drawn on rank 0 and sent to all ranks.

Any finite sampler works, since only rank 0 iterates over the sampler. The sampler gets the random
numbers that it would get on one machine, from the states of torch, NumPy and ``random`` when the
first loader is read. Samplers draw from a random state of their own, which the model does not
change.
"""

import contextlib
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from motley.comm.collectives import broadcast_object

Batches = Sequence[Sequence[Any]]


class RandomState:
    """The state of the three global generators on the CPU: torch, NumPy and ``random``."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.numpy: Any = np.random.get_state()
        self.python = random.getstate()

    def restore(self) -> None:
        """Set the global generators to this state."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        version, numbers, gauss = self.python
        python = torch.tensor(numbers, dtype=torch.int64)
        name, keys, *rest = self.numpy
        numpy = (name, torch.from_numpy(keys.astype(np.int64)), *rest)  # torch sends no uint32
        return {"torch": self.torch, "numpy": numpy, "python": (version, python, gauss)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "RandomState":
        """Return the state that :meth:`state_dict` has returned."""
        result = cls()
        result.torch = state["torch"].to(torch.uint8)
        name, keys, *rest = state["numpy"]
        result.numpy = (name, keys.numpy().astype(np.uint32), *rest)
        version, numbers, gauss = state["python"]
        result.python = (version, tuple(numbers.tolist()), gauss)
        return result


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global random generators at the end of the ``with`` block."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


class SampleOrder:
    """The random state for samplers. Rank 0 draws from the state, and all ranks hold it.

    Attributes:
        before: random state before the last order was drawn; None before the first order.
        state: random state from which the next order is drawn. None: the next order is drawn from
            the global generators.
    """

    def __init__(self) -> None:
        self.before: RandomState | None = None
        self.state: RandomState | None = None

    def draw(
        self, loader: "DataLoader[Any]", generators: Sequence[torch.Generator], device: torch.device
    ) -> Batches:
        """Return the indices of each global batch of one epoch; all ranks call it.

        Args:
            loader: the user's loader, which has a batch sampler.
            generators: ``torch.Generator`` objects that the user gave to the loader's samplers.
            device: device of this rank.
        """
        drawn = None
        if dist.get_rank() == 0:
            drawn = self._draw_here(loader), [each.get_state() for each in generators]
        drawn = broadcast_object(drawn, device)
        (indices, sizes, self.before, self.state), states = drawn
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if indices is None:
            return ConsecutiveBatches.read(loader)
        return take_parts(indices.tolist() if isinstance(indices, np.ndarray) else indices, sizes)

    def _draw_here(self, loader: "DataLoader[Any]") -> tuple[Any, list[int], Any, Any]:
        usual = RandomState()
        before = self.state or usual
        before.restore()
        try:
            # A DataLoader draws this number for its workers before its sampler draws.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            assert loader.batch_sampler is not None
            if is_consecutive(loader):
                return None, [], before, RandomState()
            numbers, sizes = array("q"), []
            others: list[Any] = []
            for batch in map(list, loader.batch_sampler):
                sizes.append(len(batch))
                if not others and all(isinstance(index, int) for index in batch):
                    numbers.extend(batch)  # 8 bytes each
                else:
                    others += batch
            after = RandomState()
        finally:
            usual.restore()
        if others:
            return [*numbers, *others], sizes, before, after
        return np.array(numbers, dtype=np.int64), sizes, before, after


class ConsecutiveBatches(Sequence[range]):
    """The batches of a loader without shuffling, computed on access instead of stored.

    Args:
        rows: number of rows of the data set.
        size: number of rows of a batch.
        count: number of batches.
    """

    def __init__(self, rows: int, size: int, count: int) -> None:
        self._rows, self._size, self._count = rows, size, count

    @classmethod
    def read(cls, loader: "DataLoader[Any]") -> "ConsecutiveBatches":
        """Return the batches of a loader for which :func:`is_consecutive` holds."""
        assert isinstance(loader.batch_sampler, BatchSampler)
        sampler = loader.batch_sampler
        return cls(len(sampler.sampler), sampler.batch_size, len(sampler))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._count))]
        if not 0 <= number < self._count:
            raise IndexError(number)
        start = number * self._size
        return range(start, min(start + self._size, self._rows))


def count_most_rows(batches: Batches) -> int:
    """Return the number of rows of the largest batch."""
    return len(batches[0]) if isinstance(batches, ConsecutiveBatches) else max(map(len, batches))


def is_consecutive(loader: "DataLoader[Any]") -> bool:
    """Return True if a loader yields the rows of its data set in their order."""
    sampler = loader.batch_sampler
    return type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler


def take_parts(values: Sequence[Any], sizes: Sequence[int]) -> Batches:
    """Return consecutive slices of ``values`` with these sizes."""
    starts = accumulate(sizes, initial=0)
    return [values[start : start + size] for start, size in zip(starts, sizes, strict=False)]

"""A data set of batches that a user's function makes. The ranks divide the rows of each batch.

Scripts without a DataLoader have a function such as ``get_batch()``, which draws rows at random or
cuts them out of tensors in memory. Every rank calls the function for the whole global batch, and
keeps its own rows.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from motley.data.source import make_seed
from motley.engines.named_state import seed_random
from motley.errors import MotleyError
from motley.library.sample_order import kept_random_state


class MadeBatches(Dataset[int]):
    """The rows of batches that a function makes.

    Item ``i`` is the index ``i`` itself, and :meth:`take` returns the rows of given indices.

    Args:
        make: function that returns the global batch of a given number.
        count: number of batches.
        seed: seed of the random numbers of ``make``.
        device: device of this rank.

    Attributes:
        rows: number of rows of a batch; the last batch may have fewer.
    """

    def __init__(
        self, make: Callable[[int], Any], count: int, seed: int, device: torch.device
    ) -> None:
        if device.type == "cuda" and device.index is None:  # the process is alone
            device = torch.device("cuda", torch.cuda.current_device())
        self._make, self._count, self._seed, self._device = make, count, seed, device
        self._last: tuple[int, Any] = (-1, None)  # number and content of the batch made last
        self._of_last = self._count_rows(count - 1)
        self.rows = self._count_rows(0)
        if self._of_last > self.rows:
            self._refuse(count - 1, self._of_last)

    def __len__(self) -> int:
        return self.rows * (self._count - 1) + self._of_last

    def __getitem__(self, index: int) -> int:
        return index

    def loader(self) -> "DataLoader[Any]":
        """Return a DataLoader that yields the batches in the order of their numbers."""
        return DataLoader(self, batch_size=self.rows, collate_fn=self.take)

    def take(self, indices: Sequence[int]) -> Any:
        """Return the rows of one batch with these indices, in this order."""
        number = indices[0] // self.rows
        batch = self._get(number)
        size, usual = _count_rows(batch), self._of_last if number == self._count - 1 else self.rows
        if size != usual:
            self._refuse(number, size)
        rows = [index - number * self.rows for index in indices]
        if rows != list(
            range(rows[0], rows[0] + len(rows))
        ):  # groups interleave rows; see data.source.slices
            return _cut(batch, rows)
        return batch if len(rows) == size else _cut(batch, slice(rows[0], rows[0] + len(rows)))

    def _count_rows(self, number: int) -> int:
        return _count_rows(self._get(number))

    def _get(self, number: int) -> Any:
        """Return a batch. Its random numbers depend on the seed and on the batch's number."""
        if self._last[0] != number:
            with kept_random_state(), torch.random.fork_rng(_list_gpus(self._device)):
                seed = make_seed(self._seed, number)
                seed_random(seed, self._device)
                np.random.seed(seed % 2**32)
                random.seed(seed)
                self._last = number, self._make(number)
        return self._last[1]

    def _refuse(self, number: int, size: int) -> None:
        raise MotleyError(
            f"batch {number} of lab.batches() has {size} rows, and batch 0 has {self.rows}: make "
            "batches of one size, of which only the last may be smaller"
        )


def _list_gpus(device: torch.device) -> list[int]:
    return [device.index] if device.type == "cuda" else []


def _list_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch that have rows."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _list_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _list_tensors(each)


def _count_rows(batch: Any) -> int:
    """Return the number of rows of a batch.

    Raises:
        MotleyError: the tensors of the batch have no rows, or different numbers of rows.
    """
    sizes = sorted({len(each) for each in _list_tensors(batch)})
    if len(sizes) != 1 or not sizes[0]:
        found = f"tensors with {' and '.join(map(str, sizes))} rows" if sizes else "no tensor"
        raise MotleyError(
            f"the function of lab.batches() returned {found}: return tensors whose dimension 0 "
            "counts the rows of the batch, as x.transpose(0, 1) does for a dimension 1"
        )
    return sizes[0]


def _cut(value: Any, rows: slice | list[int]) -> Any:
    """Return some rows of a batch, in the structure of the batch."""
    if isinstance(value, Tensor | np.ndarray):
        return value[rows] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _cut(each, rows) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_cut(each, rows) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(each, rows) for each in value)
    return value

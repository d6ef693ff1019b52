"""Loaders that read this rank's rows of each global batch of a user's own DataLoader."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from motley.data.source import make_seed, make_seeds, slices
from motley.errors import MotleyError
from motley.library.made_batches import MadeBatches
from motley.library.sample_order import Batches, is_consecutive, kept_random_state
from motley.library.share_schedule import Piece, ShareSchedule

MOST_ROWS = 2**27  # in the order of an epoch, which takes 8 bytes a row
Key = tuple[Any, int]  # index of a row, and the seed of its random numbers


class SeededRows(Dataset[Any]):
    """A user's data set, whose rows are read by :data:`Key`.

    The random numbers of a row depend on (seed, epoch, index) alone, and so neither on the rank
    that reads it nor on the number of worker processes.

    Args:
        rows: the user's data set.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while the object is being unpickled
            raise AttributeError(name)
        return getattr(self._rows, name)  # for a user's worker_init_fn

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        if isinstance(self._rows, MadeBatches):  # which seeds its own random numbers
            return [index for index, _ in keys]
        if torch.utils.data.get_worker_info() is not None:
            return [self._read(*key) for key in keys]
        with kept_random_state():  # this is the user's own process
            return [self._read(*key) for key in keys]

    def _read(self, index: Any, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self._rows[index]


class _KeyBatches:
    """A batch sampler whose batches are set before each pass."""

    def __init__(self) -> None:
        self.batches: Iterator[list[Key]] = iter(())

    def __iter__(self) -> Iterator[list[Key]]:
        return self.batches


def check_loader(loader: Any) -> None:
    """Raise MotleyError if a loader's samples cannot be divided among ranks."""
    if not isinstance(loader, DataLoader):
        raise MotleyError(
            f"lab.loader() was given a {type(loader).__name__}, and divides the batches of a "
            "torch.utils.data.DataLoader: pass the DataLoader itself, before anything wraps or "
            "reads it, or pass a function that makes a batch to lab.batches()"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise MotleyError(
            f"{type(loader.dataset).__name__} is an IterableDataset, whose rows have no index, so "
            "no rank can read its own rows alone: give lab.loader() a data set with len() and "
            "[index]"
        )
    if loader.batch_sampler is None:
        raise MotleyError(
            "the DataLoader has batch_size=None, so its batches have no rows that ranks can "
            "divide: give it the batch size of one machine"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MotleyError(
            f"{type(loader).__name__} changes what a DataLoader yields: pass a plain "
            "torch.utils.data.DataLoader, and move the change to collate_fn or to the loop"
        )
    try:
        rows = len(loader.batch_sampler) * (loader.batch_size or 1)  # type: ignore[arg-type]
    except TypeError:
        raise MotleyError(
            f"{type(loader.sampler).__name__} has no length, so ranks cannot agree on the end of "
            "an epoch: give the sampler a __len__(), or draw a fixed number of indices an epoch"
        ) from None
    if rows > MOST_ROWS and not is_consecutive(loader):
        raise MotleyError(
            f"the {type(loader.sampler).__name__} draws {rows:,} rows an epoch, whose order is "
            f"drawn at once and may have {MOST_ROWS:,} rows: give it a smaller number, as in "
            f"RandomSampler(rows, replacement=True, num_samples=1_000_000), and loop over epochs"
        )


class RankReader:
    """The reader of this rank's rows, with a copy of the user's DataLoader.

    Args:
        loader: the user's loader, which :func:`check_loader` has accepted.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._keys = _KeyBatches()
        self._loader = DataLoader(
            SeededRows(loader.dataset),
            batch_sampler=self._keys,
            num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory, timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        )  # fmt: skip

    def read(self, keys: Iterator[list[Key]]) -> Iterator[Any]:
        """Yield one collated batch for each list of keys."""
        self._keys.batches = keys
        yield from self._loader

    def read_once(self, keys: Sequence[Key]) -> Any:
        """Return one collated batch, read by this process."""
        rows = self._loader.dataset.__getitems__(list(keys))  # type: ignore[attr-defined]
        assert self._loader.collate_fn is not None
        return self._loader.collate_fn(rows)


class PieceReader:
    """The reader of this rank's pieces of each global batch of an epoch.

    Args:
        loader: the user's loader.
        schedule: the shares of all ranks.
        rank: returns the number of this rank, which a lost rank changes.
        seed: seed of the random numbers of rows.

    Attributes:
        reached: last step whose pieces were requested from the loader; its workers read ahead.
    """

    def __init__(
        self, loader: "DataLoader[Any]", schedule: ShareSchedule, rank: Callable[[], int], seed: int
    ) -> None:
        self._reader, self._schedule = RankReader(loader), schedule
        self._rank, self._seed = rank, seed
        self._pending: deque[Piece] = deque()
        self.reached = -1

    def read(
        self, batches: Batches, epoch: int, first_batch: int, step: int
    ) -> Iterator[tuple[Piece, Any]]:
        """Yield the pieces of an epoch, each with its collated rows.

        Args:
            batches: indices of each global batch.
            epoch: number of the epoch.
            first_batch: number of the global batch to start with.
            step: number of its step since the start of training.
        """
        self._pending.clear()
        for rows in self._reader.read(self._request(batches, epoch, first_batch, step)):
            yield self._pending.popleft(), rows

    def read_held_out(self, batches: Batches, step: int) -> Iterator[Any]:
        """Yield this rank's rows of each global batch of held-out data, without padding.

        Args:
            batches: indices of each global batch.
            step: the current step, whose shares are used.
        """

        def request() -> Iterator[list[Key]]:
            for indices in self._schedule.cut_held_out(batches, step):
                plan = self._schedule.get_held_out_plan(step, len(indices))
                for part in slices(indices, plan, self._rank()):
                    if part:
                        yield make_keys(part, 0)

        yield from self._reader.read(request())

    def read_held_out_pieces(self, batches: Batches, step: int) -> Iterator[tuple[Piece, Any]]:
        """Yield one piece for each global batch of held-out data, on every rank.

        A rank without rows gets one row whose results do not count. The rows do not disturb those
        that :meth:`read` has requested.

        Args:
            batches: indices of each global batch.
            step: the current step, whose shares are used.
        """
        waiting: deque[Piece] = deque()

        def request() -> Iterator[list[Key]]:
            for number, indices in enumerate(batches):
                plan = self._schedule.get_held_out_plan(step, len(indices))
                own = [each for part in slices(indices, plan, self._rank()) for each in part]
                waiting.append(Piece(step, 0, number, len(own), len(indices), True, tuple(own)))
                yield make_keys(own or indices[:1], 0)

        for rows in self._reader.read(request()):
            yield waiting.popleft(), rows

    def keys(self, indices: Sequence[Any], epoch: int) -> list[Key]:
        """Return the keys of rows in an epoch."""
        return make_keys(indices, make_seed(self._seed, epoch))

    def read_rows(self, indices: Sequence[Any], epoch: int) -> Any:
        """Return a collated batch of some rows, read by this process."""
        return self._reader.read_once(self.keys(indices, epoch))

    def _request(
        self, batches: Batches, epoch: int, first_batch: int, step: int
    ) -> Iterator[list[Key]]:
        for batch in range(first_batch, len(batches)):
            indices, at = batches[batch], step + batch - first_batch
            plan = self._schedule.get_plan(at, len(indices))
            self.reached = at
            parts = slices(indices, plan, self._rank())
            for number, part in enumerate(parts):
                self._pending.append(
                    Piece(at, epoch, batch, len(part), len(indices), number == len(parts) - 1,
                          tuple(part))
                )  # fmt: skip
                yield self.keys(part or indices[:1], epoch)


def make_keys(indices: Sequence[Any], seed: int) -> list[Key]:
    """Return the keys of rows, whose random numbers depend on the seed and each index alone."""
    return list(zip(indices, make_seeds(seed, [_number(index) for index in indices]), strict=True))


def _number(index: Any) -> int:
    """Return a number for an index, the same in all processes."""
    if isinstance(index, int) and index >= 0:
        return index
    return int.from_bytes(hashlib.sha256(repr(index).encode()).digest()[:7], "little")

"""The loader that ``lab.loader()`` returns, with this rank's rows of each global batch."""

import atexit
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from motley.data.source import make_seed, make_seeds, slices
from motley.errors import MotleyError
from motley.faults import Phase
from motley.library.loop_shares import Piece, ShareSchedule
from motley.library.loop_state import LoopPosition, list_generators
from motley.library.made_batches import MadeBatches
from motley.library.rank_loop import RankLoop
from motley.library.sample_order import Batches, RandomState, is_consecutive, kept_random_state
from motley.library.yielded_rows import YieldedRows

MOST_ROWS = 2**27  # most rows in an epoch, whose order takes 8 bytes per row
Key = tuple[Any, int]  # index of a row, and the seed of its random numbers


class SeededRows(Dataset[Any]):
    """A user's data set whose items are read by keys. A key is a row's index and seed.

    The random numbers of a row depend on (seed, epoch, index) alone. They depend neither on the
    rank that reads the row nor on the number of worker processes.

    Args:
        rows: the user's data set.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while the object is being unpickled
            raise AttributeError(name)
        return getattr(self._rows, name)  # a user's worker_init_fn may read attributes

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        if isinstance(self._rows, MadeBatches):  # MadeBatches seeds random numbers itself
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
    """A batch sampler whose batches are set before each pass over the data."""

    def __init__(self) -> None:
        self.batches: Iterator[list[Key]] = iter(())

    def __iter__(self) -> Iterator[list[Key]]:
        return self.batches


def check_loader(loader: Any) -> None:
    """Raise MotleyError if the rows of a user's DataLoader cannot be divided among ranks."""
    if not isinstance(loader, DataLoader):
        raise MotleyError(
            f"lab.loader() was given a {type(loader).__name__}, and needs a "
            "torch.utils.data.DataLoader, whose batches it divides: pass the DataLoader itself, "
            "before anything wraps or reads it, or pass a function that makes a batch to "
            "lab.batches()"
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
            "divide: give it the batch size that a single machine would use"
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
            f"the {type(loader.sampler).__name__} draws {rows:,} rows in an epoch, and an epoch "
            f"may have at most {MOST_ROWS:,}, because its whole order is drawn at once: give it a "
            "smaller number, as in RandomSampler(rows, replacement=True, num_samples=1_000_000), "
            "and loop over epochs"
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
    """The reader of this rank's parts (pieces) of each global batch of an epoch.

    Args:
        loader: the user's loader.
        schedule: the shares of all ranks.
        rank: function that returns the number of this rank. The number may change after another
            rank is lost.
        seed: seed of the random numbers of rows.

    Attributes:
        reached: number of the last step whose pieces were requested from the loader. Workers read
            ahead, so this step may be later than the present one.
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
        """Yield this rank's parts of all global batches of an epoch, each with its collated rows.

        Args:
            batches: indices of each global batch.
            epoch: number of the epoch.
            first_batch: number of the global batch to start with.
            step: number of that batch since the start of training.
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
        """Yield one part of each global batch of held-out data, on every rank.

        A rank without rows gets one row whose results do not count. A pass of :meth:`read` that is
        under way can continue afterwards.

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
        """Return the keys of rows for :class:`SeededRows`, which depend on the epoch."""
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
    """Return the key of each row: its index, and a seed made of ``seed`` and the index."""
    return list(zip(indices, make_seeds(seed, [_number(index) for index in indices]), strict=True))


def _number(index: Any) -> int:
    """Return an integer for an index of any type. All processes compute the same integer."""
    if isinstance(index, int) and index >= 0:
        return index
    return int.from_bytes(hashlib.sha256(repr(index).encode()).digest()[:7], "little")


class LabLoader:
    """A loader of this rank's rows of each global batch.

    ``len()`` is the number of global batches of an epoch.

    Args:
        loop: state of the training loop on this rank. None: this process trains alone.
        position: the epoch, step and batch at which the loop is.
        source: the user's loader.
        train: True for training data.
        start_pass: function that is called before the first step of a pass over training data,
            with the indices of each global batch.
        restore: function that restores the global random generators after a resume, in a process
            that is alone.

    Attributes:
        source: the user's loader.
        generators: ``torch.Generator`` objects that the user gave to the loader's samplers.
        passes: number of passes over the data that have started.
    """

    def __init__(
        self,
        loop: RankLoop | None,
        position: LoopPosition,
        source: "DataLoader[Any]",
        train: bool,
        start_pass: Callable[[Batches], None],
        restore: Callable[[], None],
    ) -> None:
        self._loop, self._position = loop, position
        self._prepare_pass, self._restore = start_pass, restore
        self.source, self._train, self.passes = source, train, 0
        self.generators = list_generators(source)  # a sampler may make another one on rank 0
        if loop is not None:
            self._pieces = PieceReader(source, loop.schedule, lambda: loop.rank, loop.seed)
            if train:  # a script may end without leaving its loop, and with it the last step
                atexit.register(loop.leave_pass)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self.source.dataset

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        # Without gradients a pass over training data is an evaluation.
        trains = self._train and torch.is_grad_enabled()
        if loop is None:
            return self._bare_pass() if trains else iter(self.source)
        return self._train_pass(loop) if trains else self._held_out_pass(loop)

    def _held_out_pass(self, loop: RankLoop) -> Iterator[Any]:
        batches = self._draw(loop)
        loop.set_status(Phase.EVALUATE)
        loop.is_evaluating = True
        if loop.shards:
            loop.shards.reshard()  # parameters may have changed since another such pass
        yield from self._pieces.read_held_out(batches, self._position.step)

    def _draw(self, loop: RankLoop) -> Batches:
        """Return the indices of each global batch of an epoch; all ranks call it."""
        return loop.repeat_collective(
            lambda: loop.order.draw(self.source, self.generators, loop.device)
        )

    def _start_pass(self, order: RandomState) -> int:
        """Start a pass over the training data, and return the number of its first batch."""
        position = self._position
        if position.in_pass:
            raise MotleyError(
                "a loop over training data was started inside another one, so a loss may belong "
                "to the rows of either: join the two data sets, as in DataLoader(StackDataset(a, "
                "b), batch_size=32), or read one of them with train=False"
            )
        self.passes += 1
        states = [each.get_state() for each in self.generators]
        first = position.start_pass(order, states)
        _set_epoch(self.source, position.epoch)
        return first

    def _bare_pass(self) -> Iterator[Any]:
        """Yield the batches of the user's loader, in a process that is alone."""
        position = self._position
        first = self._start_pass(RandomState())
        self._prepare_pass(())
        try:
            batches = iter(self.source)
            for _ in islice(batches, first):
                pass
            self._restore()
            for rows in batches:
                position.batch, position.step = position.batch + 1, position.step + 1
                yield rows
        finally:
            position.end_pass()

    def _train_pass(self, loop: RankLoop) -> Iterator[Any]:
        for piece, rows in self._read_pass(loop):
            loop.begin_piece(piece)
            self._position.mark_rows()
            yield rows

    def _read_pass(self, loop: RankLoop) -> Iterator[tuple[Piece, Any]]:
        """Yield this rank's rows of the training data, in pieces of at most one global batch each.

        The caller calls :meth:`RankLoop.begin_piece` when it starts to compute a piece. If a rank
        is lost within a step, all pieces of the step's global batches are read again.
        """
        gate, position = loop.gate, self._position
        first, epoch = self._start_pass(loop.order.state or RandomState()), self.passes - 1
        try:
            batches = self._draw(loop)
            position.order = loop.order.before
            self._prepare_pass(batches)
            gate.reached = lambda: self._pieces.reached
            loop.read_rows = lambda indices: self._pieces.read_rows(indices, epoch)
            gate.clock.restart()
            while first < len(batches):
                loop.changed = False
                for piece, rows in self._pieces.read(batches, epoch, first, position.step):
                    position.batch, position.step = piece.batch + 1, piece.step + 1
                    loop.yielded = YieldedRows(rows)
                    yield piece, rows
                    if not gate.repeats:
                        gate.end_piece()
                        if not gate.is_within_step:
                            first = piece.batch + piece.last
                    if loop.changed:  # this rank has other rows now
                        position.step = piece.step + first - piece.batch
                        break
                else:  # all batches are read, maybe without a step after the last one
                    break
        finally:
            loop.leave_pass()
            position.end_pass()


def _set_epoch(loader: "DataLoader[Any]", epoch: int) -> None:
    """Call ``set_epoch`` of a loader's samplers and data set, where it exists."""
    for part in (loader.sampler, loader.batch_sampler, loader.dataset):
        set_epoch: Callable[[int], Any] | None = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

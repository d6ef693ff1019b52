"""The loader that ``lab.loader()`` returns."""

import atexit
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.faults import Phase
from motley.library.loop_position import LoopPosition, list_generators
from motley.library.piece_loader import PieceReader
from motley.library.rank_loop import RankLoop
from motley.library.sample_order import Batches, RandomState
from motley.library.share_schedule import Piece


class LabLoader:
    """A loader of this rank's rows of each global batch.

    ``len()`` is the number of global batches of an epoch.

    Args:
        loop: this rank's part in the loop; None: the process is alone.
        position: the position of the loop.
        source: the user's loader.
        train: True for training data.
        start_pass: called with the order of a pass over training data before its first step.
        restore: restores the global random generators of a process that is alone.

    Attributes:
        source: the user's loader.
        generators: the user's own generators from which its samplers draw.
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
        """Start a pass over the training data, and return the batch to start with."""
        position = self._position
        if position.in_pass:
            raise MotleyError(
                "a second loop over training data was started inside another one, so nothing says "
                "which rows a loss is of: join the two data sets, as in DataLoader(StackDataset(a, "
                "b), batch_size=32), or read the other one with train=False"
            )
        self.passes += 1
        states = [each.get_state() for each in self.generators]
        first = position.start_pass(order, states)
        _set_epoch(self.source, position.epoch)
        return first

    def _bare_pass(self) -> Iterator[Any]:
        """Yield the batches of the user's loader, without other ranks."""
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
        """Yield this rank's pieces of a pass over the training data, each with its rows.

        The caller starts each piece with :meth:`RankLoop.begin_piece` when it computes it. If a
        rank is lost within a step, all pieces of the step's global batches are read again.
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
    """Give the number of the epoch to the parts of a loader that ask for it."""
    for part in (loader.sampler, loader.batch_sampler, loader.dataset):
        set_epoch: Callable[[int], Any] | None = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

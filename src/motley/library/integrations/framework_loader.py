"""The loader that a framework's own loop reads in place of a DataLoader."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from motley.data.source import slices
from motley.errors import MotleyError
from motley.faults import Phase
from motley.library.lab import Lab
from motley.library.piece_loader import RankReader, make_keys
from motley.library.sample_order import RandomState
from motley.library.share_schedule import Piece


class FrameworkLoader:
    """A loader of this rank's rows of each global batch, for training and for held-out data.

    A pass over held-out data yields once per global batch on every rank, since frameworks gather
    results after each batch. A rank without rows gets one row whose results do not count.

    Args:
        lab: the lab.
        loader: the loader of one machine.
        train: True for training, False for held-out data, None for the mode in which the prepared
            models are when a pass starts.

    Attributes:
        piece: the piece that was read last; None outside of a pass.
        reads_ahead: True if the reader starts each training piece itself, with ``Lab._begin``.
        first: number of the global batch with which the next pass starts.
        iteration: number of the next pass, which seeds the random numbers of rows.
        order_after: state of the sample orders once the next training pass has drawn its own, if
            that pass continues one of a checkpoint.
    """

    def __init__(self, lab: Lab, loader: "DataLoader[Any]", train: bool | None = None) -> None:
        self._lab, self._loader, self.train = lab, loader, train
        self._pieces = lab.loader(loader)
        self._held_out: RankReader | None = None
        self.piece: Piece | None = None
        self.reads_ahead = False
        self.first = self.iteration = 0
        self.order_after: list[RandomState] = []  # shared by copies of the loader

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._loader.dataset

    def read(self) -> Iterator[tuple[Piece, Any]]:
        """Yield the pieces of a pass with their rows."""
        train = self.train
        if train is None:
            train = any(model.training for model in self._lab._models)
        if train and self._lab._piece is not None:
            raise MotleyError(
                "two loaders are read for training at the same time, and a step has the rows of "
                "one: join the data sets, as in DataLoader(StackDataset(a, b), batch_size=32)"
            )
        first, self.first = self.first, 0
        self._lab.epoch = self._pieces._passes = self.iteration
        pieces = self._pieces.read_pieces(first) if train else self._read_held_out()
        try:
            for self.piece, rows in pieces:
                if train and self.order_after:
                    self._lab._order.continue_from(self.order_after.pop())
                if train and not self.reads_ahead:
                    self._lab._begin(self.piece)
                # Before the last batch, since some loops do not read on to the end.
                self.iteration += self.piece.last and self.piece.batch == len(self) - 1
                yield self.piece, rows
        finally:
            self.piece = None

    def _read_held_out(self) -> Iterator[tuple[Piece, Any]]:
        lab, waiting = self._lab, deque[Piece]()
        before = lab._order.before
        batches = lab._order.draw(self._loader)
        lab._order.before = before  # of the last training pass, which a checkpoint continues
        lab._set_status(Phase.EVALUATE)
        if self._held_out is None:
            self._held_out = RankReader(self._loader)

        def request() -> Iterator[list[tuple[Any, int]]]:
            for number, indices in enumerate(batches):
                plan = lab._schedule.get_plan(lab._step, len(indices))
                own = [index for part in slices(indices, plan, lab.rank) for index in part]
                waiting.append(
                    Piece(lab._step, number, len(own), len(indices), True, tuple(own))
                )  # fmt: skip
                yield make_keys(own or indices[:1], 0)

        for rows in self._held_out.read(request()):
            yield waiting.popleft(), rows

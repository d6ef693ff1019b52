"""A loader for the training loop of a framework, and checks that the adapters have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.faults import Phase
from motley.library import join
from motley.library.lab import Lab
from motley.library.lab_loader import LabLoader, check_loader
from motley.library.loop_shares import Piece
from motley.library.rank_loop import RankLoop
from motley.library.sample_order import RandomState


def get_lab(caller: str) -> Lab:
    """Return the object that ``motley.join()`` has returned in this process.

    Args:
        caller: name of the class or function that needs the object, for the error.

    Raises:
        MotleyError: the script has not called ``motley.join()``.
    """
    if not join._LABS:
        raise MotleyError(
            f"{caller} was created before the ranks were connected: write `lab = motley.join()` "
            "at the top of the script, before the arguments and the model are created"
        )
    return join._LABS[0]


def check_folder(loop: RankLoop, folder: Any) -> None:
    """Raise MotleyError if a checkpoint is missing on the host of any rank; all ranks call it."""
    present = loop.gather_objects(Path(folder).is_dir())
    missing = [name for name, here in zip(loop.names, present, strict=True) if not here]
    if missing:
        raise MotleyError(
            f"the hosts of {', '.join(missing)} do not have the checkpoint {folder}: copy it with "
            f"`rsync -aR {folder} HOST:/`, or save checkpoints to a folder that all hosts share"
        )


class FrameworkLoader(LabLoader):
    """A loader of this rank's rows of each global batch, for training and for held-out data.

    A pass over held-out data yields one batch per global batch on every rank, since frameworks
    gather results after each batch. A rank without rows gets one row whose results do not count.

    Args:
        lab: the result of ``motley.join()``.
        loop: state of the training loop on this rank.
        source: the script's own DataLoader, as written for one machine.
        train: True for training data, False for held-out data. None: each pass is over training
            data if a prepared model is in training mode when the pass starts.

    Attributes:
        train: see the argument; a caller may change the value between two passes.
        piece: the last part of a global batch that the loader has yielded; None outside of a pass.
        reads_ahead: True if the caller of :meth:`read` calls :meth:`RankLoop.begin_piece`. False:
            :meth:`read` calls it.
        first: number of the global batch with which the next pass starts.
        iteration: number of the next pass, which seeds the random numbers of rows.
        order_after: random state to set once the next training pass has drawn its order. Empty if
            that pass does not continue a pass from a checkpoint.
    """

    def __init__(
        self, lab: Lab, loop: RankLoop, source: "DataLoader[Any]", train: bool | None = None
    ) -> None:
        check_loader(source)
        super().__init__(
            loop, lab._position, source, True, lab._start_pass, lab._saver.restore_random_state
        )
        self.loop, self.train, self._models = loop, train, lab._state.models
        self.piece: Piece | None = None
        self.reads_ahead = False
        self.first = self.iteration = 0
        self.order_after: list[RandomState] = []  # shared by copies of the loader

    def read(self) -> Iterator[tuple[Piece, Any]]:
        """Yield this rank's parts of all global batches of the next pass, each with its rows."""
        train = self.train
        if train is None:
            train = any(model.training for model in self._models)
        first, self.first = self.first, 0
        if train:
            self._set_position(first)
        pieces = self._read_pass(self.loop) if train else self._read_held_out()
        try:
            for self.piece, rows in pieces:
                if train and self.order_after:
                    self.loop.order.state = self.order_after.pop()
                if train and not self.reads_ahead:
                    self.loop.begin_piece(self.piece)
                # Before the last batch, since some loops do not read on to the end.
                self.iteration += self.piece.last and self.piece.batch == len(self) - 1
                yield self.piece, rows
        finally:
            self.piece = None

    def _set_position(self, first: int) -> None:
        """Let the next pass start with the global batch of number ``first``."""
        position = self._position
        if position.in_pass:  # LabLoader raises an error in this case
            return
        self.passes = self.iteration
        position.start_epoch(self.iteration)
        position.batch = first

    def _read_held_out(self) -> Iterator[tuple[Piece, Any]]:
        loop, size = self.loop, self.loop.size
        batches = self._draw(loop)
        loop.set_status(Phase.EVALUATE)
        for piece, rows in self._pieces.read_held_out_pieces(batches, self._position.step):
            yield piece, rows
            if loop.size != size:
                raise MotleyError(
                    "a rank was lost during an evaluation, and its rows are missing in the result: "
                    "start the script again from its last checkpoint"
                )

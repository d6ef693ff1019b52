"""The batch norms of a user's own loop, which compute their statistics over groups of rows."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from motley.library.loop_shares import Piece
from motley.tasks.ghost_batch_norm import GroupStatistics, batch_norms


@dataclass
class _Passes:
    """The forward passes of one model in a step.

    Attributes:
        statistics: statistics of the model's batch norms.
        ran: True if the model ran a training pass since its running statistics were last updated.
    """

    statistics: GroupStatistics
    ran: bool = False


class LoopStatistics:
    """The statistics of all batch norms of a user's models, exact for any shares.

    A group is ``group`` consecutive rows of a global batch. A rank computes whole groups at once.
    Each global batch updates the running statistics on every rank, for the rank's own rows. The
    ranks add these parts up whenever they sum gradients.

    Args:
        group: number of rows in a group; None: batch norms stay as they are.
    """

    def __init__(self, group: int | None) -> None:
        self._group = group
        self._models: dict[nn.Module, _Passes] = {}
        self._piece: Piece | None = None

    def add(self, model: nn.Module) -> None:
        """Let the batch norms of a model compute their statistics over groups of rows.

        Raises:
            MotleyError: a batch norm's class has no variant with groups.
        """
        if self._group is not None and batch_norms(model):
            self._models[model] = _Passes(GroupStatistics(model, self._group))

    def begin(self, piece: Piece) -> None:
        """Store the statistics of the previous rows, and start forward passes over new rows."""
        self._flush()
        self._piece = piece
        for each in self._models.values():
            each.statistics.begin_pass(piece.rows or 1)  # an idle rank computes one row

    def _flush(self) -> None:
        """Store the statistics of all forward passes since :meth:`begin` was called."""
        piece = self._piece
        if piece is None:
            return
        for each in self._models.values():
            if each.statistics.end_pass():
                each.statistics.take(piece.rows, piece.global_rows)
                each.ran = True
        self._piece = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore calls of layers in the ``with`` block.

        A backward pass may call layers again, to recompute their outputs.
        """
        with contextlib.ExitStack() as stack:
            for each in self._models.values():
                stack.enter_context(each.statistics.paused())
            yield

    def end_batch(self) -> None:
        """Update the running statistics with this rank's forward passes over a global batch."""
        self._flush()
        for each in self._models.values():
            each.statistics.end_step(each.ran)
            each.ran = False

    def unite(self) -> None:
        """Update the running statistics with the forward passes of all ranks; all ranks call it."""
        piece = self._piece
        self.end_batch()
        for each in self._models.values():
            each.statistics.unite()
        if piece is not None:  # further passes may follow in it
            self.begin(piece)

    def drop(self) -> None:
        """Discard the statistics since :meth:`unite`. The ranks compute those passes again."""
        piece, self._piece = self._piece, None
        for each in self._models.values():
            each.statistics.end_pass()
            each.statistics.reset()
            each.ran = False
        if piece is not None:
            self.begin(piece)

    def get_buffers(self) -> dict[str, Tensor]:
        """Return the running statistics of all batch norms by name."""
        return {
            f"{number}.{name}": buffer
            for number, model in enumerate(self._models)
            for path in batch_norms(model)
            for name, buffer in model.get_submodule(path).named_buffers(path, recurse=False)
        }

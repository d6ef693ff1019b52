"""The batch norms of a user's own loop, whose statistics are taken over groups of rows."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from motley.library.loop_shares import Piece
from motley.tasks.ghost_batch_norm import GroupStatistics, batch_norms


@dataclass
class _Passes:
    """The passes of one model.

    Attributes:
        statistics: statistics of its batch norms.
        ran: True if the model has had a training pass since its statistics moved.
    """

    statistics: GroupStatistics
    ran: bool = False


class LoopStatistics:
    """The statistics of all batch norms of a user's models, exact for any shares.

    A group is ``group`` consecutive rows of a global batch. A rank has whole groups in each piece.
    The running statistics move with each global batch, and the ranks add their parts up with each
    sum of gradients.

    Args:
        group: rows in a group; None: batch norms stay as they are.
    """

    def __init__(self, group: int | None) -> None:
        self._group = group
        self._models: dict[nn.Module, _Passes] = {}
        self._piece: Piece | None = None

    def add(self, model: nn.Module) -> None:
        """Let the batch norms of a model take their statistics over groups, if it has any.

        Raises:
            MotleyError: a batch norm's class has no variant with groups.
        """
        if self._group is not None and batch_norms(model):
            self._models[model] = _Passes(GroupStatistics(model, self._group))

    def begin(self, piece: Piece) -> None:
        """Start the passes of a piece, after those of the piece before it."""
        self._flush()
        self._piece = piece
        for each in self._models.values():
            each.statistics.begin_pass(piece.rows or 1)  # an idle rank computes one row

    def _flush(self) -> None:
        """Add the passes of the present piece so far."""
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
        """Count no calls in a backward pass, which may compute layers again."""
        with contextlib.ExitStack() as stack:
            for each in self._models.values():
                stack.enter_context(each.statistics.paused())
            yield

    def end_batch(self) -> None:
        """Move the running statistics by the passes of a global batch; local to this rank."""
        self._flush()
        for each in self._models.values():
            each.statistics.end_step(each.ran)
            each.ran = False

    def unite(self) -> None:
        """Move the statistics by all passes so far, and add up all ranks' parts; all call it."""
        piece = self._piece
        self.end_batch()
        for each in self._models.values():
            each.statistics.unite()
        if piece is not None:  # further passes may follow in it
            self.begin(piece)

    def drop(self) -> None:
        """Drop all passes since :meth:`unite`, which are computed again."""
        piece, self._piece = self._piece, None
        for each in self._models.values():
            each.statistics.end_pass()
            each.statistics.reset()
            each.ran = False
        if piece is not None:
            self.begin(piece)

    def get_buffers(self) -> dict[str, Tensor]:
        """Return the running statistics of all layers by name."""
        return {
            f"{number}.{name}": buffer
            for number, model in enumerate(self._models)
            for path in batch_norms(model)
            for name, buffer in model.get_submodule(path).named_buffers(path, recurse=False)
        }

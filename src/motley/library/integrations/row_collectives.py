"""Collectives of tensors whose rows are unequal parts of a global batch, for Accelerate."""

from typing import Any

import torch
from torch import Tensor, nn

from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.errors import MotleyError
from motley.library.lab import Lab
from motley.library.share_schedule import Piece
from motley.registry import import_extra

_apply = import_extra("accelerate", "lab.accelerate()").utils.recursively_apply


class RowCollectives:
    """Accelerate's collectives, for tensors whose rows are unequal parts of a global batch.

    ``data`` is a tensor, or a list, tuple or dictionary of tensors. All ranks call each method.
    """

    lab: Lab
    gradient_state: Any

    @property
    def piece(self) -> Piece | None:
        """The piece of a global batch that is computed now; None outside of a loop."""
        loader = self.gradient_state.active_dataloader
        in_training = loader is None or getattr(loader, "reads_ahead", False)
        return self.lab._piece if in_training else getattr(loader, "piece", None)

    def _check_piece(self) -> Piece | None:
        """Return the piece, or raise MotleyError if other ranks may have fewer pieces."""
        if self.piece and not self.piece.last:
            raise MotleyError(
                "Accelerate's collectives were called after one of several pieces of a batch, and "
                "the other ranks have other numbers of pieces: call them `if "
                "accelerator.sync_gradients:`, or leave out micro_batch in motley.join()"
            )
        return self.piece

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks in the order of the global batch.

        A tensor without dimensions becomes one row of its rank. A tensor with at least as many
        rows as the global batch, such as ``loss.repeat(batch_size)``, counts for this rank's rows
        alone, so the mean of the result is the mean over the global batch.
        """
        piece = self._check_piece()

        def join(tensor: Tensor) -> Tensor:
            own = tensor.detach()[None] if tensor.dim() == 0 else tensor.detach()
            if piece and (not piece.rows or len(own) >= piece.global_rows):
                own = own[: piece.rows]
            return torch.cat(all_gather_object(own.cpu())).to(self.lab.device)

        return _apply(join, data, error_on_other_type=True)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks, as :meth:`gather`, or a list of all ranks' objects."""
        try:
            if not use_gather_object:
                return self.gather(data)
        except TypeError:  # not of tensors alone, which is so on all ranks
            pass
        rows = list(data) if self.piece is None else list(data)[: self.piece.rows]
        return [each for part in all_gather_object(rows) for each in part]

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum over all ranks, or the mean over the rows of the global batch.

        Outside of a loop the mean is that over ranks.
        """
        piece = self._check_piece()
        rows = piece.rows if piece else 1
        factor = rows if reduction == "mean" else min(rows, 1)

        def add(tensor: Tensor) -> Tensor:
            own = tensor.double() * factor if rows else torch.zeros_like(tensor).double()
            total, count = self.lab.reduce((own, factor))
            return (total / count if reduction == "mean" else total).to(tensor) * scale

        return data if reduction == "none" else _apply(add, data, error_on_other_type=True)

    def pad_across_processes(
        self, data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Extend a dimension of each row to its longest on any rank.

        The number of rows, dimension 0, needs no padding for :meth:`gather`.
        """

        def pad(tensor: Tensor) -> Tensor:
            if dim == 0 or dim >= tensor.dim():
                return tensor
            longest = max(row[0] for row in all_gather_floats([float(tensor.shape[dim])]))
            missing = int(longest) - tensor.shape[dim]
            widths = [0, 0] * (tensor.dim() - dim - 1)
            widths += [missing, 0] if pad_first else [0, missing]
            return nn.functional.pad(tensor, widths, value=pad_index)

        return _apply(pad, data, error_on_other_type=True)

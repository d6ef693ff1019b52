"""Loader and collectives of a Lightning strategy, for unequal parts of each global batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from motley.comm.collectives import all_gather_object
from motley.errors import MotleyError
from motley.library.integrations.framework_loader import FrameworkLoader
from motley.library.lab import Lab
from motley.library.share_schedule import Piece


class LightningLoader(FrameworkLoader):
    """A DataLoader that a Trainer of Lightning reads."""

    def __init__(self, strategy: Any, loader: "DataLoader[Any]") -> None:
        super().__init__(strategy.lab, loader)
        self._strategy = strategy
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        self.train = self._strategy.lightning_module.trainer.training
        for piece, rows in self.read():
            self._strategy.next_piece = piece
            yield rows


class LightningCollectives:
    """The collectives of a strategy. All ranks call each method.

    Attributes:
        next_piece: the piece whose rows were read last.
        piece: the piece whose step runs; None outside of a step.
        log_weight: weight of this rank in the mean of a value that is logged now.
    """

    lab: Lab
    root_device: torch.device
    _alone: bool
    next_piece: Piece | None = None
    piece: Piece | None = None
    log_weight: float = 1.0

    @property
    def is_distributed(self) -> bool:
        """True in a step, where Lightning then reduces logged values, and injects no sampler."""
        return self.piece is not None and not self._alone

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum, maximum or minimum over ranks, or the mean weighted in a step."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if self._alone:
            return tensor
        if name in ("max", "min"):
            parts = torch.stack([each.cpu() for each in all_gather_object(torch.as_tensor(tensor))])
            return getattr(torch, f"a{name}")(parts, dim=0).to(self.root_device)
        weight = 1.0 if name == "sum" else self.log_weight
        value = torch.as_tensor(tensor)
        total, count = self.lab.reduce((value.double() * weight, weight))
        if name == "sum":
            return total.to(value)
        return (total / count).to(value if value.is_floating_point() else total)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the rows of all ranks in the order of the global batch."""
        if self._alone:
            return tensor
        if sync_grads:
            raise MotleyError(
                "self.all_gather(..., sync_grads=True) makes a loss depend on other ranks' rows, "
                "which unequal shares cannot keep: write sync_grads=False"
            )
        own = tensor.detach().cpu()
        own = own[: self.piece.rows] if self.piece and own.dim() else own.reshape(-1)
        return torch.cat(all_gather_object(own)).to(self.root_device)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks."""
        self.broadcast(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank."""
        return obj if self._alone else all_gather_object(obj if self.lab.rank == src else None)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks decide so, or any rank."""
        decisions = [decision] if self._alone else all_gather_object(bool(decision))
        return min(decisions) if all else max(decisions)

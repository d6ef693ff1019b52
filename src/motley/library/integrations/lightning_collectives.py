"""Loader, collectives, logged values and clipping of a Lightning strategy.

All functions here give exact results when ranks compute unequal parts of a global batch.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.library.integrations.framework_loader import FrameworkLoader
from motley.library.lab import Lab
from motley.library.loop_shares import Piece
from motley.library.rank_loop import RankLoop

_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}  # neutral value of each reduction


class LightningLoader(FrameworkLoader):
    """A DataLoader that a Trainer of Lightning reads."""

    def __init__(self, strategy: Any, loader: "DataLoader[Any]") -> None:
        super().__init__(strategy.lab, strategy.loop, loader)
        self._strategy = strategy
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        trainer = self._strategy.lightning_module.trainer
        self.train = trainer.training
        self.iteration = trainer.current_epoch if self.train else 0
        for piece, rows in self.read():
            self._strategy.next_piece = piece
            yield rows


class LightningCollectives:
    """The collectives of a Lightning strategy. All ranks call each method.

    Attributes:
        next_piece: the part of a global batch that this rank's loader has yielded last.
        piece: the part of a global batch for which a step of the LightningModule runs; None outside
            of a step.
        log_weight: weight of this rank in the mean over ranks of a logged value.
    """

    lab: Lab
    loop: RankLoop | None
    root_device: torch.device
    next_piece: Piece | None = None
    piece: Piece | None = None
    log_weight: float = 1.0

    @property
    def is_distributed(self) -> bool:
        """True during a step, so that Lightning reduces logged values over ranks.

        Outside of a step the value is False, and Lightning replaces no sampler.
        """
        return self.piece is not None and self.loop is not None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum, maximum, minimum or mean over ranks.

        The mean is weighted by :attr:`log_weight`.
        """
        name = str(reduce_op).rpartition(".")[2].lower()
        if self.loop is None:
            return tensor
        if name in ("max", "min"):
            own = torch.as_tensor(tensor).cpu()
            parts = torch.stack(self.loop.gather_objects(own))
            return getattr(torch, f"a{name}")(parts, dim=0).to(self.root_device)
        weight = 1.0 if name == "sum" else self.log_weight
        value = torch.as_tensor(tensor)
        total, count = self.lab.reduce((value.double() * weight, weight))
        if name == "sum":
            return total.to(value)
        return (total / count).to(value if value.is_floating_point() else total)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the rows of all ranks in the order of the global batch."""
        if self.loop is None:
            return tensor
        if sync_grads:
            raise MotleyError(
                "self.all_gather(..., sync_grads=True) makes a loss depend on other ranks' rows, "
                "so the result depends on the shares: write sync_grads=False"
            )
        own = tensor.detach().cpu()
        own = own[: self.piece.rows] if self.piece and own.dim() else own.reshape(-1)
        return torch.cat(self.loop.gather_objects(own)).to(self.root_device)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks."""
        self.broadcast(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on all ranks."""
        if self.loop is None:
            return obj
        return self.loop.gather_objects(obj if self.loop.rank == src else None)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if ``decision`` is True on all ranks, or on any rank if ``all`` is False."""
        decisions = self.loop.gather_objects(bool(decision)) if self.loop else [decision]
        return min(decisions) if all else max(decisions)


def weigh_log(module: Any) -> None:
    """Let ``module.log`` weight a value by ``batch_size=``, or else by the rank's number of rows.

    Args:
        module: the LightningModule, which is changed in place.
    """
    usual = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        strategy = module.trainer.strategy
        piece: Piece | None = getattr(strategy, "piece", None)
        if piece is not None:
            options["sync_dist"] = not options.get("rank_zero_only")
            size = options.get("batch_size")
            if size is None or size == piece.global_rows or not piece.rows:
                options["batch_size"] = piece.rows
            strategy.log_weight = float(options["batch_size"])
            given = options.get("reduce_fx", "mean")
            reduction = getattr(given, "__name__", given)
            if not piece.rows and reduction in _NEUTRAL:
                value = value * 0 + _NEUTRAL[reduction]
        usual(name, value, *args, **options)
        if piece is not None:
            strategy.log_weight = 1.0

    module.log = log


@contextlib.contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the states of all torchmetrics of a module at the end of the ``with`` block."""
    metrics: list[Any] = [each for each in module.modules() if hasattr(each, "_defaults")]
    states = [
        {name: copy.deepcopy(getattr(metric, name)) for name in metric._defaults}
        for metric in metrics
    ]  # fmt: skip
    try:
        yield
    finally:
        for metric, state in zip(metrics, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)


def run_closure_before(optimizer: Any) -> None:
    """Make ``optimizer.step(closure)`` call the closure first, and then step without a closure."""
    step = optimizer.step

    @wraps(step)
    def run(_: Any, closure: Any = None) -> Any:
        result = closure() if closure else None
        step()
        return result

    optimizer.step = MethodType(run, optimizer)


def clip_over_ranks(lab: Lab, loop: RankLoop, plugin: Any) -> None:
    """Let a precision plugin of Lightning sum the gradients over all ranks before clipping.

    Args:
        lab: the result of ``motley.join()``.
        loop: state of the training loop on this rank.
        plugin: the plugin, which is changed in place.
    """
    by_value = plugin.clip_grad_by_value

    def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
        if loop.gate.add_up_for(list(plugin.main_params(optimizer))):
            by_value(optimizer, clip_val)

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        lab.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_value, plugin.clip_grad_by_norm = clip_grad_by_value, clip_grad_by_norm

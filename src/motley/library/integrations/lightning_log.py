"""Logged values and metrics of a LightningModule, for unequal rows of each global batch."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from motley.library.share_schedule import Piece

_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}  # by name of the reduction


def weigh_log(module: Any) -> None:
    """Let ``module.log`` in a step weigh each rank's value by its rows, or by ``batch_size=``.

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
    """Restore the states of all torchmetrics of a module at the end of the context."""
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

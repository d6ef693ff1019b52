"""Makes the optimizer of a model, or of one part where it is sharded."""

import contextlib
from typing import Any

import torch
from torch import nn

from motley.config.options import Config
from motley.data.import_timm import optimizers, timm
from motley.engines.adamw8bit import BLOCK, AdamW8bit
from motley.engines.strategy import IN_8_BITS, is_in_8_bits
from motley.errors import MotleyError
from motley.text import did_you_mean

optimizers.register(
    timm.optim.OptimInfo(
        name=IN_8_BITS, opt_class=AdamW8bit, has_betas=True,
        description="AdamW whose moments take 8 bits a number",
    )
)  # fmt: skip


def make_optimizer(net: nn.Module, config: Config, fused: bool = True) -> torch.optim.Optimizer:
    """timm's optimizer ``--opt``, without weight decay on norms and biases.

    Args:
        fused: as one kernel, where it has that: 3.6 times faster on a CPU too. It has none for
            complex numbers.
    """
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.layer_decay is not None:
        options["layer_decay"] = config.layer_decay
    try:
        # Kron's own random numbers, which are alike on all ranks, in place of torch's.
        ways: tuple[dict[str, Any], ...] = ({"fused": True}, {"deterministic": True})
        fused = fused and not any(each.is_complex() for each in net.parameters())
        for more in ways[not fused :]:
            with contextlib.suppress(TypeError, RuntimeError):
                return timm.optim.create_optimizer_v2(net, opt=config.opt, **options, **more)
        return timm.optim.create_optimizer_v2(net, opt=config.opt, **options)
    except (KeyError, ValueError, AssertionError, TypeError) as error:
        name = config.opt.lower().removeprefix("lookahead_")
        known = [*map(str, timm.optim.list_optimizers())]
        if name in known:
            raise MotleyError(f"--opt {config.opt} cannot be made here: {error}") from None
        raise MotleyError(
            f"--opt {config.opt}: timm has no such optimizer{did_you_mean(name, known)}; see "
            "timm.optim.list_optimizers()"
        ) from None


def a_part(numbers: int, config: Config, device: torch.device) -> nn.Module:
    """So many numbers to step, with a gradient of zeros; for an optimizer that knows rows, in so
    many whole ones."""
    rows = -(-numbers // BLOCK)
    shape = (rows, BLOCK) if is_in_8_bits(config.opt) else (numbers,)
    part = nn.Module()
    part.weight = nn.Parameter(torch.zeros(shape, device=device))
    part.weight.grad = torch.zeros(shape, device=device)
    return part

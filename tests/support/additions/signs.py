"""An optimizer: steps by the sign of a momentum that it keeps as whole numbers of 8 bits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from motley.engines.optimizers import Codec, OwnOptimizer

_SCALE = 100.0  # of a momentum of signs, which is between -1 and 1


class Signs(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                slots = self.state[parameter]
                if not slots:
                    slots["momentum"] = torch.zeros_like(parameter, dtype=torch.int8)
                wide = 0.9 * slots["momentum"] / _SCALE + 0.1 * parameter.grad.sign()
                slots["momentum"].copy_((wide * _SCALE).round())
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * wide.sign())


def _widen(slots: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value / _SCALE for name, value in slots.items() if value.dtype == torch.int8}


def _narrow(slots: Mapping[str, Any], wide: Mapping[str, Tensor]) -> None:
    for name, value in wide.items():
        slots[name].copy_((value * _SCALE).round())


OPTIMIZERS = (
    OwnOptimizer(
        "signs", "steps by the sign of a momentum of 8 bits", Signs,
        codec=Codec(lambda slot: False, _widen, _narrow, dict, dict),
    ),
)  # fmt: skip

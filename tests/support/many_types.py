"""A task whose parameters are of four types, of which the first is the usual one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.tasks.task import Task


class ManyTypes(nn.Module):
    """A linear layer in fp32, and beside it factors in fp64, complex numbers and bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.wide = nn.Parameter(torch.rand(8, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.rand(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] to [n]."""
        hidden = (self.first(x).tanh() * self.wide).float()
        turned = torch.view_as_real(hidden.to(torch.complex64) @ self.turned)
        found: Tensor = (turned.square().sum(dim=-1) * self.narrow).sum(dim=-1)
        return found


@dataclass
class ManyTypesTask(Task):
    """The sum of four numbers."""

    def model(self) -> nn.Module:
        """See Task."""
        return ManyTypes()

    def data(self, held_out: bool) -> range:
        """See Task."""
        return range(1000, 1040) if held_out else range(1000)

    def sample(self, item: int, training: bool) -> Mapping[str, Any]:
        """See Task."""
        x = torch.randn(4, generator=torch.Generator().manual_seed(item))
        return {"x": x, "y": x.sum()}

    def losses(self, net: Any, batch: dict[str, Tensor]) -> Tensor:
        """See Task."""
        errors: Tensor = net(batch["x"]) - batch["y"]
        return errors**2

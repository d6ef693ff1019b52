"""A task whose parameters are of four types, of which the first is the usual one."""

from dataclasses import dataclass

import torch
from sums import SumTask
from torch import Tensor, nn


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
class ManyTypesTask(SumTask):
    """The sum of four numbers."""

    def model(self) -> nn.Module:
        """See Task."""
        return ManyTypes()

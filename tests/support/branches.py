"""A task whose gradients arrive in another order on each rank, as beside compiled ranks."""

from dataclasses import dataclass

import torch.distributed as dist
from sums import SumTask
from torch import Tensor, nn


class Branches(nn.Module):
    """Two layers of one shape side by side; odd ranks compute the second one first."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] to [n]."""
        is_odd = dist.is_initialized() and dist.get_rank() % 2 == 1
        found = {side: self.sides[side](x).tanh() for side in ((1, 0) if is_odd else (0, 1))}
        total: Tensor = self.out(found[0] - found[1]).squeeze(dim=1)
        return total


@dataclass
class BranchesTask(SumTask):
    """The sum of four numbers."""

    def model(self) -> nn.Module:
        """See Task."""
        return Branches()

"""A task whose batch norms are used in unusual ways, each of which plain torch knows."""

from dataclasses import dataclass

from sums import SumTask
from torch import Tensor, nn

TOKENS = 3


class OddNorms(nn.Module):
    """Batch norms that stay in eval mode, run twice in a pass, never run, or get rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.BatchNorm1d(4, affine=False)
        self.twice = nn.BatchNorm1d(4)
        self.never = nn.BatchNorm1d(4, affine=False)
        self.tokens = nn.BatchNorm1d(2)
        self.split = nn.Linear(4, 2 * TOKENS)
        self.last = nn.Linear(2 * TOKENS, 1)

    def train(self, mode: bool = True) -> "OddNorms":
        """See nn.Module."""
        super().train(mode)
        self.still.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] to [n]."""
        x = self.twice(self.still(x)) + self.twice(5 * x + 3)
        tokens = self.split(x).view(-1, TOKENS, 2)
        normal = self.tokens(tokens.flatten(0, 1)).view_as(tokens)
        found: Tensor = self.last(normal.tanh().flatten(1)).squeeze(1)
        return found


@dataclass
class OddNormsTask(SumTask):
    """The sum of four numbers."""

    grain: int = 4

    def model(self) -> nn.Module:
        """See Task."""
        return OddNorms()

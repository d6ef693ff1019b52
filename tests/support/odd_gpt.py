"""A GPT whose blocks have besides matrices what is cut, saved and loaded in ways of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motley.tasks.builtin.text import TextTask


class OddBlock(nn.Module):
    """A block, and beside it a parameter of one number, one that is not trained, a buffer."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.gain = nn.Parameter(torch.tensor([0.5]))
        self.fixed = nn.Parameter(torch.randn(width) / 8, requires_grad=False)
        self.register_buffer("angles", torch.linspace(0, 1, 2048))

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width], in and out."""
        made: Tensor = self.gain * self.block(x) + self.fixed * self.angles[: len(self.fixed)]
        return made


@dataclass(frozen=True)
class OddGpt(TextTask):
    """See the file."""

    def model(self) -> nn.Module:
        """See Task. Its head is tied to what reads tokens."""
        net = super().model()
        net.blocks = nn.ModuleList(OddBlock(block, self.width) for block in net.blocks)
        return net

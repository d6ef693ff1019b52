"""A task whose samples choose one of several experts: some get no sample in some steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.tasks.task import Task

EXPERTS = 5


class Experts(nn.Module):
    """A linear layer, and behind it the expert that the first number chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[n, 4] to [n]."""
        hidden, made = self.first(x).tanh(), x.new_zeros(len(x))
        for number, expert in enumerate(self.experts):
            rows = ((chosen == number) | (chosen < 0)).nonzero().squeeze(1)
            if len(rows):
                made = made.index_add(0, rows, expert(hidden[rows]).squeeze(1))
        return made


@dataclass
class ExpertsTask(Task):
    """The sum of four numbers. The last expert is rare.

    Attributes:
        late: the first samples choose all experts, so that nothing is seen of it in them.
    """

    late: bool = False
    sometimes_unused: bool = False

    def model(self) -> nn.Module:
        """See Task."""
        return Experts()

    def data(self, held_out: bool) -> range:
        """See Task."""
        return range(1000, 1040) if held_out else range(1000)

    def sample(self, item: int, training: bool) -> Mapping[str, Any]:
        """See Task."""
        dice = torch.Generator().manual_seed(item)
        x = torch.randn(4, generator=dice)
        drawn = int(torch.randint(0, 12, (1,), generator=dice))
        chosen = min(drawn // 3, 3) if drawn else EXPERTS - 1
        return {"x": x, "y": x.sum(), "chosen": -1 if self.late and item < 2 else chosen}

    def losses(self, net: Any, batch: dict[str, Tensor]) -> Tensor:
        """See Task."""
        errors: Tensor = net(batch["x"], batch["chosen"]) - batch["y"]
        return errors**2

"""A task that learns the sum of four numbers, for networks of all sorts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motley.tasks.task import Task


@dataclass
class SumTask(Task):
    """The sum of four numbers; a subclass has the network, [n, 4] to [n]."""

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

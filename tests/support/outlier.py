"""A task whose first sample, with which models are tried, is not finite."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.tasks.task import Task


@dataclass
class Outlier(Task):
    """The sum of four numbers."""

    def model(self) -> nn.Module:
        """See Task."""
        return nn.Sequential(
            nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)
        )

    def data(self, held_out: bool) -> range:
        """See Task."""
        return range(1000, 2000) if held_out else range(1000)

    def sample(self, item: int, training: bool) -> Mapping[str, Any]:
        """See Task."""
        x = torch.randn(4, generator=torch.Generator().manual_seed(item))
        return {"x": x if item else x + torch.inf, "y": x.sum()}

    def losses(self, net: Any, batch: dict[str, Tensor]) -> Tensor:
        """See Task."""
        errors: Tensor = net(batch["x"]).squeeze(1) - batch["y"]
        return errors**2

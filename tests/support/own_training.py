"""A task with an optimizer, a schedule and something to do after each evaluation of its own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from motley import Task


@dataclass
class Lines(Task):
    """Points on noisy lines."""

    width: int = 8

    def model(self) -> nn.Module:
        """See Task."""
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 2))

    def data(self, held_out: bool) -> range:
        """See Task."""
        return range(200, 240) if held_out else range(200)

    def sample(self, item: int, training: bool) -> dict[str, Any]:
        """See Task."""
        x = torch.randn(4, generator=torch.Generator().manual_seed(item))
        return {"x": x, "y": (x.sum() > 0).long()}

    def losses(self, net: Any, batch: dict[str, Tensor]) -> Tensor:
        """See Task."""
        return functional.cross_entropy(net(batch["x"]), batch["y"], reduction="none")

    def scores(self, net: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See Task."""
        predicted = net(batch["x"]).argmax(dim=1)
        right = predicted == batch["y"]
        return {"loss": self.losses(net, batch), "skill": right, "label": batch["y"],
                "predicted": predicted}  # fmt: skip

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """See Task."""
        return torch.optim.NAdam(groups, betas=(0.8, 0.9))

    def schedule(self, step: float, total: int) -> float:
        """See Task."""
        return 1 - step / total

    def after_evaluation(self, net: nn.Module, folder: Path) -> None:
        """Add the outputs for one input to a file."""
        x = torch.ones(1, 4, device=next(net.parameters()).device)
        assert not net.training and not torch.is_grad_enabled()
        with (folder / "outputs.jsonl").open("a") as file:
            file.write(json.dumps(net(x).tolist()) + "\n")

"""The sums of an evaluation."""

import torch
from torch import Tensor

from motley.data.source import Batch
from motley.tasks.model import TaskModel


@torch.no_grad()
def score(model: TaskModel, batch: Batch) -> Tensor:
    """Sums of the task's scores, in order of ``model.score_names``, then the weight and the number
    of the samples: float64 [k + 2]."""
    model.eval()
    scores = model(batch.data, scored=True)
    model.train()
    sums = [scores[name].sum().double() for name in model.score_names]
    return torch.stack([*sums, *sums[0].new_tensor([batch.weight, len(batch)])])

"""The sums of an evaluation."""

import torch
from torch import Tensor, nn

from motley.data.batch import Batch


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> Tensor:
    """Loss sum (without smoothing), correct answers and samples, float64 [3]."""
    model.eval()
    losses, correct = model(batch.data, scored=True)
    model.train()
    return torch.stack(
        [losses.sum().double(), correct.sum().double(), losses.new_tensor(len(batch)).double()]
    )

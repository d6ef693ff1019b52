"""Cross-entropy of each sample, and the sums of an evaluation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from motley.data.batch import Batch


def sample_losses(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """Cross-entropy of each sample, fp32 [n]; fine for n = 0."""
    return functional.cross_entropy(
        logits, batch.labels, label_smoothing=smoothing, reduction="none"
    )


@torch.no_grad()
def score(model: nn.Module, batch: Batch) -> Tensor:
    """Loss sum (without smoothing), correct answers and samples, float64 [3]."""
    model.eval()
    logits = model(batch.images)
    losses = sample_losses(logits, batch, 0.0)
    correct = (logits.argmax(dim=1) == batch.labels).sum()
    model.train()
    return torch.stack(
        [losses.sum().double(), correct.double(), correct.new_tensor(len(losses)).double()]
    )

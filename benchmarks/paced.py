"""A classifier that computes for real, and then sleeps until a slower device would be done.

All else is real: gradients, optimizer, gloo, TCP. Gradients become ready where they would:
each block's only after its part of the modelled time has passed.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from motley.data import Images
from motley.model import Classifier

FORWARD = 1 / 3  # of a micro-batch's time; the backward pass does twice the work


class Paced(Classifier):
    """As Classifier, at ``overhead_s + sample_s * n`` for a micro-batch of n."""

    def __init__(
        self, net: nn.Module, images: Images, img_size: int, overhead_s: float, sample_s: float
    ) -> None:
        super().__init__(net, images, img_size, "fp32", torch.device("cpu"))
        self._overhead_s, self._sample_s = overhead_s, sample_s
        self._blocks = list(net.blocks)
        for place, block in enumerate(reversed(self._blocks)):
            part = (place + 1) / len(self._blocks)
            block.register_full_backward_pre_hook(
                lambda *_, part=part: _sleep_until(self._backward_start + part * self._backward_s)
            )

    def forward(self, images: Tensor) -> Tensor:
        """See Classifier."""
        start, whole = time.perf_counter(), self._overhead_s + self._sample_s * len(images)
        logits = super().forward(images)
        if len(images) == 0 or not torch.is_grad_enabled():
            return logits
        self._backward_s = (1 - FORWARD) * whole
        _sleep_until(start + FORWARD * whole)
        return _Mark.apply(logits, self)

    def begin_backward(self) -> None:
        """The backward pass starts now."""
        self._backward_start = time.perf_counter()


class _Mark(torch.autograd.Function):
    """Tells the classifier when its backward pass begins."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, model: Paced) -> Tensor:
        """The same."""
        ctx.model = model
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same."""
        ctx.model.begin_backward()
        return gradient, None


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)

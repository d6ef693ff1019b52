"""A classifier that computes for real, and sleeps as long as a slower device would take more.

All else is real: gradients, optimizer, gloo, TCP. Gradients become ready where they would: a
linear layer's backward pass is real at the end of its part of the modelled time. How early it has
to begin for that is learnt from the passes before.
"""

import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from motley.data.source import Tensors
from motley.tasks.model import TaskModel
from motley.tasks.task import Task

FORWARD = 1 / 3  # of a micro-batch's time; the backward pass does twice the work
_LEARN = 0.3  # of how late a layer was, it begins earlier the next time


@dataclass
class Pace:
    """How fast a rank's device is; all models of the rank share it.

    Attributes:
        sample_s: of a sample, seconds. factor: of all times, for a while.
        early: by samples and layer, how much earlier than due the real pass begins, seconds.
    """

    sample_s: float
    factor: float = 1.0
    early: dict[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, samples: int) -> float:
        """Of a micro-batch, forward and backward pass."""
        return self.factor * self.sample_s * samples


class Paced(TaskModel):
    """As TaskModel, at a given pace."""

    def __init__(self, task: Task, net: nn.Module, pace: Pace) -> None:
        super().__init__(task, net, "fp32", torch.device("cpu"))
        self._pace = pace
        layers = [layer for layer in net.blocks.modules() if isinstance(layer, nn.Linear)]
        self._place = 0
        # A layer computes in proportion to its weights; backward, the last one is the first.
        done = list(accumulate(layer.weight.numel() for layer in reversed(layers)))
        self._done = [0.0, *(numbers / done[-1] for numbers in done)]
        for layer in layers:
            layer.register_full_backward_pre_hook(lambda *_: self._next_layer())
        net.patch_embed.proj.weight.register_post_accumulate_grad_hook(lambda _: self._layer_ends())

    def _next_layer(self) -> None:
        if self._place:
            self._layer_ends()
        self._place += 1
        _sleep_until(self._due() - self._pace.early.get((self._samples, self._place), 0.0))

    def _layer_ends(self) -> None:
        if self._place:  # else an idle rank's gradients, which take no time
            key, late = (self._samples, self._place), time.perf_counter() - self._due()
            self._pace.early[key] = max(0.0, self._pace.early.get(key, 0.0) + _LEARN * late)
            _sleep_until(self._due())

    def _due(self) -> float:
        """When this layer's backward pass should end."""
        return self._backward_start + self._done[self._place] * self._backward_s

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """See TaskModel."""
        samples = len(data.get("images", ()))
        start, whole = time.perf_counter(), self._pace.seconds(samples)
        losses = super().forward(data, scored)
        if samples == 0 or not torch.is_grad_enabled():
            return losses
        self._samples, self._backward_s = samples, (1 - FORWARD) * whole
        _sleep_until(start + FORWARD * whole)
        return _Mark.apply(losses, self)

    def begin_backward(self) -> None:
        """The backward pass starts now."""
        self._backward_start, self._place = time.perf_counter(), 0


class _Mark(torch.autograd.Function):
    """Tells the classifier when its backward pass begins."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, model: Paced) -> Tensor:
        """The same."""
        ctx.model = model
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same."""
        ctx.model.begin_backward()
        return gradient, None


def _sleep_until(moment: float) -> None:
    remaining = moment - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)

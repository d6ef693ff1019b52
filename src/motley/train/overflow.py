"""Finds where a gradient overflows: the layer, and the samples. For the last words of a run."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.data.source import Batch
from motley.tasks.model import TaskModel

_SHOWN = 8  # samples, at most


@dataclass(frozen=True)
class Overflow:
    """Where values first are not finite.

    Attributes:
        layer: of the network, as torch names its modules or parameters.
        what: ``activations``, ``gradient`` of these, or ``weight gradient``.
        samples: indices in the data set; none where a sum over samples overflows.
    """

    layer: str
    what: str
    samples: tuple[int, ...]

    def __str__(self) -> str:
        if not self.samples:
            return f"the {self.what} of {self.layer}, summed over its samples"
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        more = ", ..." if len(self.samples) > _SHOWN else ""
        return f"the {self.what} of {self.layer} (sample indices {shown}{more})"


def find_overflow(model: TaskModel, batches: Sequence[Batch], factor: float) -> Overflow | None:
    """Compute micro-batches again, and see which layer is the first that is not finite.

    Args:
        factor: on each sample's loss: what the step had, the loss scale included.
    """
    # The same numbers, but leaves of their own: an engine's hooks hear nothing of this.
    weights = {
        name: parameter.detach().requires_grad_(parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for batch in batches:
        if not len(batch):
            continue
        if found := _first(model, weights, batch, factor):
            return found
    for name, weight in weights.items():
        if weight.grad is not None and not bool(weight.grad.isfinite().all()):
            return Overflow(name.removeprefix("net."), "weight gradient", ())
    return None


def _first(
    model: TaskModel, weights: dict[str, Tensor], batch: Batch, factor: float
) -> Overflow | None:
    """The first layer in one micro-batch, in the order of computation."""
    found: list[Overflow] = []

    def look(layer: str, what: str, values: Any) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        for value in tensors:
            if found or not isinstance(value, Tensor) or len(value) != len(batch):
                continue
            bad = ~value.detach().flatten(1).isfinite().all(dim=1)
            if bad.any():
                rows = bad.nonzero().flatten().tolist()
                found.append(Overflow(layer, what, tuple(batch.indices[row] for row in rows)))

    hooks = [
        hook
        for name, layer in model.net.named_modules()
        if name
        for hook in (
            layer.register_forward_hook(_forward(name, look)),
            layer.register_full_backward_hook(_backward(name, look)),
        )
    ]
    try:
        with warnings.catch_warnings():
            # The first layer's input needs no gradient, and torch says so.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            losses = torch.func.functional_call(model, weights, (batch.data,))
            torch.autograd.backward([losses.sum() * factor])
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


_Look = Callable[[str, str, Any], None]


def _forward(name: str, look: _Look) -> Callable[[nn.Module, Any, Any], None]:
    return lambda _layer, _given, made: look(name, "activations", made)


def _backward(name: str, look: _Look) -> Callable[[nn.Module, Any, Any], None]:
    return lambda _layer, given, _made: look(name, "gradient", given)

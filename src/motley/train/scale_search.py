"""The search for the loss scale before step 1, and for the cause of an overflow.

The loss scale is the largest scale that does not overflow, reduced by a margin. If gradients
overflow later and a lower scale does not help, the run ends with an error. The error names the
layer and the samples.

If the first scale is too high, steps are skipped until the scale is low enough. From a scale of
2^32, about fourteen steps are skipped. If the scale is too low, small gradients become zero. The
search therefore tries scales on the first batches of the training data.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.comm.collectives import all_gather_floats
from motley.data.loader import Loader
from motley.data.source import Batch
from motley.engines.named_state import load_random_state, random_state
from motley.engines.step import gradient_norm
from motley.measure.process_group import ProcessGroup
from motley.plan.plan import Plan
from motley.tasks.model import TaskModel

_SHOWN = 8  # samples, at most


@dataclass(frozen=True)
class Overflow:
    """The first layer or parameter of a model whose values are not finite.

    Attributes:
        layer: name of the layer or parameter in torch.
        values: values that are not finite: ``activations``, ``gradient`` (of the activations), or
            ``weight gradient``.
        samples: indices of the samples in the data set; empty if only the sum over samples
            overflows.
    """

    layer: str
    values: str
    samples: tuple[int, ...]

    def __str__(self) -> str:
        if not self.samples:
            return f"the {self.values} of {self.layer}, summed over its samples"
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        more = ", ..." if len(self.samples) > _SHOWN else ""
        return f"the {self.values} of {self.layer} (sample indices {shown}{more})"


def find_overflow(model: TaskModel, batches: Sequence[Batch], factor: float) -> Overflow | None:
    """Compute micro-batches again, and return the first layer with values that are not finite.

    None: all values are finite.

    Args:
        model: the model.
        batches: the micro-batches.
        factor: factor on each sample's loss in the step, which includes the loss scale.
    """
    # These leaves share the parameters' numbers but not their hooks, so no engine's hook runs.
    weights = {
        name: parameter.detach().requires_grad_(parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for batch in batches:
        if not len(batch):
            continue
        if result := _first(model, weights, batch, factor):
            return result
    for name, weight in weights.items():
        if weight.grad is not None and not bool(weight.grad.isfinite().all()):
            return Overflow(name.removeprefix("net."), "weight gradient", ())
    return None


def _first(
    model: TaskModel, weights: dict[str, Tensor], batch: Batch, factor: float
) -> Overflow | None:
    """Return the first layer whose values are not finite, in the order of computation."""
    result: list[Overflow] = []

    def look(layer: str, what: str, values: Any) -> None:
        tensors = values if isinstance(values, tuple) else (values,)
        for value in tensors:
            if result or not isinstance(value, Tensor) or len(value) != len(batch):
                continue
            bad = ~value.detach().flatten(1).isfinite().all(dim=1)
            if bad.any():
                rows = bad.nonzero().flatten().tolist()
                result.append(Overflow(layer, what, tuple(batch.indices[row] for row in rows)))

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
            # The first layer's input needs no gradient, and torch warns about that.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            losses = torch.func.functional_call(model, weights, (batch.data,))
            torch.autograd.backward([losses.sum() * factor])
    finally:
        for hook in hooks:
            hook.remove()
    return result[0] if result else None


_Look = Callable[[str, str, Any], None]


def _forward(name: str, look: _Look) -> Callable[[nn.Module, Any, Any], None]:
    return lambda _layer, _given, made: look(name, "activations", made)


def _backward(name: str, look: _Look) -> Callable[[nn.Module, Any, Any], None]:
    return lambda _layer, given, _made: look(name, "gradient", given)


HIGHEST = 32  # a power of two; above it, squares in the norm of an fp32 gradient overflow
MARGIN = 2  # powers of two: gradients of later batches may be larger
_BATCHES = 2  # global batches that are tried


def search_scale(group: ProcessGroup, loader: Loader, model: TaskModel, plan: Plan) -> float:
    """Return the loss scale that suits the first global batches of the first epoch.

    All ranks of the group call this function.
    """
    assert group.rank is not None
    wire = plan.wire.dtype == "fp16"
    fp16, batches = wire or group.precisions[group.rank] == "fp16", list[tuple[Batch, float]]()
    if fp16:
        # The first batches may be smaller than the plan's, if the batch grows or data are few.
        for first, micro_batches in itertools.islice(loader.steps(0, 0, plan), _BATCHES):
            # DeepSpeed multiplies a loss by the number of ranks before the wire; DDP does not. A
            # sum on the wire may also be as many times larger than a rank's part.
            weight = group.size / (first.global_batch * model.task.weight)
            batches += [(batch, weight) for batch, _ in micro_batches]
    return find_scale(model, batches, fp16, wire)


def find_scale(
    model: TaskModel,
    batches: Sequence[tuple[Batch, float]],
    fp16: bool,
    wire: bool = False,
) -> float:
    """Return the scale that all ranks start with. All ranks of the group call this function.

    Parameters and random state are left unchanged.

    Args:
        model: the model.
        batches: this rank's first micro-batches, each with the factor on a sample's loss without
            the loss scale.
        fp16: True if this rank computes or sends in fp16. A rank that does neither tries no scales.
        wire: True if this rank sends gradients in fp16.
    """
    power = HIGHEST
    if fp16:
        random = random_state(next(model.parameters()).device)
        low, high = 0, HIGHEST + 1  # low is assumed not to overflow, high to overflow
        while high - low > 1:
            middle = (low + high) // 2
            if _overflows(model, batches, 2.0**middle, wire):
                high = middle
            else:
                low = middle
        power = low
        load_random_state(random, next(model.parameters()).device)
    lowest = min(result for (result,) in all_gather_floats([float(power)]))
    return float(2.0 ** max(0.0, lowest - MARGIN))


def _overflows(
    model: TaskModel, batches: Sequence[tuple[Batch, float]], scale: float, wire: bool
) -> bool:
    """Return True if the batches' summed gradients are not finite at a loss scale.

    Args:
        model: the model.
        batches: the micro-batches, each with the factor on a sample's loss.
        scale: the loss scale to try.
        wire: True: test the gradients after rounding to fp16, too.
    """
    model.zero_grad(set_to_none=True)
    for batch, weight in batches:
        if len(batch):
            torch.autograd.backward([model(batch.data).sum() * (weight * scale)])
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    finite = bool(gradient_norm(parameters).isfinite()) if parameters else True
    if finite and wire:
        finite = all(bool(p.grad.half().isfinite().all()) for p in parameters if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return not finite

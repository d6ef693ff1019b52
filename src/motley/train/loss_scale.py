"""Finds the loss scale before step 1: the largest that does not overflow, less a margin.

A scale that is too high costs skipped steps at the start (from 2^32 about fourteen), one that
is too low costs small gradients. Both are seen on the first real batches.
"""

import itertools
from collections.abc import Sequence

import torch

from motley.comm.collectives import all_gather_floats
from motley.data.loader import Loader
from motley.data.source import Batch
from motley.engines.gradients import gradient_norm
from motley.engines.named_state import load_random_state, random_state
from motley.measure.process_group import ProcessGroup
from motley.plan.plan import Plan
from motley.tasks.model import TaskModel

HIGHEST = 32  # a power of two; above it, squares in the norm of an fp32 gradient overflow
MARGIN = 2  # powers of two: gradients of later batches may be larger
_BATCHES = 2  # global batches that are tried


def search_scale(group: ProcessGroup, loader: Loader, model: TaskModel, plan: Plan) -> float:
    """Find the loss scale on the first global batches of the first epoch."""
    assert group.rank is not None
    wire = plan.wire.dtype == "fp16"
    fp16, batches = wire or group.precisions[group.rank] == "fp16", list[tuple[Batch, float]]()
    if fp16:
        # The first ones may be smaller than the plan's: a batch grows, or the data are few.
        for first, micro_batches in itertools.islice(loader.steps(0, 0, plan), _BATCHES):
            # DeepSpeed multiplies a loss by the number of ranks before the wire, DDP does not; and
            # a sum on the wire may be so many times a rank's part.
            weight = group.size / (first.global_batch * model.task.weight)
            batches += [(batch, weight) for batch, _ in micro_batches]
    return find_scale(model, batches, fp16, wire)


def find_scale(
    model: TaskModel,
    batches: Sequence[tuple[Batch, float]],
    fp16: bool,
    wire: bool = False,
) -> float:
    """The scale that all ranks start with; all ranks of the group call it.

    Parameters and random numbers are left as they were.

    Args:
        batches: this rank's first micro-batches, and what a sample's loss in each is multiplied by
            besides the scale.
        fp16: this rank computes or sends in fp16; others have nothing to try.
        wire: it sends.
    """
    power = HIGHEST
    if fp16:
        random = random_state(next(model.parameters()).device)
        low, high = 0, HIGHEST + 1  # low is taken for good, high for bad
        while high - low > 1:
            middle = (low + high) // 2
            if _overflows(model, batches, 2.0**middle, wire):
                high = middle
            else:
                low = middle
        power = low
        load_random_state(random, next(model.parameters()).device)
    lowest = min(found for (found,) in all_gather_floats([float(power)]))
    return float(2.0 ** max(0.0, lowest - MARGIN))


def _overflows(
    model: TaskModel, batches: Sequence[tuple[Batch, float]], scale: float, wire: bool
) -> bool:
    """Whether the gradient of any batch, or of all together, is not finite, as it is or sent."""
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

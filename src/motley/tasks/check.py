"""Finds the usual mistakes of a task before it is trained: by a few passes over two samples.

What is exact only if it holds: each sample has a loss of its own, which depends on nothing else;
what is drawn at random comes from torch, seeded for the sample; every parameter is known to torch,
and has a gradient; a forward pass changes nothing that ranks hold alike.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from motley.data.keyed import check_length, first_sample
from motley.data.source import Tensors
from motley.errors import MotleyError
from motley.tasks.forward_changes import (
    ForwardChanges,
    changed_in_forward,
    check_renormalised,
)
from motley.tasks.model import TaskModel
from motley.tasks.sometimes_unused import check_used, unused
from motley.tasks.task import Task
from motley.text import name_some

_TOLERANCE = 1e-3  # of a loss; rounding alone is far below it


def check_task(model: TaskModel) -> tuple[str, ...]:
    """Raise MotleyError, which says what is wrong and what to do, if the task cannot be trained
    exactly; leaves no gradients behind.

    Args:
        model: in fp32, not wrapped.

    Returns:
        The parameters that some samples give no gradient, by name.
    """
    task = type(model.task).__name__
    _check_samples(task, model.task)
    _check_hidden(task, model.net)
    check_renormalised(task, model.net)
    if not any(each.requires_grad for each in model.net.parameters()):
        raise MotleyError(
            f"the model of {task} has no parameter that can be trained; give it one, or set "
            "requires_grad_(True) where it is frozen"
        )
    changes = ForwardChanges(model.net)
    model.eval()  # drop-out draws anew in each pass
    try:
        _check_losses(task, model)
        passes = [unused(model, model.example.data)]
        _check_dense(task, model.net)
        model.train()
        passes += _check_changes(task, model, changes)
        return check_used(task, model, passes)
    finally:
        model.train()
        model.zero_grad(set_to_none=True)


def _check_samples(name: str, task: Task) -> None:
    """There are some, and the same sample, seeded alike, is the same."""
    check_length(task, len(task.data(held_out=True)), held_out=True)
    once, again = first_sample(task), first_sample(task)
    for key, value in once.items():
        other = again[key]
        alike = torch.equal(value, other) if isinstance(value, Tensor) else bool(value == other)
        if not alike and not _is_nan(value):
            raise MotleyError(
                f"{name} makes another {key!r} of the same sample the second time; draw random "
                "numbers in sample() alone and from torch, which is seeded for each sample and "
                "epoch: from random or numpy they would differ between ranks"
            )


def _is_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _check_hidden(name: str, net: nn.Module) -> None:
    """No modules or parameters where torch does not look for them."""
    known = {*map(id, net.modules()), *map(id, net.parameters())}
    for path, part in net.named_modules():
        for field, value in vars(part).items():
            if field.startswith("_"):
                continue
            if any(id(each) not in known for each in _learnable(value)):
                where = ".".join(filter(None, (path, field)))
                raise MotleyError(
                    f"the model of {name} keeps modules or parameters in {where}, a "
                    f"{type(value).__name__}, where torch does not see them: they would not be "
                    "trained, moved to a GPU or saved; use nn.ModuleList, nn.ModuleDict or "
                    "nn.ParameterList"
                )


def _learnable(value: Any) -> Iterator[Any]:
    """Modules and parameters in a plain list, tuple or dict."""
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    return (each for each in parts if isinstance(each, nn.Module | nn.Parameter))


@torch.no_grad()
def _check_losses(name: str, model: TaskModel) -> None:
    """A loss a sample, which is of that sample alone."""
    batch = model.example
    n = len(batch)
    losses = _losses(name, model, batch.data, n)
    if not torch.equal(losses, again := _losses(name, model, batch.data, n)):
        worst = float((losses - again).abs().max())
        if worst > _TOLERANCE * float(losses.abs().max()):
            raise MotleyError(
                f"{name} gives other losses for the same batch the second time, though it is not "
                "in training: the model draws random numbers, or keeps something from one pass to "
                "the next outside of its buffers"
            )
    if n < 2:
        return
    alone = torch.cat([_losses(name, model, batch[row : row + 1].data, 1) for row in range(n)])
    if not torch.allclose(losses, alone, rtol=_TOLERANCE, atol=1e-6, equal_nan=True):
        whole, parts = _numbers(losses), _numbers(alone)
        raise MotleyError(
            f"the loss of a sample of {name} depends on the others in its batch: {whole} together, "
            f"{parts} one by one. Is it a mean over the batch? losses() gives one number a sample, "
            'as with reduction="none". Or does the model take the batch as another dimension than '
            "the first, as nn.LSTM does without batch_first=True?"
        )


def _check_dense(name: str, net: nn.Module) -> None:
    """Raise MotleyError if a gradient holds a few rows alone: ranks have other rows."""
    found = [
        key for key, each in net.named_parameters()
        if each.grad is not None and each.grad.layout != torch.strided
    ]  # fmt: skip
    if found:
        raise MotleyError(
            f"{name} has a sparse gradient of {name_some(found)}, which ranks cannot add up; leave "
            "out sparse=True of that nn.Embedding"
        )


def _check_changes(name: str, model: TaskModel, changes: ForwardChanges) -> list[set[str]]:
    """Passes in training change no parameter and no buffer, but for caches in the first one.

    Returns:
        The parameters without a gradient after a pass over each of the first samples alone.
    """
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        first, *others = (model.example[row : row + 1].data for row in range(len(model.example)))
        found = [unused(model, first)]
        cached = ForwardChanges(model.net)
        model(first)
        names = cached.names(caches=True)
        found += [unused(model, each) for each in others]
    if names := list(dict.fromkeys([*changes.names(caches=False), *names])):
        raise changed_in_forward(name, model.net, names)
    return found


def _losses(name: str, model: TaskModel, data: Tensors, n: int) -> Tensor:
    found: Any = model.task.losses(model.compute, data)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise MotleyError(f"losses() of {name} gives {_kind(found)}; it should give floats, [n]")
    if found.shape != (n,):
        mean = found.dim() == 0
        raise MotleyError(
            f"losses() of {name} gives a tensor of shape {tuple(found.shape)} for {n} samples; it "
            f"should give one number a sample, ({n},)"
            + (': a sum or mean over the batch? Take reduction="none"' if mean else "")
            + (", then .sum() over what is left of each sample" if not mean else "")
        )
    return found


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a {type(value).__name__}"


def _numbers(values: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())

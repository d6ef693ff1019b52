"""Checks of a task before training, by a few passes over two samples.

Training is exact only under these conditions. Each sample has a loss of its own, which depends on
no other sample. Random numbers come from torch, seeded for the sample. A forward pass changes no
parameter or buffer that is equal on all ranks. Every parameter is registered with torch, and has a
gradient. A parameter may lack a gradient for some samples, such as an expert that these samples do
not choose.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from motley.data.source import Tensors, check_length, first_batch, first_sample
from motley.errors import MotleyError
from motley.tasks.model import TaskModel
from motley.tasks.task import Task
from motley.text import name_some

_WORD = 8  # bytes that are hashed at once
_CHUNKS = {"cpu": 1 << 15}  # words at a time, few enough to stay in the core's own cache
_CHUNK = 1 << 23  # words at a time on a GPU, which needs three times their memory meanwhile
_GOLDEN = -0x61C8864680B583EB
_FACTOR = -0x40A7B892E31B1A47


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, int64 [].

    The tensor's device computes the hash. All devices give equal hashes for equal bits.

    The hash is a sum modulo 2**64 over words of eight bytes. Each word is first mixed with its
    position, as in SplitMix64 without the last factor. A sum of integers does not depend on the
    order of its terms, unlike a sum of floating-point numbers. The last word is padded with zeros.
    """
    words = _words(tensor)
    chunk = min(_CHUNKS.get(tensor.device.type, _CHUNK), words.numel()) or 1
    places = torch.arange(1, chunk + 1, device=words.device).mul_(_GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        mixed = places[: part.numel()] + _wrapped(start * _GOLDEN)
        mixed ^= part
        mixed ^= mixed >> 30
        mixed *= _FACTOR
        mixed ^= mixed >> 27
        total += mixed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, padded with zeros to whole words, int64 [words].

    The result is a view of the tensor if no padding or copy is needed.
    """
    result = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -result.numel() % _WORD:
        result = torch.nn.functional.pad(result, (0, missing))
    if result.storage_offset() % _WORD:  # a view that does not start at a word
        result = result.clone()
    return result.view(torch.int64)


def _wrapped(value: int) -> int:
    """Return an integer modulo 2**64 as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_UPDATE = (
    "update it by its gradient instead, as a codebook by a term of the loss, or keep that part of "
    "the model in eval mode"
)
_FIXES: dict[str, str] = {
    "max_norm": "leave out max_norm, and scale the rows that the layer returns",
    "instance_norm": (
        "set track_running_stats=False, which uses each sample's own statistics in evaluations too"
    ),
    "spectral_norm": (
        "use torch.nn.utils.parametrizations.weight_norm or orthogonal, which depend on the "
        "weight alone, or divide by torch.linalg.matrix_norm(weight, 2)"
    ),
}


class ForwardChanges:
    """A record of a network's parameters and buffers, to find the tensors that later passes change.

    Args:
        net: the network. The object stores fingerprints of the parameters and copies of the
            buffers.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net, self._before = net, _values(net)

    def names(self, caches: bool) -> list[str]:
        """Return the names of the parameters and buffers that have changed since construction.

        Args:
            caches: True: include non-persistent buffers. A non-persistent buffer may be a cache
                that the first pass has filled.
        """
        saved, now = self._net.state_dict().keys(), _values(self._net)
        return [
            name for name, value in now.items()
            if (caches or name in saved)
            and (name not in self._before or not _equal(self._before[name], value))
        ]  # fmt: skip


def check_renormalised(name: str, net: nn.Module) -> None:
    """Raise MotleyError if an embedding has ``max_norm``, which rescales weights in each lookup.

    A check of two samples does not always show that the forward pass changes these weights.

    Args:
        name: name of the task.
        net: the task's network.
    """
    result = [path for path, part in net.named_modules() if getattr(part, "max_norm", None)]
    if result:
        raise changed_in_forward(name, net, [f"{path}.weight" for path in result])


def changed_in_forward(name: str, net: nn.Module, names: list[str]) -> MotleyError:
    """Return the MotleyError for tensors that a forward pass changes.

    Args:
        name: name of the task.
        net: the task's network.
        names: names of the tensors that changed.
    """
    causes = dict.fromkeys(_cause(net, each) for each in names)
    fix = "; ".join(_FIXES.get(cause, _UPDATE) for cause in causes)
    return MotleyError(
        f"a forward pass of {name} changes {name_some(names)}. Ranks compute other samples in "
        "another number of passes, so their models would become different, and no rank's model "
        f"would be that of a single machine. Fix: {fix}"
    )


def _cause(net: nn.Module, name: str) -> str:
    """Return the key of :data:`_FIXES` for a tensor, or an empty string if no fix is known."""
    path, _, last = name.rpartition(".")
    owner: Any = net.get_submodule(path)
    if getattr(owner, "max_norm", None):
        return "max_norm"
    if isinstance(owner, _InstanceNorm):
        return "instance_norm"
    hooks = (*owner._forward_pre_hooks.values(), owner)  # torch has two implementations
    if any(type(each).__name__ in ("SpectralNorm", "_SpectralNorm") for each in hooks):
        return "spectral_norm"
    return last if last in _FIXES else ""


@torch.no_grad()
def _values(net: nn.Module) -> dict[str, Tensor]:
    """Return fingerprints of parameters and copies of buffers, by name.

    A copy of all parameters may not fit into memory.
    """
    parameters = {
        key: fingerprint(each) for key, each in net.named_parameters() if not each.is_meta
    }
    buffers = {key: each.clone() for key, each in net.named_buffers() if not each.is_meta}
    return parameters | buffers


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


_MORE = 32  # samples that are tried if the first ones leave some parameters without a gradient


def check_used(name: str, model: TaskModel, passes: Iterable[set[str]]) -> tuple[str, ...]:
    """Return the names of the parameters that have no gradient after some passes.

    Args:
        name: name of the task.
        model: the task's model, in fp32, not wrapped.
        passes: names of the parameters without a gradient, one set per pass.

    Raises:
        MotleyError: a parameter has no gradient after any pass, nor after a pass over more samples.
            For equal modules in one list, such as the experts of a layer, a gradient in one module
            is enough.
    """
    learning = [key for key, each in model.net.named_parameters() if each.requires_grad]
    result = list(passes)
    never = set.intersection(*result)
    if never:
        batch, _ = first_batch(model.task, _MORE)
        result.append(unused(model, batch.to(model.device).data))
        never &= result[-1]
    used = {_like(key) for key in learning if key not in never}
    without = [key for key in learning if key in never and _like(key) not in used]
    if without:
        raise MotleyError(
            f"{len(without)} of the {len(learning)} parameters of {name} get no gradient: "
            f"{name_some(without)}. Use them in losses(), take them out of the "
            "model, or freeze them with requires_grad_(False)"
        )
    some = set.union(*result)
    return tuple(key for key in learning if key in some)


def unused(model: TaskModel, data: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the trainable parameters that have no gradient after a pass.

    Args:
        model: the task's model.
        data: batch of the pass: tensors by name.
    """
    model.zero_grad(set_to_none=True)
    model(data).sum().backward()
    return without_gradient(model.net)


def without_gradient(net: nn.Module) -> set[str]:
    """Return the names of the trainable parameters that have no gradient now."""
    return {key for key, each in net.named_parameters() if each.requires_grad and each.grad is None}


def _like(name: str) -> str:
    """Return a parameter's name with list indices replaced by ``*``.

    Parameters of equal modules in one list therefore get the same name.
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def refuse_unused(model: TaskModel, engine: str) -> None:
    """Raise MotleyError if some samples leave parameters unused, which the engine does not support.

    Args:
        model: the checked model, whose ``sometimes_unused`` lists these parameters.
        engine: name of the engine for the message.
    """
    if model.sometimes_unused:
        raise MotleyError(
            f"{engine} needs a gradient of each parameter from each rank in each micro-batch, and "
            f"some samples give no gradient to {name_some(model.sometimes_unused)}. Take "
            "torch_dist/train_vit.py --strategy ddp, or compute all experts for each sample, and "
            "multiply by 0 the outputs that were not chosen"
        )


def found_unused(model: TaskModel, engine: str, names: Iterable[str]) -> MotleyError:
    """Return the MotleyError for parameters that had no gradient in a training step.

    All of these parameters had a gradient in the check before training.

    Args:
        model: the model that is trained.
        engine: name of the engine for the message.
        names: names of the parameters.
    """
    return MotleyError(
        f"{name_some(list(names))} had no gradient in this step, and {engine} needs one. Set "
        f"sometimes_unused = True in the class {type(model.task).__name__}, and continue with "
        "torch_dist/train_vit.py --strategy ddp --resume auto"
    )


_TOLERANCE = 1e-3  # relative error of a loss; rounding is far below it


def check_task(model: TaskModel) -> tuple[str, ...]:
    """Raise MotleyError if the task cannot be trained exactly.

    The message states the cause and the fix. The model has no gradients afterwards.

    Args:
        model: the task's model, in fp32, not wrapped.

    Returns:
        The names of the parameters that have no gradient for some samples.
    """
    task = type(model.task).__name__
    _check_samples(task, model.task)
    _check_hidden(task, model.net)
    check_renormalised(task, model.net)
    if not any(each.requires_grad for each in model.net.parameters()):
        raise MotleyError(
            f"the model of {task} has no parameter that can be trained; add one, or set "
            "requires_grad_(True) on a frozen one"
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
    """Raise MotleyError if there are no samples, or if two reads of a sample differ."""
    check_length(task, len(task.data(held_out=True)), held_out=True)
    for part, source in task.held_out_sets().items():
        check_length(task, len(source), held_out=True, part=part)
    once, again = first_sample(task), first_sample(task)
    for key, value in once.items():
        other = again[key]
        alike = torch.equal(value, other) if isinstance(value, Tensor) else bool(value == other)
        if not alike and not _is_nan(value):
            raise MotleyError(
                f"{name} returned two different {key!r} for the same sample. Draw random numbers "
                "only in sample(), and only from torch, whose seed follows from the sample and "
                "the epoch; random and numpy would give each rank other numbers"
            )


def _is_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _check_hidden(name: str, net: nn.Module) -> None:
    """Raise MotleyError if a module holds parameters in a plain list, tuple or dict.

    Torch does not register these parameters.
    """
    known = {*map(id, net.modules()), *map(id, net.parameters())}
    for path, part in net.named_modules():
        for field, value in vars(part).items():
            if field.startswith("_"):
                continue
            if any(id(each) not in known for each in _learnable(value)):
                where = ".".join(filter(None, (path, field)))
                raise MotleyError(
                    f"the model of {name} keeps modules or parameters in {where}, a "
                    f"{type(value).__name__} whose content torch does not register, so they would "
                    "not be trained, moved to a GPU or saved; use nn.ModuleList, nn.ModuleDict or "
                    "nn.ParameterList"
                )


def _learnable(value: Any) -> Iterator[Any]:
    """Return an iterator over the modules and parameters in a plain list, tuple or dict."""
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    return (each for each in parts if isinstance(each, nn.Module | nn.Parameter))


@torch.no_grad()
def _check_losses(name: str, model: TaskModel) -> None:
    """Raise MotleyError if a sample's loss depends on other samples or on earlier passes."""
    batch = model.example
    n = len(batch)
    losses = _losses(name, model, batch.data, n)
    if not torch.equal(losses, again := _losses(name, model, batch.data, n)):
        worst = float((losses - again).abs().max())
        if worst > _TOLERANCE * float(losses.abs().max()):
            raise MotleyError(
                f"{name} computes other losses in a second pass over the same batch in eval mode: "
                "the model draws random numbers, or keeps values from one pass to the next "
                "outside of its buffers"
            )
    if n < 2:
        return
    alone = torch.cat([_losses(name, model, batch[row : row + 1].data, 1) for row in range(n)])
    if not torch.allclose(losses, alone, rtol=_TOLERANCE, atol=1e-6, equal_nan=True):
        whole, parts = _numbers(losses), _numbers(alone)
        raise MotleyError(
            f"the loss of a sample of {name} depends on the other samples of its batch: the "
            f"losses are {whole} in one batch, and {parts} one by one. If losses() takes a mean "
            'over the batch, return one number per sample, as with reduction="none". If the model '
            "takes another dimension than the first as the batch, as nn.LSTM does without "
            "batch_first=True, change that"
        )


def _check_dense(name: str, net: nn.Module) -> None:
    """Raise MotleyError if a gradient is sparse.

    A sparse gradient holds only some rows, and ranks may have different rows.
    """
    result = [
        key for key, each in net.named_parameters()
        if each.grad is not None and each.grad.layout != torch.strided
    ]  # fmt: skip
    if result:
        raise MotleyError(
            f"the gradient of {name_some(result)} in {name} is sparse, and ranks cannot add up "
            "sparse gradients; leave out sparse=True of that nn.Embedding"
        )


def _check_changes(name: str, model: TaskModel, changes: ForwardChanges) -> list[set[str]]:
    """Raise MotleyError if a training pass changes a parameter or buffer.

    Non-persistent buffers may change in the first pass, because they may be caches.

    Returns:
        For each sample, the names of the parameters without a gradient after a pass over that
            sample alone.
    """
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        first, *others = (model.example[row : row + 1].data for row in range(len(model.example)))
        result = [unused(model, first)]
        cached = ForwardChanges(model.net)
        model(first)
        names = cached.names(caches=True)
        result += [unused(model, each) for each in others]
    if names := list(dict.fromkeys([*changes.names(caches=False), *names])):
        raise changed_in_forward(name, model.net, names)
    return result


def _losses(name: str, model: TaskModel, data: Tensors, n: int) -> Tensor:
    result: Any = model.task.losses(model.compute, data)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise MotleyError(
            f"losses() of {name} returns {_kind(result)}; return a tensor of floats of shape [n]"
        )
    if result.shape != (n,):
        mean = result.dim() == 0
        raise MotleyError(
            f"losses() of {name} returns a tensor of shape {tuple(result.shape)} for {n} samples; "
            f"return one number per sample, of shape ({n},)"
            + (
                ', as with reduction="none" in place of a sum or mean over the batch'
                if mean
                else ", as with .sum() over all other dimensions"
            )
        )
    return result


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a {type(value).__name__}"


def _numbers(values: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in values.tolist())

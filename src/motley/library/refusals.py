"""Reasons why a user's own objects cannot be trained exactly on several ranks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from motley.comm.collectives import all_gather_object
from motley.errors import MotleyError
from motley.tasks.ghost_batch_norm import is_grouped
from motley.text import name_some

ALLOWED = ("batch_norm",)


def check_model(model: nn.Module) -> None:
    """Raise MotleyError if a wrapper such as DDP already divides a model's work among ranks."""
    if isinstance(model, DistributedDataParallel | DataParallel | FSDPModule):
        raise MotleyError(
            f"the model is a {type(model).__name__}, which averages equal parts, and the parts of "
            "Motley's ranks are unequal: give lab.prepare() the model inside, and remove the "
            "wrapper"
        )


def check_allowed(allow: Collection[str]) -> None:
    """Raise MotleyError if ``allow`` of ``motley.join()`` has an unknown name."""
    unknown = sorted(set(allow) - set(ALLOWED))
    if unknown:
        raise MotleyError(f"allow={unknown} is unknown: the known name is {', '.join(ALLOWED)}")


def check_statistics(models: Sequence[nn.Module], allow: Collection[str]) -> None:
    """Raise MotleyError if a layer computes statistics over the rows of a batch.

    Args:
        models: the models, in the mode in which they train.
        allow: names of checks to skip, as for :func:`motley.join`.
    """
    if "batch_norm" in allow:
        return
    names = [
        name for model in models for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training and not is_grouped(layer)
    ]  # fmt: skip
    if names:
        raise MotleyError(
            f"{name_some(names, 3)}: a batch norm computes its statistics over the rows of one "
            "rank, so the result depends on the shares. Give motley.join(bn_group=32) for "
            "statistics over groups of 32 rows, call .eval() on these layers, replace them by a "
            "GroupNorm, or accept statistics of each rank's own rows with "
            'motley.join(allow=["batch_norm"])'
        )


def check_optimizers(optimizers: Collection[Optimizer]) -> None:
    """Raise MotleyError if there is no optimizer.

    Ranks sum gradients in ``optimizer.step()``, so that a model without an optimizer is never
    trained.
    """
    if not optimizers:
        raise MotleyError(
            "lab.prepare() was given no optimizer, and the ranks add up their gradients in "
            "optimizer.step(): write `optimizer = torch.optim.SGD(model.parameters(), lr=0.1)` in "
            "place of an update of your own, and `lab.prepare(model, optimizer)`"
        )


def check_same(noun: str, own: Mapping[str, Any], ranks: Sequence[str]) -> None:
    """Raise MotleyError if a value differs between ranks; all ranks call it.

    Args:
        noun: noun for the message, as in ``model``.
        own: values of this rank by name.
        ranks: each rank with its host, for the message.
    """
    facts = all_gather_object(dict(own))
    for rank, other in enumerate(facts):
        names = [name for name in {**facts[0], **other} if facts[0].get(name) != other.get(name)]
        if names:
            name = names[0]
            raise MotleyError(
                f"the {noun} differs between ranks: {name} is {other.get(name)} on {ranks[rank]} "
                f"and {facts[0].get(name)} on {ranks[0]}: make it from the same code, seed and "
                "files on all hosts"
            )

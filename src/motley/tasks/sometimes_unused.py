"""Finds the parameters that have a gradient for some samples alone, as an expert that a sample does
not choose has none."""

import re
from collections.abc import Iterable

import torch
from torch import nn

from motley.data.keyed import first_batch
from motley.errors import MotleyError
from motley.tasks.model import TaskModel
from motley.text import name_some

_MORE = 32  # samples that are tried where the first ones leave some parameters out


def check_used(name: str, model: TaskModel, passes: Iterable[set[str]]) -> tuple[str, ...]:
    """Return the parameters that some passes give no gradient.

    Args:
        name: of the task.
        passes: the parameters without a gradient after each of some passes.

    Raises:
        MotleyError: a parameter has no gradient after any pass, nor after one over more samples,
            and none of its like has, as the experts of one layer are.
    """
    learning = [key for key, each in model.net.named_parameters() if each.requires_grad]
    found = list(passes)
    never = set.intersection(*found)
    if never:
        batch, _ = first_batch(model.task, _MORE)
        found.append(unused(model, batch.to(model.device).data))
        never &= found[-1]
    used = {_like(key) for key in learning if key not in never}
    without = [key for key in learning if key in never and _like(key) not in used]
    if without:
        raise MotleyError(
            f"{len(without)} of the {len(learning)} parameters of {name} get no gradient: "
            f"{name_some(without)}. Use them in losses(), take them out of the "
            "model, or freeze them with requires_grad_(False)"
        )
    some = set.union(*found)
    return tuple(key for key in learning if key in some)


def unused(model: TaskModel, data: dict[str, torch.Tensor]) -> set[str]:
    """Return the parameters to be trained that a pass over some samples gives no gradient."""
    model.zero_grad(set_to_none=True)
    model(data).sum().backward()
    return without_gradient(model.net)


def without_gradient(net: nn.Module) -> set[str]:
    """Return the names of the parameters to be trained that have no gradient now."""
    return {key for key, each in net.named_parameters() if each.requires_grad and each.grad is None}


def _like(name: str) -> str:
    """Return what the names of the same parameter in equal modules of a list have in common."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def refuse_unused(model: TaskModel, engine: str) -> None:
    """Raise MotleyError if an engine is to train a model some of whose parameters have no gradient
    in some steps, and cannot.

    Args:
        engine: as a user names it.
    """
    if model.sometimes_unused:
        raise MotleyError(
            f"{engine} needs a gradient of each parameter from each rank in each micro-batch, and "
            f"some samples give none to {name_some(model.sometimes_unused)}: take "
            "torch_dist/train_vit.py --strategy ddp, or compute all experts for each sample, and "
            "multiply what was not chosen by 0"
        )


def found_unused(model: TaskModel, engine: str, names: Iterable[str]) -> MotleyError:
    """Return the error for parameters without a gradient in a step, of which the samples that were
    tried at the start have shown nothing.

    Args:
        engine: as a user names it. names: of the parameters.
    """
    return MotleyError(
        f"{name_some(list(names))} had no gradient in this step, and {engine} waits for one: set "
        f"sometimes_unused = True in the class {type(model.task).__name__}, and continue with "
        "torch_dist/train_vit.py --strategy ddp --resume auto"
    )

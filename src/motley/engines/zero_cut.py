"""Cuts a model for DeepSpeed's stage 3, block by block: no rank ever holds the whole of it."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from motley.engines.import_deepspeed import comm, deepspeed, utils
from motley.tasks.model import TaskModel


def cut_model(model: TaskModel, config: Mapping[str, Any]) -> None:
    """Have each rank keep its part of each parameter, and nothing else; all ranks call it.

    A block is given its numbers, if it has none yet, and cut before the next; what is in no block,
    module by module.

    Args:
        config: DeepSpeed's.
    """
    blocks = list(model.task.blocks(model.net).values())
    if blocks and _all_hear_of_gradients(model, blocks):  # a block's are then gathered together
        utils.set_z3_leaf_modules(model, list({type(block) for block in blocks}))
    backend = deepspeed.get_accelerator().communication_backend_name()
    comm.init_distributed(backend, dist_init_required=False)  # as it does itself, but later
    with _on(model.device):
        for part in (*blocks, *reversed(list(model.net.modules()))):  # children before parents
            model.fill(part)
            if not all(hasattr(each, "ds_id") for each in part.parameters()):
                # It fills the configuration in.
                deepspeed.zero.Init(module=part, config_dict_or_path=deepcopy(dict(config)))


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """DeepSpeed cuts on GPU LOCAL_RANK, which is another one where each rank sees its own alone."""
    before = os.environ["LOCAL_RANK"]
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def _all_hear_of_gradients(model: TaskModel, blocks: Sequence[nn.Module]) -> bool:
    """Whether the backward pass goes on before each block: DeepSpeed lets go of the parameters of
    one that it ends in too early. It does where what comes first is not trained."""
    found = []

    def look(_: nn.Module, given: Any, named: Any) -> None:
        tensors = [each for each in tree_leaves((given, named)) if isinstance(each, Tensor)]
        found.append(any(tensor.requires_grad for tensor in tensors))

    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    by_blocks = model.by_blocks
    with by_blocks.folded(model.device) if by_blocks else contextlib.nullcontext():
        model(model.blank())
    for hook in hooks:
        hook.remove()
    return all(found)


@contextlib.contextmanager
def true_shapes(net: nn.Module) -> Iterator[None]:
    """Parameters that are cut have their shape meanwhile, in no memory: an optimizer is told by it
    what is a matrix, which decays, and what a vector."""
    cut: list[Any] = [each for each in net.parameters() if hasattr(each, "ds_shape")]
    held = [each.data for each in cut]
    for each in cut:
        each.data = torch.zeros((), dtype=each.dtype, device=each.device).expand(each.ds_shape)
    try:
        yield
    finally:
        for each, data in zip(cut, held, strict=True):
            each.data = data

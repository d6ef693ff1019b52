"""DeepSpeed's stage 3: each rank keeps a part of every parameter, from its first numbers on. The
model is cut block by block, so that no rank ever holds the whole of it.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from motley.engines.average import Named, ParameterAverage
from motley.engines.import_deepspeed import comm, deepspeed, utils
from motley.engines.named_state import State, parameter_of, snapshot
from motley.engines.rows import is_by_rows, rows_of_rank
from motley.engines.zero_engine import ZeroEngine
from motley.engines.zero_state import AverageOfParts, rows_in
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


class Zero3Engine(ZeroEngine):
    """Implements Engine, and HoldsParts."""

    def _prepared(self, config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """See ZeroEngine. A model that no rank could hold whole is cut before DeepSpeed sees it."""
        cut_model(self._model, config)
        return true_shapes(self._model.net)

    def _held(self) -> Named:
        """See EngineBase. No rank holds a whole parameter between two passes."""
        parts: dict[str, Any] = self._trained
        return {name: each.ds_tensor for name, each in parts.items()}

    def _make_average(self, decay: float, warmup: bool) -> ParameterAverage:
        return AverageOfParts(self._trained, self._held, decay, warmup)

    def part(self) -> State:
        """See HoldsParts. Parts of DeepSpeed's end within a row, so a parameter is put together,
        and each rank takes its rows."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def kept(value: Tensor) -> Tensor:
            return snapshot(value[slice(*rows_of_rank(len(value), rank, ranks))]
                            if value.ndim else value)  # fmt: skip

        state = self._put_together(kept)
        tensors = {name: each for name, each in state.tensors.items() if each.ndim or rank == 0}
        return State(tensors, state.plain)

    def rows_of(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """See HoldsParts."""
        own: Any = parameter_of(name, self._model.net)
        if not shape or own is None or not is_by_rows(shape, own.ds_shape):
            return None
        return rows_in(own)

    def load_part(self, state: State) -> None:
        """See HoldsParts."""
        self.load_state(state)

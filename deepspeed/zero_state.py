"""What DeepSpeed's partitions hold, as whole tensors and back: checkpoints know no ranks."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.nn import functional

from motley.named_state import load_model_state, model_state, slots_of
from motley.optimizer import make_optimizer
from motley.options import Config

Optimizer = torch.optim.Optimizer


def is_elementwise(config: Config) -> bool:
    """Whether ``--opt`` does to a number what it does whatever the tensor around it, tried on a
    small one: AdamW does, LAMB does not. Draws no random numbers."""

    def stepped(values: Tensor) -> Tensor:
        net = nn.Module()
        net.weight = nn.Parameter(values.clone())
        optimizer = make_optimizer(net, config)
        for step in range(1, 3):
            net.weight.grad = (net.weight.detach() * 3 + step).sin()
            optimizer.step()
        return net.weight.detach()

    values = torch.linspace(0.1, 2, 64 * 64).reshape(64, 64)  # halves unlike each other
    halves = torch.cat([stepped(half) for half in values.split(32)])
    return torch.allclose(stepped(values), halves, atol=1e-7)


def whole_state(zero: Any, optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """``model.<name>`` and ``optimizer.<name>.<slot>`` of stages 1 to 3, on the CPU; all ranks
    call it.

    Args:
        zero: DeepSpeed's optimizer, around ours.
    """
    state = model_state(net)
    steps, slots = _slots(zero, optimizer)
    for name, parameter in net.named_parameters():
        if _is_cut(parameter):
            state[f"model.{name}"] = safe_get_full_fp32_param(parameter).cpu()
        for slot in slots:
            whole = safe_get_full_optimizer_state(parameter, slot)
            state[f"optimizer.{name}.{slot}"] = whole.cpu()
        state |= {f"optimizer.{name}.{slot}": value.cpu() for slot, value in steps.items()}
    return state


def cut_state(state: dict[str, Tensor], zero: Any, optimizer: Optimizer, net: nn.Module) -> None:
    """Continue from :func:`whole_state`, which all ranks have; the slots must be there."""
    _slots(zero, optimizer)
    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        load_model_state(net, state)
    for name, parameter in net.named_parameters():
        if _is_cut(parameter):
            safe_set_local_fp32_param(parameter, _own_part(state[f"model.{name}"], parameter))
        else:
            safe_set_full_fp32_param(parameter, parameter.detach())
        for slot, value in slots_of(name, state).items():
            if not value.ndim:
                for slots in optimizer.state.values():
                    slots[slot].copy_(value)
            elif _is_cut(parameter):
                safe_set_local_optimizer_state(parameter, _own_part(value, parameter), slot)
            else:
                safe_set_full_optimizer_state(parameter, value, slot)


def _slots(zero: Any, optimizer: Optimizer) -> tuple[dict[str, Tensor], list[str]]:
    """Of this rank's partition: scalar slots (AdamW's step), and names of tensor slots."""
    if optimizer.state and hasattr(zero, "bit16_groups"):
        # DeepSpeed 0.19.8 links parameters to slots after the first parameter group's first
        # step, at stages 1 and 2, and so leaves the other groups' parameters without any.
        groups = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for group, flat in groups:
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.state)
    slots = next(iter(optimizer.state.values()), {})
    scalars = {name: value for name, value in slots.items() if value.ndim == 0}
    return scalars, [name for name in slots if name not in scalars]


def _is_cut(parameter: nn.Parameter) -> bool:
    """Each rank has a part of it alone: stage 3."""
    return hasattr(parameter, "ds_id")


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Of a whole tensor, this rank's: as long as the others', the last one filled up with zeros."""
    count: int = parameter.ds_tensor.ds_numel
    padded = functional.pad(value.flatten(), (0, count * dist.get_world_size() - value.numel()))
    return padded.narrow(0, count * dist.get_rank(), count)

"""What DeepSpeed's partitions hold, as whole tensors and back: checkpoints know no ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from motley.engines.average import Named, ParameterAverage, trained
from motley.engines.import_deepspeed import deepspeed, utils
from motley.engines.named_state import load_model_state, model_state
from motley.engines.optimizer_state import State, slots_of

Optimizer = torch.optim.Optimizer


def whole_state(zero: Any, optimizer: Optimizer, net: nn.Module) -> State:
    """The model of stages 1 to 3, and what the optimizer keeps of each parameter; all ranks call
    it.

    Args:
        zero: DeepSpeed's optimizer, around ours.
    """
    state = model_state(net)
    steps, numbers, slots = _slots(zero, optimizer)
    for name, parameter in net.named_parameters():
        if _is_cut(parameter):
            state[f"model.{name}"] = _whole(parameter)
    parameters = trained(net)  # DeepSpeed keeps fp32 copies and slots of these alone
    for name, parameter in parameters.items():
        for slot in slots:
            whole = utils.safe_get_full_optimizer_state(parameter, slot)
            state[f"optimizer.{name}.{slot}"] = whole.cpu()
        state |= {f"optimizer.{name}.{slot}": value.cpu() for slot, value in steps.items()}
    return State(state, {"slots": dict.fromkeys(parameters, numbers)})


def cut_state(state: State, zero: Any, optimizer: Optimizer, net: nn.Module) -> None:
    """Continue from :func:`whole_state`, which all ranks have; the slots must be there."""
    _slots(zero, optimizer)
    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        load_model_state(net, state.tensors)
    for name, parameter in trained(net).items():
        if _is_cut(parameter):
            utils.safe_set_local_fp32_param(
                parameter, _own_part(state.tensors[f"model.{name}"], parameter)
            )
        else:
            utils.safe_set_full_fp32_param(parameter, parameter.detach())
        for slot, value in slots_of(name, state.tensors).items():
            if not value.ndim:
                for slots in optimizer.state.values():
                    if isinstance(slots[slot], Tensor):
                        slots[slot].copy_(value)
                    else:  # an older checkpoint's
                        slots[slot] = value.item()
            elif _is_cut(parameter):
                utils.safe_set_local_optimizer_state(parameter, _own_part(value, parameter), slot)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, slot)
    numbers: dict[str, Any] = next(iter(state.plain.get("slots", {}).values()), {})
    for slots in optimizer.state.values():
        slots.update(numbers)


def _slots(zero: Any, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Of this rank's partition: scalar slots (AdamW's step), plain numbers (RAdam's), and names of
    tensor slots."""
    if optimizer.state and hasattr(zero, "bit16_groups"):
        # DeepSpeed 0.19.8 links parameters to slots after the first parameter group's first
        # step, at stages 1 and 2, and so leaves the other groups' parameters without any.
        groups = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for group, flat in groups:
            utils.lazy_init_hp_params_optimizer_state(group, flat, optimizer.state)
    slots: dict[str, Any] = next(iter(optimizer.state.values()), {})
    numbers = {name: value for name, value in slots.items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in slots.items() if name not in numbers}
    scalars = {name: value for name, value in tensors.items() if value.ndim == 0}
    return scalars, numbers, [name for name in tensors if name not in scalars]


def _whole(parameter: nn.Parameter) -> Tensor:
    """A parameter of stage 3, on the CPU; all ranks ask."""
    if parameter.requires_grad:
        whole: Tensor = utils.safe_get_full_fp32_param(parameter)
        return whole.cpu()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone().cpu()


def _is_cut(parameter: nn.Parameter) -> bool:
    """Each rank has a part of it alone: stage 3."""
    return hasattr(parameter, "ds_id")


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Of a whole tensor, this rank's: as long as the others', the last one filled up with zeros."""
    count: int = parameter.ds_tensor.ds_numel
    padded = functional.pad(value.flatten(), (0, count * dist.get_world_size() - value.numel()))
    return padded.narrow(0, count * dist.get_rank(), count)


class AverageOfParts(ParameterAverage):
    """Of stage 3's partitions, of which each rank has one."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        held: Callable[[], Named],
        decay: float,
        warmup: bool,
    ) -> None:
        self._parameters = parameters
        super().__init__(held, decay, warmup)

    @torch.no_grad()
    def exchange(self) -> None:
        """See ParameterAverage. DeepSpeed must hear of it: it keeps small parameters whole."""
        held = self._held()
        for name, parameter in self._parameters.items():
            whole = self._gathered(name, parameter)
            self.tensors[name].copy_(held[name])
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.copy_(whole)

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """See ParameterAverage."""
        whole = {
            f"ema.{name}": keep(self._gathered(name, each))
            for name, each in self._parameters.items()
        }
        return super().state(keep) | whole

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See ParameterAverage."""
        own = {
            key: _own_part(tensors[key], each)
            for name, each in self._parameters.items() if (key := f"ema.{name}") in tensors
        }  # fmt: skip
        super().load({**tensors, **own})

    def _gathered(self, name: str, parameter: Any) -> Tensor:
        """One average, of all ranks' parts."""
        part = self.tensors[name].flatten()
        parts = part.new_empty(dist.get_world_size() * part.numel())
        dist.all_gather_into_tensor(parts, part)
        whole: Tensor = parts[: parameter.ds_numel].view(parameter.ds_shape)
        return whole

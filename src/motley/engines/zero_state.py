"""The conversion of DeepSpeed's partitions to whole tensors and back.

Checkpoints contain whole tensors, so that they do not depend on the number of ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from motley.comm.collectives import gather_parts
from motley.engines.import_deepspeed import deepspeed, utils
from motley.engines.named_state import (
    Named,
    ParameterAverage,
    State,
    load_model_state,
    model_state,
    other_model_error,
    select_part,
    select_slots,
    trained,
)

Optimizer = torch.optim.Optimizer


def gather_state(
    zero: Any, optimizer: Optimizer, net: nn.Module, keep: Callable[[Tensor], Tensor]
) -> State:
    """Return the state of stages 1 to 3: the model, and the optimizer's slots of each parameter.

    All ranks call this function. Tensors are gathered one at a time.

    Args:
        zero: DeepSpeed's optimizer, which wraps ``optimizer``.
        optimizer: the wrapped optimizer.
        net: the network.
        keep: function that returns the value that this rank stores for each tensor.
    """
    state = model_state(net, keep)
    steps, numbers, slots = _slots(zero, optimizer)
    for name, parameter in net.named_parameters():
        if _is_cut(parameter):
            state[f"model.{name}"] = keep(_gather_parameter(parameter))
    parameters = trained(net)  # DeepSpeed keeps fp32 copies and slots of these alone
    for name, parameter in parameters.items():
        for slot in slots:
            whole = utils.safe_get_full_optimizer_state(parameter, slot)
            state[f"optimizer.{name}.{slot}"] = keep(whole)
        state |= {f"optimizer.{name}.{slot}": keep(value) for slot, value in steps.items()}
    return State(state, {"slots": dict.fromkeys(parameters, numbers)})


def cut_state(state: State, zero: Any, optimizer: Optimizer, net: nn.Module) -> None:
    """Restore the result of :func:`gather_state`.

    ``state`` has whole tensors, or only this rank's rows of sharded tensors (see :func:`rows_in`).
    The optimizer must have its slots already.
    """
    *_, of_each = _slots(zero, optimizer)
    if any(map(_is_cut, net.parameters())):
        _load_parts(net, select_part(state.tensors, "model"))
    else:
        load_model_state(net, state.tensors)
    for name, parameter in trained(net).items():
        if _is_cut(parameter):
            utils.safe_set_local_fp32_param(parameter, _held(parameter))
        else:
            utils.safe_set_full_fp32_param(parameter, parameter.detach())
        for slot, value in select_slots(name, state.tensors).items():
            if slot not in of_each:  # such as a step counter
                for slots in optimizer.state.values():
                    if isinstance(slots[slot], Tensor):
                        slots[slot].copy_(value)
                    else:  # a number here, and a tensor in an older checkpoint
                        slots[slot] = value.item()
            elif _is_cut(parameter):
                utils.safe_set_local_optimizer_state(parameter, _own_part(value, parameter), slot)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, slot)
    numbers: dict[str, Any] = next(iter(state.plain.get("slots", {}).values()), {})
    for slots in optimizer.state.values():
        slots.update(numbers)


@torch.no_grad()
def _load_parts(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load this rank's part of each parameter at stage 3, and whole buffers.

    Raises:
        MotleyError: the tensors are of another model.
    """
    own = net.state_dict()  # parameters are empty here
    if wrong := sorted(own.keys() ^ tensors.keys()):
        raise other_model_error(f"{wrong[0]} is in one of the two alone")
    parameters: dict[str, Any] = dict(net.named_parameters())
    for name, parameter in parameters.items():
        shape, (first, last) = parameter.ds_shape, rows_in(parameter)
        if tensors[name].shape not in (shape, (last - first, *shape[1:])):
            raise other_model_error(f"{name} has another shape, {tuple(tensors[name].shape)}")
        _held(parameter).copy_(_own_part(tensors[name], parameter))
        parameter.partition()  # DeepSpeed may still hold a whole small parameter with old values
    for name, buffer in net.named_buffers():
        if name in own:
            buffer.copy_(tensors[name])


def _slots(zero: Any, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Return the optimizer's state (slots) for this rank's partition, in three groups.

    The groups are scalar tensors (such as AdamW's step), plain numbers (such as RAdam's step), and
    the names of all other tensors.
    """
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


def _gather_parameter(parameter: nn.Parameter) -> Tensor:
    """Return a whole parameter of stage 3. All ranks call it."""
    if parameter.requires_grad:
        whole: Tensor = utils.safe_get_full_fp32_param(parameter)
        return whole
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _is_cut(parameter: nn.Parameter) -> bool:
    """Return True if the parameter is sharded over the ranks, as at stage 3."""
    return hasattr(parameter, "ds_id")


def _held(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter as a flat tensor."""
    own: Tensor = parameter.ds_tensor
    return own


def rows_in(parameter: Any) -> tuple[int, int]:
    """Return the range of rows of a stage-3 parameter that this rank's part touches.

    The range is the first row, and the row after the last. All parts have the same number of
    entries, so a part may begin or end within a row.
    """
    rows, count = parameter.ds_shape[0], parameter.ds_tensor.ds_numel
    row, begin = parameter.ds_numel // rows, count * dist.get_rank()
    first = min(begin // row, rows)
    return first, max(first, min(-(-(begin + count) // row), rows))


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Return this rank's part of a tensor as a flat tensor.

    All parts have the same length. The last part is padded with zeros.

    Args:
        value: the whole tensor, or only this rank's rows; see :func:`rows_in`.
        parameter: the sharded parameter to which the tensor belongs.
    """
    count = parameter.ds_tensor.ds_numel
    begin = count * dist.get_rank()
    if value.shape != parameter.ds_shape:
        begin -= rows_in(parameter)[0] * (parameter.ds_numel // parameter.ds_shape[0])
    part = value.flatten()[begin : begin + count]
    return functional.pad(part, (0, count - len(part)))


class AverageOfParts(ParameterAverage):
    """The moving average of parameters at stage 3, where each rank holds one partition."""

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
        """Exchange the values of the average and the parameters.

        DeepSpeed's whole copies of small parameters are updated, too.
        """
        held = self._held()
        for name, parameter in self._parameters.items():
            whole = self._gathered(name, parameter)
            self.tensors[name].copy_(held[name])
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.copy_(whole)

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the averaged parameters and the number of updates. All ranks call it."""
        whole = {
            f"ema.{name}": keep(self._gathered(name, each))
            for name, each in self._parameters.items()
        }
        return super().state(keep) | whole

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the averaged parameters and the number of updates."""
        own = {
            key: _own_part(tensors[key], each)
            for name, each in self._parameters.items() if (key := f"ema.{name}") in tensors
        }  # fmt: skip
        super().load({**tensors, **own})

    def _gathered(self, name: str, parameter: Any) -> Tensor:
        """Return the whole average of one parameter, gathered from all ranks."""
        parts = gather_parts(self.tensors[name].flatten())
        whole: Tensor = parts[: parameter.ds_numel].view(parameter.ds_shape)
        return whole

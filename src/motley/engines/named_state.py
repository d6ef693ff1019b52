"""The state of a model and its optimizer by the names of parameters.

The state consists of tensors, of plain values, of tensors that are sharded over ranks along their
first dimension, and of an exponential moving average.

Most optimizers have only tensors as state, a few per parameter. Some optimizers store a step in a
parameter group (LAMB, Adan, Lookahead), Python numbers (RAdam, MARS), lists of tensors, or their
own random state (Kron). A checkpoint contains all state: tensors by name, and other values as JSON,
which preserves types.

The moving average with decay d is updated after each step that was taken:

    average <- d * average + (1 - d) * parameters

Only parameters are averaged, as in torch.optim.swa_utils. The running statistics of batch norms are
averages already. Source of the decay d and its warm-up: timm.utils.ModelEmaV3.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motley.engines.optimizers import convert
from motley.errors import MotleyError


def is_by_rows(shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Return True if an optimizer's tensor for a parameter is sharded along with the parameter.

    The tensor is sharded if it has the parameter's shape, or is a matrix with as many rows as the
    parameter. An example of such a matrix is the scales of an 8-bit optimizer.

    Args:
        shape: shape of the optimizer's tensor.
        parameter: shape of the parameter.
    """
    if torch.Size(shape) == torch.Size(parameter):
        return True
    return len(shape) == 2 and len(parameter) > 1 and shape[0] == parameter[0]


def rows_of_rank(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of a tensor's rows that a rank holds, if torch.chunk divides the tensor.

    The range is the first row, and the row after the last.

    Args:
        rows: number of rows of the tensor.
        rank: number of the rank.
        ranks: number of ranks.
    """
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return first, min(first + each, rows)


def own_rows(value: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or the whole of an unsharded tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def rows_as(value: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's rows as a DTensor that is sharded like a parameter.

    The result is on the device of the rows, which is the CPU if parameters are offloaded.
    """
    shape = torch.Size((parameter.shape[0], *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(  # moves the rows to the mesh's device
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=shape,
        stride=stride,
    )  # fmt: skip
    return whole.to(value.device)


def on_cpu(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU.

    A sharded tensor is gathered first. All ranks must then call this function.
    """
    return _gather_tensor(value).cpu()


def snapshot(value: Tensor, pinned: bool = True) -> Tensor:
    """Return a copy on the CPU that shares no memory with the tensor.

    Training may continue while the copy is written to a file.

    Args:
        value: the tensor. A DTensor is gathered first.
        pinned: True: use pinned memory, to which a GPU writes several times as fast. The allocation
            of pinned memory waits for all work that is queued on the GPU.
    """
    whole = _gather_tensor(value)
    if not whole.is_cuda:
        return whole.clone()
    if pinned:
        with contextlib.suppress(RuntimeError):  # too little memory can be pinned
            return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole)
    return whole.cpu()


def _gather_tensor(value: Tensor) -> Tensor:
    """Return a tensor. A sharded tensor is gathered from all ranks, on its own device."""
    if isinstance(value, DTensor):
        value = value.to(value.device_mesh.device_type)
        whole: Tensor = value.full_tensor()  # type: ignore[attr-defined]
        return whole
    return value.detach()


def select_part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors of one part, with the part's name removed from their names.

    Args:
        tensors: tensors by name.
        part: name of the part, such as ``model`` for ``model.<name>``. The name may contain dots.
    """
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items() if name.startswith(prefix)
    }  # fmt: skip


def model_state(net: nn.Module, keep: Callable[[Tensor], Tensor] = on_cpu) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network, with the names ``model.<name>``.

    Args:
        net: the network.
        keep: function that returns the value to store for each tensor.
    """
    return {f"model.{name}": keep(value) for name, value in net.state_dict().items()}


def fill_tied(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy the value of each tied parameter to all of its names in a state, in place.

    The state of a sharded model may have the value only under the parameter's first name. The
    values under the other names are then out of date.

    Args:
        net: the network.
        state: a result of :func:`model_state`.
    """
    first: dict[nn.Parameter, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        state[f"model.{name}"] = state[f"model.{first.setdefault(parameter, name)}"]


def load_model_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Restore the result of :func:`model_state`.

    Raises:
        MotleyError: the state is of another model.
    """
    try:
        net.load_state_dict(select_part(state, "model"))
    except RuntimeError as error:
        raise other_model_error(str(error)) from None


def other_model_error(said: str) -> MotleyError:
    """Return the error for a checkpoint of another model.

    Args:
        said: text that describes the difference that was found.
    """
    return MotleyError(
        f"the checkpoint is of another model: {' '.join(said.split())[:300]}. Give the --model, "
        "--dataset and --img-size that it was trained with"
    )


def find_parameter(key: str, net: nn.Module) -> nn.Parameter | None:
    """Return the parameter to which a tensor of a state belongs, or None.

    A tied parameter is found by any of its names.
    """
    kind, _, name = key.partition(".")
    try:
        return net.get_parameter(name.rpartition(".")[0] if kind == "optimizer" else name)
    except AttributeError:
        return None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this process's random number generators."""
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Set the states of the random number generators to a result of :func:`random_state`."""
    torch.set_rng_state(state["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)


def seed_random(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on one device.

    torch.manual_seed takes half a millisecond, because it calls every kind of device that torch
    supports.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


JsonDict = dict[str, Any]

# Fields of a group that are not state: the schedule sets them.
_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "initial_weight_decay")


@dataclass(frozen=True)
class State:
    """The state of a model and its optimizer, as a checkpoint contains it.

    Attributes:
        tensors: ``model.<name>`` and ``optimizer.<name>.<slot>``, on the CPU.
        plain: values of the optimizer that are not tensors, as JSON. The keys are ``slots`` (by
            parameter name), ``groups`` (parameter groups), and ``own`` (values that belong to no
            parameter).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: JsonDict = field(default_factory=dict)


class OptimizerMemory:
    """A reader and writer of an optimizer's state. Create it before the optimizer's first step.

    The options of the run set all values in a parameter group before the first step. Only values
    that change afterwards are saved.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in net.named_parameters()}
        self._optimizer = optimizer
        self._names = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        self._options = [
            deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

    def slots(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter, by parameter name and slot.

        A slot is a name in the optimizer's state, such as ``exp_avg``. The tensors are not copied.
        The slots are empty before the first step. Do not call this method while an engine has
        replaced the optimizer's parameters by other tensors.
        """
        state = self._optimizer.state_dict()["state"]  # the attribute of a wrapper lacks it
        names = [name for group in self._names for name in group]
        return {names[number]: slots for number, slots in sorted(state.items())}

    def changed(self) -> list[JsonDict]:
        """Return for each parameter group the values that have changed, such as a step counter."""
        return [
            {key: value for key, value in group.items()
             if key not in _OPTIONS and (key not in options or options[key] != value)}
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True)
        ]  # fmt: skip

    def state(self, keep: Callable[[Tensor], Tensor] = on_cpu) -> State:
        """Return the tensors ``optimizer.<parameter>.<slot>`` and the values that are not tensors.

        If parameters are sharded, all ranks must call this method.

        Args:
            keep: function that returns the value to store for each tensor.
        """
        tensors: dict[str, Tensor] = {}
        plain: JsonDict = {}
        for name, slots in self.slots().items():
            for slot, value in slots.items():
                text = _describe(value, f"optimizer.{name}.{slot}", tensors)
                if not isinstance(value, Tensor):
                    plain.setdefault(name, {})[slot] = text
        own = {
            key: _describe(value, f"optimizer.{key}", tensors)
            for key, value in self._optimizer.state_dict().items()
            if key not in ("state", "param_groups")
        }
        plain = {"slots": plain, "groups": self.groups(tensors), "own": own}
        return State({name: keep(tensor) for name, tensor in tensors.items()}, plain)

    def groups(self, tensors: dict[str, Tensor]) -> list[JsonDict]:
        """Return the result of :meth:`changed` as JSON, with the names of each group's parameters.

        Args:
            tensors: dictionary to which the tensors among the values are added.
        """
        return [
            {"parameters": names,
             "kept": {key: _describe(value, f"optimizer.{names[0]}.group.{key}", tensors)
                      for key, value in changed.items()}}
            for names, changed in zip(self._names, self.changed(), strict=True)
        ]  # fmt: skip

    def load(self, state: State) -> None:
        """Restore the result of :meth:`state`.

        Tensors keep their dtype, and move to the device of their parameter. Slots in the format of
        a convertible optimizer are converted; see motley.engines.optimizers.
        """
        state = State(convert(state.tensors, self._optimizer), state.plain)
        names = [name for group in self._names for name in group]
        slots = {number: self._convert_slots(name, state) for number, name in enumerate(names)}
        packed = self._optimizer.state_dict()
        packed["state"] = {number: result for number, result in slots.items() if result}
        for group, retained in zip(packed["param_groups"], self._get_groups(state), strict=True):
            group |= retained
        packed |= {
            key: _value(text, state.tensors)
            for key, text in state.plain.get("own", {}).items() if key in packed
        }  # fmt: skip
        self._optimizer.load_state_dict(packed)
        for name, result in self.slots().items():  # torch converts all to the parameter's type
            saved = self._convert_slots(name, state)
            result.update({slot: _like(value, saved[slot]) for slot, value in result.items()})

    def load_groups(self, state: State) -> None:
        """Restore only the values of parameter groups, from a result of :meth:`state`."""
        groups = zip(self._optimizer.param_groups, self._get_groups(state), strict=True)
        for group, saved in groups:
            group.update(saved)

    def _get_groups(self, state: State) -> list[JsonDict]:
        saved = {
            name: group["kept"]
            for group in state.plain.get("groups", []) for name in group["parameters"]
        }  # fmt: skip
        return [
            {key: _value(text, state.tensors) for key, text in saved.get(names[0], {}).items()}
            for names in self._names
        ]

    def _convert_slots(self, name: str, state: State) -> dict[str, Any]:
        """Return the saved optimizer state of one parameter in the format of this optimizer."""
        plain: JsonDict = state.plain.get("slots", {}).get(name, {})
        result: dict[str, Any] = {
            slot: value
            for slot, value in select_slots(name, state.tensors).items()
            if "." not in slot
        }
        return result | {slot: _value(text, state.tensors) for slot, text in plain.items()}


def select_slots(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer state of one parameter by slot, such as ``exp_avg``.

    Tensors of a list have the names ``<slot>.<index>``.
    """
    return select_part(tensors, f"optimizer.{name}")


def _describe(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value in a form for JSON, and add the value's tensors to ``tensors``.

    Args:
        value: the value, which may contain tensors.
        key: name of the value. The names of its tensors begin with this name.
        tensors: dictionary that receives the tensors.
    """
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(v, f"{key}.{n}", tensors) for n, v in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[_describe(k, key, {}), _describe(v, f"{key}.{k}", tensors)]
                 for k, v in value.items()]  # fmt: skip
        return {"dict": pairs}
    raise TypeError(f"{key} has the type {type(value).__name__}, which a checkpoint cannot hold")


def _value(said: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`_describe` has described.

    Args:
        said: result of :func:`_describe`.
        tensors: the tensors of the value by name.
    """
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_value(key, tensors): _value(value, tensors) for key, value in content}
    values = [_value(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def _like(value: Any, saved: Any) -> Any:
    """Convert a loaded value back to the types of the saved value, on its current device."""
    if isinstance(saved, Tensor):
        return value.to(saved.dtype)
    if isinstance(saved, list | tuple):
        return type(saved)(_like(v, s) for v, s in zip(value, saved, strict=True))
    if isinstance(saved, dict):
        return {key: _like(value[key], each) for key, each in saved.items()}
    return saved


Named = Mapping[str, Any]  # tensors by name, DTensors among them


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name. A tied parameter occurs once."""
    return {name: each for name, each in net.named_parameters() if each.requires_grad}


class ParameterAverage:
    """An exponential moving average of the tensors that this rank holds, whole or sharded.

    Args:
        held: function that returns the tensors that the optimizer changes, by parameter name.
        decay: decay d of the average.
        warmup: True: start with a smaller decay, 1 - (1 + step) ^ (-2/3).

    Attributes:
        tensors: the average, by name.
        numbers: dictionary with ``updates``, the number of averaged steps, int64 [].
        exchanged: True while the parameters have the values of the average.
    """

    def __init__(self, held: Callable[[], Named], decay: float, warmup: bool) -> None:
        self._held, self._decay, self._warmup = held, decay, warmup
        self.exchanged = False
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start the average from the current parameters."""
        self.tensors = {name: each.detach().clone() for name, each in self._held().items()}
        self.numbers = {"updates": torch.zeros((), dtype=torch.int64)}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current parameters, after a step."""
        self.numbers["updates"] += 1
        decay, updates = self._decay, int(self.numbers["updates"])
        if self._warmup:
            decay = min(decay, 1 - (1 + updates) ** (-2 / 3))
        held = self._held()
        torch._foreach_lerp_(
            list(self.tensors.values()), [held[name].detach() for name in self.tensors], 1 - decay
        )

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of the average and the parameters.

        A second exchange restores both values exactly.
        """
        for name, parameter in self._held().items():
            average = self.tensors[name]
            before = average.clone()
            average.copy_(parameter)
            parameter.copy_(before)
        self.exchanged = not self.exchanged

    def put_back(self, state: dict[str, Tensor]) -> None:
        """Swap the tensors ``model.<name>`` and ``ema.<name>`` in a state.

        Call this method for a state that was read while :attr:`exchanged` is True.
        """
        for name in self.tensors:
            model, ema = f"model.{name}", f"ema.{name}"
            state[model], state[ema] = state[ema], state[model]

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the tensors ``ema.<name>`` and ``ema_numbers.updates``. All ranks must call it.

        Args:
            keep: function that returns the value to store for each tensor.
        """
        return _prefixed("ema", self.tensors, keep) | _prefixed("ema_numbers", self.numbers, keep)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`.

        The given tensors are sharded in the same way as this rank's parameters.

        If the state has no average, the average starts from the parameters.
        """
        self.begin()
        for prefix, own in (("ema", self.tensors), ("ema_numbers", self.numbers)):
            for name, tensor in own.items():
                if (saved := tensors.get(f"{prefix}.{name}")) is not None:
                    tensor.copy_(saved)


def _prefixed(prefix: str, tensors: Named, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": keep(tensor) for name, tensor in tensors.items()}

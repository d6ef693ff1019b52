"""The state of a model and its optimizer by the names of parameters.

The state consists of tensors, of plain values, of tensors that are cut over ranks along their first
dimension, and of an exponential moving average.

Most optimizers keep tensors alone, a few of each parameter. Some keep a step in a parameter group
(LAMB, Adan, Lookahead), Python numbers (RAdam, MARS), lists of tensors, or random numbers of their
own (Kron). All of it goes into a checkpoint: tensors under names, the rest as JSON, which keeps
types.

    average <- d * average + (1 - d) * parameters    after each step that was taken.

Parameters alone are averaged, as torch.optim.swa_utils does: the running statistics of batch norms
are averages already. Source of the decay d and its warm-up: timm.utils.ModelEmaV3.
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
    """Return True if a tensor that an optimizer keeps of a parameter is cut with it.

    Such a tensor has the parameter's shape, or as many rows in a matrix of its own, as the scales
    of blocks of numbers.
    """
    if torch.Size(shape) == torch.Size(parameter):
        return True
    return len(shape) == 2 and len(parameter) > 1 and shape[0] == parameter[0]


def rows_of_rank(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows of a rank, as torch.chunk cuts: from the first to before the second."""
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return first, min(first + each, rows)


def own_rows(value: Tensor) -> Tensor:
    """Return this rank's rows of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def rows_as(value: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's rows as a part of a whole tensor, cut as the parameter is.

    The part is on the device where the rows are now, which is the host's memory where a GPU's
    parameters are kept there.
    """
    shape = torch.Size((parameter.shape[0], *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(  # takes them to the mesh's device
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=shape,
        stride=stride,
    )  # fmt: skip
    return whole.to(value.device)


def on_cpu(value: Tensor) -> Tensor:
    """Return a whole tensor on the CPU; for a sharded one all ranks must call it."""
    return _gather_tensor(value).cpu()


def snapshot(value: Tensor, pinned: bool = True) -> Tensor:
    """Return a copy on the CPU that shares no memory with the tensor.

    Training may go on while the copy is written to a file.

    Args:
        value: the tensor. A DTensor is gathered first.
        pinned: use memory that a GPU writes to several times as fast. Making some waits for all
            work that the GPU has queued.
    """
    whole = _gather_tensor(value)
    if not whole.is_cuda:
        return whole.clone()
    if pinned:
        with contextlib.suppress(RuntimeError):  # there is no room for it
            return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole)
    return whole.cpu()


def _gather_tensor(value: Tensor) -> Tensor:
    """Return a whole tensor on the device that computes with it."""
    if isinstance(value, DTensor):
        value = value.to(value.device_mesh.device_type)
        whole: Tensor = value.full_tensor()  # type: ignore[attr-defined]
        return whole
    return value.detach()


def select_part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors of one part, without the name of the part before theirs.

    Args:
        tensors: tensors by name.
        part: name of the part, as ``model`` for ``model.<name>``. The name may contain dots.
    """
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items() if name.startswith(prefix)
    }  # fmt: skip


def model_state(net: nn.Module, keep: Callable[[Tensor], Tensor] = on_cpu) -> dict[str, Tensor]:
    """Return parameters and buffers as ``model.<name>``.

    Args:
        net: the network.
        keep: returns the value to store for each tensor.
    """
    return {f"model.{name}": keep(value) for name, value in net.state_dict().items()}


def fill_tied(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Store a tied parameter under all its names in a :func:`model_state`.

    A state that was gathered under the first name alone has old values under the others.
    """
    first: dict[nn.Parameter, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        state[f"model.{name}"] = state[f"model.{first.setdefault(parameter, name)}"]


def load_model_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Continue from :func:`model_state`; MotleyError if it is of another model."""
    try:
        net.load_state_dict(select_part(state, "model"))
    except RuntimeError as error:
        raise other_model_error(str(error)) from None


def other_model_error(said: str) -> MotleyError:
    """Return the error for a checkpoint of another model.

    Args:
        said: the difference that was found.
    """
    return MotleyError(
        f"the checkpoint is of another model: {' '.join(said.split())[:300]}; give the --model, "
        "--dataset and --img-size that it was made with"
    )


def find_parameter(key: str, net: nn.Module) -> nn.Parameter | None:
    """Return the parameter that a tensor of a state belongs to, by any of its names, or None."""
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
    """Continue from :func:`random_state`."""
    torch.set_rng_state(state["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)


def seed_random(seed: int, device: torch.device) -> None:
    """Seed the random numbers of a pass.

    torch.manual_seed takes half a millisecond, because it asks every kind of device that torch
    supports.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


JsonDict = dict[str, Any]

_OPTIONS = ("params", "lr", "initial_lr")  # of a group; the schedule writes the rates


@dataclass(frozen=True)
class State:
    """The state of a model and its optimizer, as a checkpoint keeps it.

    Attributes:
        tensors: ``model.<name>`` and ``optimizer.<name>.<slot>``, on the CPU.
        plain: other values of the optimizer, as JSON: ``slots`` of a parameter by name,
            ``groups`` of parameters, and ``own``, of no parameter.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: JsonDict = field(default_factory=dict)


class OptimizerMemory:
    """Reader and writer of an optimizer's state, to be made before its first step.

    The options decide the values that a parameter group holds then, also after a resume. Values
    that change later are saved.
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
        """Return the optimizer's own slots, to be read and changed, by parameter.

        They are empty before its first step. Do not call it where an engine has put other tensors
        into the parameters' place.
        """
        state = self._optimizer.state_dict()["state"]  # a wrapper's is not in its attribute
        names = [name for group in self._names for name in group]
        return {names[number]: slots for number, slots in sorted(state.items())}

    def changed(self) -> list[JsonDict]:
        """Return the values of each parameter group that have changed, as a step counter."""
        return [
            {key: value for key, value in group.items()
             if key not in _OPTIONS and (key not in options or options[key] != value)}
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True)
        ]  # fmt: skip

    def state(self, keep: Callable[[Tensor], Tensor] = on_cpu) -> State:
        """Return ``optimizer.<parameter>.<slot>`` and the rest.

        Where parameters are cut, all ranks must call it.

        Args:
            keep: what to take of each tensor.
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
        """Return :meth:`changed` as JSON, each with the parameters of its group.

        Args:
            tensors: gets those among them.
        """
        return [
            {"parameters": names,
             "kept": {key: _describe(value, f"optimizer.{names[0]}.group.{key}", tensors)
                      for key, value in changed.items()}}
            for names, changed in zip(self._names, self.changed(), strict=True)
        ]  # fmt: skip

    def load(self, state: State) -> None:
        """Continue from :meth:`state`.

        Tensors keep their type, and move to the device of their parameter. Slots of more bits, or
        fewer, are converted; see motley.engines.optimizers.
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
        for name, result in self.slots().items():  # torch makes all of them like the parameter
            saved = self._convert_slots(name, state)
            result.update({slot: _like(value, saved[slot]) for slot, value in result.items()})

    def load_groups(self, state: State) -> None:
        """Continue with what the groups of :meth:`state` keep, and with nothing else."""
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
        """Return the slots of one parameter in the form that the optimizer takes."""
        plain: JsonDict = state.plain.get("slots", {}).get(name, {})
        result: dict[str, Any] = {
            slot: value
            for slot, value in select_slots(name, state.tensors).items()
            if "." not in slot
        }
        return result | {slot: _value(text, state.tensors) for slot, text in plain.items()}


def select_slots(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one parameter, by slot; ``<slot>.<place>`` of a list."""
    return select_part(tensors, f"optimizer.{name}")


def _describe(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; its tensors are put into ``tensors``, and named."""
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
    raise TypeError(f"{key} is of a type that no checkpoint holds, {type(value).__name__}")


def _value(said: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`_describe` has described."""
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
    """Return a value as it was saved; a tensor on the device where it is now."""
    if isinstance(saved, Tensor):
        return value.to(saved.dtype)
    if isinstance(saved, list | tuple):
        return type(saved)(_like(v, s) for v, s in zip(value, saved, strict=True))
    if isinstance(saved, dict):
        return {key: _like(value[key], each) for key, each in saved.items()}
    return saved


Named = Mapping[str, Any]  # a Tensor by name; DTensors are theirs too


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once, by name."""
    return {name: each for name, each in net.named_parameters() if each.requires_grad}


class ParameterAverage:
    """An exponential moving average of the tensors that this rank holds, whole ones or parts.

    Args:
        held: the tensors that the optimizer changes, by the names of their parameters.
        decay: decay d of the average.
        warmup: True: begin with a smaller decay, 1 - (1 + step) ^ (-2/3).

    Attributes:
        tensors: the average, by name.
        numbers: ``updates``, the number of averaged steps, int64 [].
        exchanged: True while the average is in the parameters' place.
    """

    def __init__(self, held: Callable[[], Named], decay: float, warmup: bool) -> None:
        self._held, self._decay, self._warmup = held, decay, warmup
        self.exchanged = False
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the parameters as they are now."""
        self.tensors = {name: each.detach().clone() for name, each in self._held().items()}
        self.numbers = {"updates": torch.zeros((), dtype=torch.int64)}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now, after a step."""
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
        """Exchange the average and the parameters.

        Two exchanges restore both to the bit.
        """
        for name, parameter in self._held().items():
            average = self.tensors[name]
            before = average.clone()
            average.copy_(parameter)
            parameter.copy_(before)
        self.exchanged = not self.exchanged

    def put_back(self, state: dict[str, Tensor]) -> None:
        """Swap ``model.<name>`` and ``ema.<name>`` in a state that was taken during an exchange."""
        for name in self.tensors:
            model, ema = f"model.{name}", f"ema.{name}"
            state[model], state[ema] = state[ema], state[model]

    def state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return ``ema.<name>``, and ``ema_numbers.updates``; all ranks must call it.

        Args:
            keep: what to take of each tensor.
        """
        return _prefixed("ema", self.tensors, keep) | _prefixed("ema_numbers", self.numbers, keep)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state`, cut as this rank holds it.

        The average begins with the parameters if the state has none.
        """
        self.begin()
        for prefix, own in (("ema", self.tensors), ("ema_numbers", self.numbers)):
            for name, tensor in own.items():
                if (saved := tensors.get(f"{prefix}.{name}")) is not None:
                    tensor.copy_(saved)


def _prefixed(prefix: str, tensors: Named, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": keep(tensor) for name, tensor in tensors.items()}

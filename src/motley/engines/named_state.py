"""A model's parameters and buffers, and the random number state, as tensors by name."""

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motley.errors import MotleyError


def on_cpu(value: Tensor) -> Tensor:
    """Whole; for a sharded one all ranks must ask."""
    return _whole(value).cpu()


def snapshot(value: Tensor, pinned: bool = True) -> Tensor:
    """The same, as a copy that nobody else has: training may go on while it is written.

    Args:
        pinned: in memory that a GPU writes to several times as fast; to make some waits for all
            that the GPU has to do.
    """
    whole = _whole(value)
    if not whole.is_cuda:
        return whole.clone()
    if pinned:
        with contextlib.suppress(RuntimeError):  # there is no room for it
            return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole)
    return whole.cpu()


def _whole(value: Tensor) -> Tensor:
    """Where it is computed with."""
    if isinstance(value, DTensor):
        value = value.to(value.device_mesh.device_type)
        whole: Tensor = value.full_tensor()  # type: ignore[attr-defined]
        return whole
    return value.detach()


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Those of one part, without its name before theirs.

    Args:
        part: as in ``model``, for ``model.<name>``; may have dots itself.
    """
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items() if name.startswith(prefix)
    }  # fmt: skip


def model_state(net: nn.Module, keep: Callable[[Tensor], Tensor] = on_cpu) -> dict[str, Tensor]:
    """``model.<name>``: parameters and buffers.

    Args:
        keep: what to take of each tensor.
    """
    return {f"model.{name}": keep(value) for name, value in net.state_dict().items()}


def fill_tied(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Have a tied parameter be in a :func:`model_state` under all its names, where what is there
    was found for the first of them alone."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        state[f"model.{name}"] = state[f"model.{first.setdefault(parameter, name)}"]


def load_model_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Continue from :func:`model_state`; MotleyError if it is of another model."""
    try:
        net.load_state_dict(part_of(state, "model"))
    except RuntimeError as error:
        raise of_another_model(str(error)) from None


def of_another_model(said: str) -> MotleyError:
    """What is said of a checkpoint that is.

    Args:
        said: what tells so.
    """
    return MotleyError(
        f"the checkpoint is of another model: {' '.join(said.split())[:300]}; give the --model, "
        "--dataset and --img-size that it was made with"
    )


def parameter_of(key: str, net: nn.Module) -> nn.Parameter | None:
    """What a tensor of a state is of, or beside, by any of its names; None: of no parameter."""
    kind, _, name = key.partition(".")
    try:
        return net.get_parameter(name.rpartition(".")[0] if kind == "optimizer" else name)
    except AttributeError:
        return None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This process's random number generators."""
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
    """Seed what a pass draws from. torch.manual_seed, which asks every kind of device that torch
    knows, takes half a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)

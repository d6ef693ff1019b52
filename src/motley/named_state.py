"""What a model, its optimizer and this process's random numbers hold, as tensors by name."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motley.errors import MotleyError


def model_state(net: nn.Module) -> dict[str, Tensor]:
    """``model.<name>``: parameters and buffers, on the CPU."""
    return {f"model.{name}": _on_cpu(value) for name, value in net.state_dict().items()}


def _on_cpu(value: Tensor) -> Tensor:
    """Whole; for a sharded one all ranks must ask."""
    if isinstance(value, DTensor):
        value = value.to(value.device_mesh.device_type)
        whole: Tensor = value.full_tensor()  # type: ignore[attr-defined]
        return whole.cpu()
    return value.detach().cpu()


def load_model_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Continue from :func:`model_state`; MotleyError if it is of another model."""
    model = {
        name.removeprefix("model."): value
        for name, value in state.items()
        if name.startswith("model.")
    }
    try:
        net.load_state_dict(model)
    except RuntimeError as error:
        raise MotleyError(
            f"the checkpoint is of another model: {' '.join(str(error).split())[:300]}; give the "
            "--model, --dataset and --img-size that it was made with"
        ) from None


def optimizer_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``optimizer.<parameter>.<slot>``, on the CPU; empty before the first step."""
    return {
        f"optimizer.{name}.{slot}": _on_cpu(torch.as_tensor(value))
        for name, parameter in net.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def slots_of(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's slots of one parameter, out of :func:`optimizer_state`."""
    prefix = f"optimizer.{name}."
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def load_optimizer_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Continue from :func:`optimizer_state`."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = {number: slots_of(names[parameter], state) for number, parameter in enumerate(ordered)}
    packed = optimizer.state_dict()
    packed["state"] = {number: found for number, found in slots.items() if found}
    optimizer.load_state_dict(packed)


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

"""The gradient of all parameters together: its norm, and what is done to it before a step."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from motley.comm.reducer import by_type
from motley.errors import MotleyError
from motley.tasks.model import TaskModel


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar; not finite if any entry is not.

    Of sharded ones, of this rank's part.
    """
    return torch.nn.utils.get_total_norm(_gradients(parameters))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


@torch.no_grad()
def clip_factor(
    norm: Tensor, scale: float, most: float | None, correction: Tensor | None = None
) -> Tensor | None:
    """Return the factor, a scalar, that unscales and clips a gradient; None if there is none.

    Clips as torch.nn.utils.clip_grad_norm_ does; waits for nothing.

    Args:
        norm: of the gradients as they are, scaled; a scalar, the same on all ranks.
        scale: the loss scale in them. most: the norm to clip to, if any.
        correction: what else is in them, a scalar; None: nothing.
    """
    if scale == 1.0 and most is None and correction is None:
        return None
    factor = torch.full_like(norm, 1 / scale)
    if correction is not None:
        factor /= correction.to(norm)
        norm = norm / correction.to(norm)
    if most is not None:
        factor *= torch.clamp(most / (norm / scale + 1e-6), max=1.0)
    return factor


@torch.no_grad()
def unscale_and_clip(
    parameters: Sequence[Tensor],
    norm: Tensor,
    scale: float,
    most: float | None,
    correction: Tensor | None = None,
) -> None:
    """Multiply all gradients by :func:`clip_factor` in place, in one pass."""
    factor = clip_factor(norm, scale, most, correction)
    grads = _gradients(parameters)
    if factor is None or not grads:  # memory may have ended before there were any
        return
    # The factor has the widest type: in bf16 it would be wrong by up to 0.4 %.
    factor = factor.to(grads[0].device)
    for alike in by_type(grads):
        wide = alike[0].dtype in (torch.float32, torch.float64)
        torch._foreach_mul_(alike, factor.to(alike[0].dtype) if wide else factor.float())


@contextlib.contextmanager
def silenced(net: nn.Module, empty: bool) -> Iterator[None]:
    """A pass through a model, forward and backward; where it is of a rank without samples all
    gradients are zeros, whatever is computed: 0 times what is not finite would not be."""
    hooks: list[RemovableHandle] = []

    def silence(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    if empty:
        units = {net, *(part for part in net.modules() if isinstance(part, FSDPModule))}
        # FSDP gives a module the parameters that it computes with just before it does.
        hooks += [unit.register_forward_pre_hook(silence) for unit in units]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_types(model: TaskModel, known: Sequence[torch.dtype], engine: str, instead: str) -> None:
    """Raise MotleyError if a parameter that is trained has a type that an engine cannot add up.

    Args:
        known: the types that it can. engine: as a user names it. instead: what takes any type.
    """
    for name, parameter in model.net.named_parameters():
        if parameter.requires_grad and parameter.dtype not in known:
            others = name_types(known)
            raise MotleyError(
                f"{engine} adds up gradients of {others}, and {name} is of "
                f"{name_types([parameter.dtype])}: take {instead}, or make the parameter one of "
                f"{others}"
            )


def name_types(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of types, as in ``float32, bfloat16``."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

"""Finds the parameters and buffers that a forward pass changes, which no gradient of all ranks
does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from motley.errors import MotleyError
from motley.tasks.fingerprint import fingerprint
from motley.text import name_some

_UPDATE = (
    "update it by its gradient instead, as a codebook by a term of the loss, or keep that part of "
    "the model in eval mode"
)
_FIXES: dict[str, str] = {
    "max_norm": "leave out max_norm, and scale the rows that the layer returns",
    "instance_norm": "set track_running_stats=False, and it takes each sample's own statistics in "
    "evaluations too",
    "spectral_norm": "take torch.nn.utils.parametrizations.weight_norm or orthogonal, which are "
    "computed of the weight alone, or divide by torch.linalg.matrix_norm(weight, 2)",
}


class ForwardChanges:
    """The values of a network's parameters and buffers before some passes.

    Args:
        net: the network, whose values are fingerprints for parameters, and copies for buffers.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net, self._before = net, _values(net)

    def names(self, caches: bool) -> list[str]:
        """Return the parameters and buffers that have changed since.

        Args:
            caches: buffers count too that are in no checkpoint. Such a one may be a cache that the
                first pass has filled.
        """
        saved, now = self._net.state_dict().keys(), _values(self._net)
        return [
            name for name, value in now.items()
            if (caches or name in saved)
            and (name not in self._before or not _equal(self._before[name], value))
        ]  # fmt: skip


def check_renormalised(name: str, net: nn.Module) -> None:
    """Raise MotleyError if an embedding scales the rows that it reads, which a pass over two
    samples need not show.

    Args:
        name: of the task.
    """
    found = [path for path, part in net.named_modules() if getattr(part, "max_norm", None)]
    if found:
        raise changed_in_forward(name, net, [f"{path}.weight" for path in found])


def changed_in_forward(name: str, net: nn.Module, names: list[str]) -> MotleyError:
    """Return the error for tensors that a forward pass changes.

    Args:
        name: of the task.
    """
    causes = dict.fromkeys(_cause(net, each) for each in names)
    fix = "; ".join(_FIXES.get(cause, _UPDATE) for cause in causes)
    return MotleyError(
        f"a forward pass of {name} changes {name_some(names)}. Ranks have other "
        "samples, and not equally many passes: their models would become different ones, and no "
        f"rank's is that of one machine. Fix: {fix}"
    )


def _cause(net: nn.Module, name: str) -> str:
    """Return the key of :data:`_FIXES` for a tensor; empty for a module of the user's own."""
    path, _, last = name.rpartition(".")
    owner: Any = net.get_submodule(path)
    if getattr(owner, "max_norm", None):
        return "max_norm"
    if isinstance(owner, _InstanceNorm):
        return "instance_norm"
    hooks = (*owner._forward_pre_hooks.values(), owner)  # of the two ways that torch has
    if any(type(each).__name__ in ("SpectralNorm", "_SpectralNorm") for each in hooks):
        return "spectral_norm"
    return last if last in _FIXES else ""


@torch.no_grad()
def _values(net: nn.Module) -> dict[str, Tensor]:
    """Return fingerprints of parameters, of which a copy may not fit, and copies of buffers."""
    parameters = {
        key: fingerprint(each) for key, each in net.named_parameters() if not each.is_meta
    }
    buffers = {key: each.clone() for key, each in net.named_buffers() if not each.is_meta}
    return parameters | buffers


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())

"""Has an optimizer step on this rank's own part of each parameter, and know nothing of the others'.

Of DTensors each of its operations is dispatched by Python, which takes an AdamW of a ViT-B ten
times as long as the step itself (pytorch#134191).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motley.engines.rows import is_by_rows, own_rows, rows_as


class LocalShards:
    """Puts plain tensors, which share their memory, in the place of an optimizer's parameters.

    Args:
        optimizer: which does to a number what it does whatever the tensor around it, or to a row;
            it has taken no step yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole = [each for group in optimizer.param_groups for each in group["params"]]
        self._own = [nn.Parameter(each.detach().to_local()) for each in self._whole]
        self._exchange(self._whole, self._own)

    def with_gradients(self) -> Sequence[Tensor]:
        """The parts, each with its gradient."""
        with torch.no_grad():  # then a DTensor's part costs nothing
            for whole, own in zip(self._whole, self._own, strict=True):
                own.grad = None if whole.grad is None else own_rows(whole.grad)
        return self._own

    def zero_gradients(self) -> None:
        """Of both."""
        for each in (*self._whole, *self._own):
            each.grad = None

    @contextlib.contextmanager
    def put_together(self) -> Iterator[None]:
        """The optimizer has DTensors meanwhile, as what it keeps is saved and loaded."""
        self._exchange(self._own, self._whole)
        try:
            yield
        finally:
            self._exchange(self._whole, self._own)

    @torch.no_grad()
    def _exchange(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        instead = dict(zip(map(id, old), new, strict=True))
        for group in self._optimizer.param_groups:
            group["params"] = [instead[id(each)] for each in group["params"]]
        kept = list(self._optimizer.state.items())
        self._optimizer.state.clear()
        for parameter, slots in kept:
            like = instead[id(parameter)]
            self._optimizer.state[like] = {
                name: _like(value, parameter, like) for name, value in slots.items()
            }


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """What an optimizer keeps of a parameter, as it keeps it of the other."""
    if not isinstance(value, Tensor) or not is_by_rows(value.shape, old.shape):  # a step, say
        return value
    return rows_as(value, new) if isinstance(new, DTensor) else own_rows(value)

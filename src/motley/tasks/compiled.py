"""torch.compile of what a task computes: its blocks, or all of it with the loss.

Blocks of one class are compiled once, however many there are: a ViT-B in a third of the time, and
as fast. Between them gradients are sent as they become ready. Shapes are fixed but for the first,
which counts samples, so that a batch of another size compiles nothing anew.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MOST = 64  # ways of one piece of code: blocks of stages differ, and an evaluation has its own


class Compiled:
    """Parts of a model that are compiled when they first compute; :meth:`undo` makes them plain.

    Args:
        whole: one that computes all, by the names of its methods; it holds them from now on.
        blocks: in its place.
    """

    def __init__(self, whole: nn.Module, names: Iterable[str], blocks: Iterable[nn.Module]) -> None:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is computed plainly
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST)
        parts = [(block, "forward") for block in blocks]
        self._parts = parts or [(whole, name) for name in names]
        for module, name in self._parts:
            module.__dict__[name] = _any_count(torch.compile(getattr(module, name)))

    def undo(self) -> None:
        """Compute as before; what was compiled is let go of."""
        for module, name in self._parts:
            del module.__dict__[name]
        torch._dynamo.reset()


def _any_count(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for any number of samples."""

    def computed(*given: Any, **named: Any) -> Any:
        for tensor in tree_leaves((given, named)):
            if isinstance(tensor, Tensor) and tensor.dim() > 0:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compute(*given, **named)

    return computed

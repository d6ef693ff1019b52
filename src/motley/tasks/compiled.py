"""torch.compile of what a task computes: its blocks and what is around, or all with the loss.

Blocks of one class are compiled once, however many there are: a ViT-B in a third of the time, and
as fast. Between them gradients are sent as they become ready. What is around them, as a ViT's patch
embedding, last norm and head, is 1 % of its time. Shapes are fixed but for the first, which counts
samples, so that a batch of another size compiles nothing anew.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Compute = Callable[..., Any]

_MOST = 64  # ways of one piece of code: blocks of stages differ, and an evaluation has its own


class Compiled:
    """Parts of a model that are compiled when they first compute; :meth:`undo` makes them plain.

    Args:
        whole: one that computes all, by the names of its methods; it holds them from now on.
        blocks: in its place. around: with them; plain where they are given more than tensors.
    """

    def __init__(
        self,
        whole: nn.Module,
        names: Iterable[str],
        blocks: Iterable[nn.Module],
        around: Iterable[nn.Module],
    ) -> None:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is computed plainly
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST)
        self._before: list[tuple[nn.Module, str, Compute | None]] = []
        blocks = list(blocks)
        if not blocks:
            for name in names:
                self._put(whole, name, _any_count(torch.compile(getattr(whole, name))))
            return
        for module in blocks:
            self._put(module, "forward", _of_one_size(module.forward))
        for module in around:
            plain = module.forward
            self._put(module, "forward", _of_tensors(_of_one_size(plain), plain))

    def _put(self, module: nn.Module, name: str, compute: Compute) -> None:
        self._before.append((module, name, module.__dict__.get(name)))  # as it is recomputed, say
        module.__dict__[name] = compute

    def undo(self) -> None:
        """Compute as before; what was compiled is let go of."""
        for module, name, before in self._before:
            del module.__dict__[name]
            if before is not None:
                module.__dict__[name] = before
        torch._dynamo.reset()


def _any_count(compute: Compute) -> Compute:
    """The same, for any number of samples."""

    def computed(*given: Any, **named: Any) -> Any:
        _sizes_of_any_count((given, named))
        return compute(*given, **named)

    return computed


def _of_one_size(plain: Compute) -> Compute:
    """It, compiled for samples that are as large as the first; for any size where they are not.

    Blocks of all stages share their code, and torch takes for variable what differs from one call
    of a piece of code to the next: Swin's windows of any height and width kept it busy for minutes.
    """
    fixed, free = torch.compile(plain, dynamic=False), torch.compile(plain)
    first: list[list[torch.Size]] = []

    def computed(*given: Any, **named: Any) -> Any:
        sizes = _sizes_of_any_count((given, named))
        if not first:
            first.append(sizes)
        return (fixed if sizes == first[0] else free)(*given, **named)

    return computed


def _sizes_of_any_count(given: Any) -> list[torch.Size]:
    """Have torch take the tensors for of any number of samples; the shapes of a sample in each."""
    tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.dim()]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return [tensor.shape[1:] for tensor in tensors]


def _of_tensors(compute: Compute, plain: Compute) -> Compute:
    """The same, unless it is given something else too: what is in that, as the time of a forecast,
    would be compiled into it, anew for each."""

    def computed(*given: Any, **named: Any) -> Any:
        all_tensors = all(isinstance(each, Tensor) for each in (*given, *named.values()))
        return (compute if all_tensors else plain)(*given, **named)

    return computed

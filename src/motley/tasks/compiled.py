"""torch.compile of what a task computes: its blocks and what is around, or all with the loss.

Blocks of one class are compiled once, however many there are: a ViT-B in a third of the time, and
as fast. Between them gradients are sent as they become ready. What is around them, as a ViT's patch
embedding, last norm and head, is 1 % of its time. Shapes are fixed but for the first, which counts
samples, so that a batch of another size compiles nothing anew. Convolutions are the exception:
torch's kernels around them are slower for any number of samples than for a known one, a ResNet-50
by a fifth. So the numbers of samples that a plan has are compiled for themselves.
"""

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Compute = Callable[..., Any]

_MOST = 64  # ways of one piece of code: blocks of stages differ, and an evaluation has its own
_RARE = 2  # passes of unforeseen sizes in a row: the last batches of an epoch or an evaluation


class _Way(Enum):
    """How the parts compute a pass."""

    PLAIN = 0
    ONE_COUNT = 1  # compiled for its number of samples
    ANY_COUNT = 2


class Compiled:
    """Parts of a model that are compiled when they first compute; :meth:`undo` makes them plain.

    Args:
        whole: one that computes all, by the names of its methods; it holds them from now on.
        blocks: in its place. around: with them; plain where they are given more than tensors.
        counts: numbers of samples that are each compiled for themselves. A pass of another number
            is computed plainly, unless several follow one another. Empty: compile for any number.
    """

    def __init__(
        self,
        whole: nn.Module,
        names: Iterable[str],
        blocks: Iterable[nn.Module],
        around: Iterable[nn.Module],
        counts: Collection[int] = (),
    ) -> None:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is computed plainly
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST)
        self._before: list[tuple[nn.Module, str, Compute | None]] = []
        self._counts, self._others, self._way = frozenset(counts), 0, _Way.ANY_COUNT
        blocks = list(blocks)
        if not blocks:
            for name in names:
                self._put(whole, name, self._whole(getattr(whole, name)))
            return
        for module in blocks:
            self._put(module, "forward", self._of_one_size(module.forward))
        for module in around:
            plain = module.forward
            self._put(module, "forward", _of_tensors(self._of_one_size(plain), plain))

    def begin_pass(self, samples: int) -> None:
        """Choose how the parts compute the next pass, of this many samples."""
        if not self._counts:
            return
        if samples in self._counts:
            self._others, self._way = 0, _Way.ONE_COUNT
        else:
            self._others += 1
            self._way = _Way.PLAIN if self._others <= _RARE else _Way.ANY_COUNT

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

    def _whole(self, plain: Compute) -> Compute:
        """Return a compiled function; where its batch has any number of samples, for any."""
        fixed, free = torch.compile(plain, dynamic=False), torch.compile(plain)

        def computed(*given: Any, **named: Any) -> Any:
            if self._way is _Way.PLAIN:
                return plain(*given, **named)
            if self._way is _Way.ONE_COUNT:
                return fixed(*given, **named)
            _mark_counts((given, named))
            return free(*given, **named)

        return computed

    def _of_one_size(self, plain: Compute) -> Compute:
        """Return a function that is compiled for samples as large as the first; for any size where
        they are not.

        Blocks of all stages share their code, and torch takes for variable what differs from one
        call of a piece of code to the next: Swin's windows of any height and width kept it busy for
        minutes.
        """
        fixed, free = torch.compile(plain, dynamic=False), torch.compile(plain)
        first: list[list[torch.Size]] = []

        def computed(*given: Any, **named: Any) -> Any:
            if self._way is _Way.PLAIN:
                return plain(*given, **named)
            if self._way is _Way.ANY_COUNT:
                _mark_counts((given, named))
            sizes = [tensor.shape[1:] for tensor in _batched((given, named))]
            if not first:
                first.append(sizes)
            return (fixed if sizes == first[0] else free)(*given, **named)

        return computed


def _batched(given: Any) -> list[Tensor]:
    """Return the tensors among arguments that have a first dimension."""
    return [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.dim()]


def _mark_counts(given: Any) -> None:
    """Have torch take the first dimension of all tensors for variable."""
    for tensor in _batched(given):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _of_tensors(compute: Compute, plain: Compute) -> Compute:
    """The same, unless it is given something else too: what is in that, as the time of a forecast,
    would be compiled into it, anew for each."""

    def computed(*given: Any, **named: Any) -> Any:
        all_tensors = all(isinstance(each, Tensor) for each in (*given, *named.values()))
        return (compute if all_tensors else plain)(*given, **named)

    return computed

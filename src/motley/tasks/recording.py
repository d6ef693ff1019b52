"""Operations on tensors without numbers, written down, to be done for those that are asked for.

Each random one has a generator of its own, on the CPU, of the seed and of its place in the list:
numbers depend neither on devices, nor on how many ranks there are, nor on what else is asked for,
and all cores may draw at once.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from motley.data.order import seed_of

# Of what they change, these keep nothing.
_DRAWS = {"normal_", "uniform_", "zero_", "fill_", "_no_grad_trunc_normal_"}
_one_by_one = threading.Lock()  # what draws from torch's one generator


@dataclass(frozen=True)
class _Geometry:
    """How a tensor lies in its storage, which is known by a number."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Geometry":
        """Of one without numbers."""
        return cls(_storage(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(),
                   int(tensor.storage_offset()))  # fmt: skip

    def over(self, storages: dict[int, Any]) -> Tensor:
        """The same tensor, with numbers."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storages[self.storage], self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Operation:
    """What was done.

    Attributes:
        given: arguments, with a _Geometry in the place of a tensor without numbers.
        made: storages that it has made, by their place among the tensors that it gives.
        reads: storages that it needs. overwrites: one of which it leaves nothing; None: none.
    """

    func: Any
    given: tuple[Any, dict[str, Any]]
    made: dict[int, int]
    reads: frozenset[int]
    overwrites: int | None = None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in some values, in order."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


@dataclass
class Recording:
    """What was done to tensors without numbers.

    Attributes:
        seed: of what is drawn.
    """

    seed: int
    _done: list[_Operation] = field(default_factory=list)
    _touched: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _alive: list[Any] = field(default_factory=list)  # so that no number is given twice

    def add(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Any, changes: Sequence[Tensor]
    ) -> None:
        """Write an operation down, if it makes or changes anything.

        Args:
            args, kwargs: as it was called. found: what it gave, without numbers.
            changes: of what it was given.
        """
        given = tensors_of((args, kwargs))
        known = {_storage(each) for each in given if each.is_meta}
        made = {place: _storage(each) for place, each in enumerate(tensors_of(found))
                if _storage(each) not in known}  # fmt: skip
        changed = {_storage(each) for each in changes}
        if not made and not changed:
            return  # another look at the same numbers
        self._alive += [each.untyped_storage() for each in tensors_of(found)]
        for storage in {*made.values(), *changed}:
            self._touched[storage].append(len(self._done))
        kept = tree_map(_kept, (args, kwargs))
        whole = _overwritten(func, changes)
        self._done.append(_Operation(func, kept, made, frozenset(known), whole))

    def value(self, tensor: Tensor) -> Tensor:
        """The same tensor with its numbers, on the CPU, in memory of its own; one that has them is
        copied."""
        if not tensor.is_meta:
            return tensor.detach().clone()
        storages: dict[int, Any] = {}
        geometry = _Geometry.of(tensor)
        for place in sorted(self._needed(geometry.storage)):
            operation = self._done[place]
            args, kwargs = tree_map(
                lambda each: each.over(storages) if isinstance(each, _Geometry) else each,
                operation.given,
            )
            found = tensors_of(_drawn(operation.func, args, kwargs, seed_of(self.seed, place)))
            for which, storage in operation.made.items():
                storages[storage] = found[which].untyped_storage()
        value = geometry.over(storages)
        return value if value.nbytes == value.untyped_storage().nbytes() else value.clone()

    def _needed(self, storage: int) -> set[int]:
        """Places of the operations that its numbers depend on."""
        needed: set[int] = set()
        waiting = [(storage, len(self._done))]
        while waiting:
            which, before = waiting.pop()
            earlier = [place for place in self._touched[which] if place < before]
            for place in (*self._last(earlier, which), *earlier[:1]):  # the first makes it
                if place not in needed:
                    needed.add(place)
                    operation = self._done[place]
                    others = operation.reads - {operation.overwrites}
                    waiting += [(other, place) for other in others]
        return needed

    def _last(self, places: Sequence[int], storage: int) -> Iterator[int]:
        """Operations on a storage, the last first, until one that leaves nothing of those before:
        torch's modules draw numbers which most models draw anew."""
        for place in reversed(places):
            yield place
            if self._done[place].overwrites == storage:
                return


def _overwritten(func: Any, changes: Sequence[Tensor]) -> int | None:
    """The storage that an operation fills with numbers which depend on no others."""
    name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else func.__name__
    if name not in _DRAWS or len(changes) != 1:
        return None
    (tensor,) = changes
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return _storage(tensor) if whole else None


def _kept(value: Any) -> Any:
    """An argument, as it is now."""
    if isinstance(value, Tensor):
        return _Geometry.of(value) if value.is_meta else value.detach().clone()
    return value


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], seed: int) -> Any:
    """Do an operation, with random numbers of its own."""
    is_known = isinstance(func, torch._ops.OpOverload)
    if is_known and torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    if not is_known or any(each.name == "generator" for each in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
    with _one_by_one:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_rng_state(before)

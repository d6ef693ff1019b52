"""Deferred initialisation of a network's tensors.

A tensor "without values" is on the device ``meta`` and takes no memory. Operations on such tensors
are recorded while a network is built. The operations run later, when the values of a tensor are
requested.

Small tensors get their values at once. A model may initialise its parameters and buffers in any
way. Each random operation has its own generator on the CPU. The seed of the generator depends on
the run's seed and on the operation's place in the record. Values therefore depend neither on
devices, nor on the number of ranks, nor on the tensors that are requested. All cores may draw at
once.

Source of the idea: torchdistx.deferred_init.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from motley.data.source import make_seed

# These operations overwrite their tensor and keep none of its old numbers.
_DRAWS = {"normal_", "uniform_", "zero_", "fill_", "_no_grad_trunc_normal_"}
_one_by_one = threading.Lock()  # held by a thread that draws from torch's global generator


@dataclass(frozen=True)
class _Geometry:
    """The layout of a tensor in its storage: shape, strides and offset.

    A number identifies the storage.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "_Geometry":
        """Return the geometry of a tensor without values."""
        return cls(_storage(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(),
                   int(tensor.storage_offset()))  # fmt: skip

    def over(self, storages: dict[int, Any]) -> Tensor:
        """Return a tensor of this layout over a storage with values.

        Args:
            storages: storages with values, by their identifying number.
        """
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storages[self.storage], self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Operation:
    """A recorded operation.

    Attributes:
        func: the function of torch.
        given: positional and keyword arguments, with a _Geometry in place of each tensor without
            values.
        made: storage that the operation creates for each new tensor, by the tensor's index among
            the returned tensors.
        reads: storages that the operation's arguments use.
        overwrites: storage that the operation overwrites completely, or None.
    """

    func: Any
    given: tuple[Any, dict[str, Any]]
    made: dict[int, int]
    reads: frozenset[int]
    overwrites: int | None = None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def list_tensors(values: Any) -> list[Tensor]:
    """Return all tensors in nested containers, in order."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


@dataclass
class Recording:
    """A record of the operations on tensors without values.

    Attributes:
        seed: seed of the random numbers.
    """

    seed: int
    _done: list[_Operation] = field(default_factory=list)
    _touched: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _alive: list[Any] = field(default_factory=list)  # storages, so that no address is used twice

    def add(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Any, changes: Sequence[Tensor]
    ) -> None:
        """Record an operation if it makes or changes a tensor.

        Args:
            func: the operation.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            found: result of the call, whose tensors have no values.
            changes: arguments that the operation changes in place.
        """
        given = list_tensors((args, kwargs))
        known = {_storage(each) for each in given if each.is_meta}
        made = {place: _storage(each) for place, each in enumerate(list_tensors(found))
                if _storage(each) not in known}  # fmt: skip
        changed = {_storage(each) for each in changes}
        if not made and not changed:
            return  # a view of the same numbers
        self._alive += [each.untyped_storage() for each in list_tensors(found)]
        for storage in {*made.values(), *changed}:
            self._touched[storage].append(len(self._done))
        frozen = tree_map(_freeze_argument, (args, kwargs))
        whole = _overwritten(func, changes)
        self._done.append(_Operation(func, frozen, made, frozenset(known), whole))

    def value(self, tensor: Tensor) -> Tensor:
        """Run the recorded operations for a tensor, and return it with its values, on the CPU.

        The result shares no memory with other tensors. A tensor that has its values already is
        copied.
        """
        if not tensor.is_meta:
            return tensor.detach().clone()
        storages: dict[int, Any] = {}
        geometry = _Geometry.from_tensor(tensor)
        for place in sorted(self._needed(geometry.storage)):
            operation = self._done[place]
            args, kwargs = tree_map(
                lambda each: each.over(storages) if isinstance(each, _Geometry) else each,
                operation.given,
            )
            result = list_tensors(_drawn(operation.func, args, kwargs, make_seed(self.seed, place)))
            for which, storage in operation.made.items():
                storages[storage] = result[which].untyped_storage()
        value = geometry.over(storages)
        return value if value.nbytes == value.untyped_storage().nbytes() else value.clone()

    def _needed(self, storage: int) -> set[int]:
        """Return the indices of the recorded operations on which the values in a storage depend."""
        needed: set[int] = set()
        waiting = [(storage, len(self._done))]
        while waiting:
            which, before = waiting.pop()
            earlier = [place for place in self._touched[which] if place < before]
            for place in (*self._last(earlier, which), *earlier[:1]):  # the first creates it
                if place not in needed:
                    needed.add(place)
                    operation = self._done[place]
                    others = operation.reads - {operation.overwrites}
                    waiting += [(other, place) for other in others]
        return needed

    def _last(self, places: Sequence[int], storage: int) -> Iterator[int]:
        """Yield the operations on a storage backwards, until one overwrites the whole storage.

        Modules of torch draw initial values that most models overwrite. Operations before the
        overwrite need not run.

        Args:
            places: indices of the operations in the record, ascending.
            storage: identifying number of the storage.
        """
        for place in reversed(places):
            yield place
            if self._done[place].overwrites == storage:
                return


def _overwritten(func: Any, changes: Sequence[Tensor]) -> int | None:
    """Return the storage that an operation overwrites completely without reading it, or None."""
    name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else func.__name__
    if name not in _DRAWS or len(changes) != 1:
        return None
    (tensor,) = changes
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return _storage(tensor) if whole else None


def _freeze_argument(value: Any) -> Any:
    """Return a copy of an argument that later in-place operations do not change.

    A tensor without values becomes its geometry.
    """
    if isinstance(value, Tensor):
        return _Geometry.from_tensor(value) if value.is_meta else value.detach().clone()
    return value


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], seed: int) -> Any:
    """Run an operation, and return its result. Seed the random numbers of a random operation."""
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


_SMALL = 1024  # entries; a smaller tensor is created at once, for a model may read it
_META = torch.device("meta")
_HERE = ("cpu", "meta")
Built = TypeVar("Built")


def record(build: Callable[[], Built], seed: int) -> tuple[Built, Recording]:
    """Build a network whose larger tensors have no values yet, and return it with the recording.

    Args:
        build: function that builds the network.
        seed: seed of the values that are drawn later. Small tensors draw from torch's generator.

    Raises:
        NotImplementedError: an operation on a tensor cannot be deferred.
    """
    recording = Recording(seed)
    with _truncated_later(recording), _AsOnCpu(recording), _Recorder(recording):
        return build(), recording


@contextlib.contextmanager
def _truncated_later(recording: Recording) -> Iterator[None]:
    """Record the draw of a truncated normal distribution as one operation in a ``with`` block.

    Torch redraws until no value is too large. Without this block, each comparison would need the
    values during the recording.
    """
    own: Any = nn.init._no_grad_trunc_normal_

    def later(tensor: Tensor, *args: Any, generator: Any = None, **named: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            if tensor.is_meta:
                recording.add(own, (tensor, *args), named, tensor, [tensor])
            else:
                own(tensor, *args, generator=generator, **named)
        return tensor

    nn.init._no_grad_trunc_normal_ = later
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = own


class _AsOnCpu(TorchFunctionMode):
    """A mode that reports the device ``cpu`` for tensors that are still on the meta device.

    Many initialisation functions skip a tensor on the meta device.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of a call of torch, with the device ``cpu`` in place of ``meta``."""
        if func == _IS_META:
            return False
        result = None
        if func in _READERS and args[0].is_meta:
            with _disable_current_modes():  # these operations must not be recorded
                value = self._recording.value(args[0])
            result = func(value, *args[1:], **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        is_place = func == _DEVICE and result == _META
        return torch.device("cpu") if is_place else result


_IS_META, _DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_meta", "device"))
_READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations on tensors without values."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation of torch, or record it if it involves tensors without values."""
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            given = list_tensors((args, kwargs))
            if not given:
                return self._make(func, args, kwargs)
            if not any(each.is_meta for each in given):
                return func(*args, **kwargs)
            return self._later(func, args, kwargs)

    def _later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") is not None:
            if torch.device(kwargs["device"]).type not in _HERE:
                raise NotImplementedError(f"{func} on {kwargs['device']} cannot be done later")
            kwargs = {**kwargs, "device": torch.device("cpu")}
        changes = _changed(func, args, kwargs)
        if any(not each.is_meta for each in changes):
            return self._now(func, args, kwargs)
        place = {"device": _META} if kwargs.get("device") is not None else {}
        try:
            result = func(*tree_map(_without_numbers, args),
                         **{**tree_map(_without_numbers, kwargs), **place})  # fmt: skip
        except (NotImplementedError, RuntimeError):  # the operation depends on numbers
            return self._now(func, args, kwargs)
        self._recording.add(func, args, kwargs, result, changes)
        return result

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = torch.device(kwargs.get("device") or "cpu").type
        takes = any(argument.name == "device" for argument in func._schema.arguments)
        if not takes or device not in _HERE:
            return func(*args, **kwargs)
        if device == "meta":  # torch itself wraps a number that stands beside a tensor
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            result = func(*args, **{**kwargs, "device": _META})
        except (NotImplementedError, RuntimeError):
            return func(*args, **kwargs)
        if sum(each.numel() for each in list_tensors(result)) < _SMALL:
            return func(*args, **kwargs)
        self._recording.add(func, args, kwargs, result, ())
        return result

    def _now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(each.is_meta for each in _changed(func, args, kwargs)):
            raise NotImplementedError(f"{func} cannot be done later")
        args, kwargs = tree_map(self._with_numbers, (args, kwargs))
        return func(*args, **kwargs)

    def _with_numbers(self, value: Any) -> Any:
        is_empty = isinstance(value, Tensor) and value.is_meta
        return self._recording.value(value) if is_empty else value


def _without_numbers(value: Any) -> Any:
    return value.to(_META) if isinstance(value, Tensor) else value


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments of an operation that the operation changes in place."""
    result: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            result += list_tensors(given)
    return result

"""Deferred initialisation: what is done to tensors while a network is built, to be done later.

Tensors of some size are made on the device ``meta``, without memory, and what is done to them is
recorded; of those that are asked for it is then done for real. So any model's own way to initialise
holds, buffers included. Source of the idea: torchdistx.deferred_init.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from motley.tasks.recording import Recording, tensors_of

_SMALL = 1024  # numbers; a smaller tensor is made at once, for it may be read while building
_META = torch.device("meta")
_HERE = ("cpu", "meta")
Built = TypeVar("Built")


def record(build: Callable[[], Built], seed: int) -> tuple[Built, Recording]:
    """Build a network whose tensors of some size have no numbers yet.

    Args:
        seed: of what is drawn later; small tensors draw from torch's generator.

    Raises:
        NotImplementedError: something is done to a tensor that cannot be done later.
    """
    recording = Recording(seed)
    with _truncated_later(recording), _AsOnCpu(recording), _Recorder(recording):
        return build(), recording


@contextlib.contextmanager
def _truncated_later(recording: Recording) -> Iterator[None]:
    """Torch draws a truncated normal distribution until no number is too large: it is one operation
    here, or each look at the numbers would have to draw them."""
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
    """Who asks where a tensor is hears that it is where it is going to be: much of torch does
    nothing to one that has no memory."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A function of torch's, or a look at an attribute."""
        if func == _IS_META:
            return False
        found = None
        if func in _READERS and args[0].is_meta:
            with _disable_current_modes():  # nothing of this is written down
                value = self._recording.value(args[0])
            found = func(value, *args[1:], **(kwargs or {}))
        else:
            found = func(*args, **(kwargs or {}))
        is_place = func == _DEVICE and found == _META
        return torch.device("cpu") if is_place else found


_IS_META, _DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_meta", "device"))
_READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One operation."""
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            given = tensors_of((args, kwargs))
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
            found = func(*tree_map(_without_numbers, args),
                         **{**tree_map(_without_numbers, kwargs), **place})  # fmt: skip
        except (NotImplementedError, RuntimeError):  # it depends on numbers
            return self._now(func, args, kwargs)
        self._recording.add(func, args, kwargs, found, changes)
        return found

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = torch.device(kwargs.get("device") or "cpu").type
        takes = any(argument.name == "device" for argument in func._schema.arguments)
        if not takes or device not in _HERE:
            return func(*args, **kwargs)
        if device == "meta":  # torch itself puts a number beside a tensor
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            found = func(*args, **{**kwargs, "device": _META})
        except (NotImplementedError, RuntimeError):
            return func(*args, **kwargs)
        if sum(each.numel() for each in tensors_of(found)) < _SMALL:
            return func(*args, **kwargs)
        self._recording.add(func, args, kwargs, found, ())
        return found

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
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_of(given)
    return found

"""Builders of a task's network, as a whole or block by block.

A network that is built block by block has no initial values at first. Its tensors are on the
device ``meta``, so no rank needs memory for the whole model.

Until a network has its initial values it may be *folded*: all blocks of a kind use the parameters
of the first block of that kind. A folded network takes as much compute time and activation memory
as the whole network. A task can therefore be checked, timed and planned with the values of one
block of each kind.
"""

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from motley.config.options import Config
from motley.errors import MotleyError
from motley.tasks.deferred import Recording, record
from motley.tasks.ghost_batch_norm import batch_norms
from motley.tasks.net import build_net, get_kind, prepared
from motley.tasks.task import Task

_THREADS = 8  # threads that draw, one tensor each, about 100 million numbers per second


@dataclass
class _Held:
    """A parameter or buffer as it was when the network was built.

    Attributes:
        tensor: a tensor on the device ``meta``, or a small tensor with its values.
        places: each module that holds the tensor, with the module's dictionary of parameters or
            buffers and the key in it. A tied tensor has several places.
    """

    tensor: Tensor
    places: list[tuple[nn.Module, dict[str, Tensor | None], str]] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor in all modules that hold it."""
        for _, table, name in self.places:
            table[name] = tensor


class BlockByBlock:
    """A builder that fills a network with its initial values, block by block.

    Args:
        net: network built by :func:`motley.tasks.deferred.record`.
        recording: the recording that :func:`motley.tasks.deferred.record` returned with the
            network.
        blocks: modules by name. Each is sharded and recomputed as one unit.
    """

    def __init__(
        self, net: nn.Module, recording: Recording, blocks: Mapping[str, nn.Module]
    ) -> None:
        self._recording, self._blocks = recording, blocks
        self._held: dict[int, _Held] = {}
        for module in net.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        held = self._held.setdefault(id(tensor), _Held(tensor))
                        held.places.append((module, table, name))  # type: ignore[arg-type]
        self._waiting = dict(self._held)  # tensors that have no numbers yet
        self._drawing: dict[int, Future[Tensor]] = {}
        self._threads = ThreadPoolExecutor(
            min(_THREADS, len(os.sched_getaffinity(0))), "initial numbers"
        )

    def parameters(self) -> list[Tensor]:
        """Return the current parameters of the network, in order.

        The list has one entry per parameter. While the network is folded, the entry may be a
        parameter of another block, of the same shape.
        """
        return [
            table[name]  # type: ignore[misc]
            for _, table, name in (held.places[0] for held in self._held.values())
            if isinstance(table[name], nn.Parameter)
        ]

    def fold(self, device: torch.device) -> None:
        """Make all blocks of a kind compute with the tensors of the first block of that kind.

        The tensors of each first block, and all tensors outside of blocks, get initial values.

        Args:
            device: device of the values.
        """
        instead: dict[int, int] = {}
        first: dict[Hashable, list[int]] = {}
        for block in self._blocks.values():
            own, kind = self._only_in(block), get_kind(block)
            like = first.setdefault(kind, own)
            if like is not own and len(like) == len(own):
                instead |= dict(zip(own, like, strict=True))
        drawn = [key for key in self._held if key not in instead]
        values = self._threads.map(
            self._recording.value, [self._held[key].tensor for key in drawn]
        )  # fmt: skip
        made = {
            key: _ready(value, self._held[key], device)
            for key, value in zip(drawn, values, strict=True)
        }
        for key, held in self._held.items():
            held.put(made[instead.get(key, key)])

    @contextlib.contextmanager
    def folded(self, device: torch.device) -> Iterator[None]:
        """Fold the network in a ``with`` block; see :meth:`fold`."""
        self.fold(device)
        try:
            yield
        finally:
            self.unfold()

    def narrow(self, dtype: torch.dtype) -> None:
        """Convert the parameters of the folded network to a 16-bit dtype.

        The folded network then takes the time of a network whose engine gathers 16-bit parameters.
        """
        made: dict[int, Tensor] = {}
        for held in self._held.values():
            _, table, name = held.places[0]
            if isinstance(now := table[name], nn.Parameter):
                if id(now) not in made:
                    made[id(now)] = nn.Parameter(now.detach().to(dtype), now.requires_grad)
                held.put(made[id(now)])

    def unfold(self) -> None:
        """Discard the tensors of the folded network, and restore the tensors without values."""
        for held in self._waiting.values():
            held.put(held.tensor)

    def fill(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        """Give initial values, on a device, to the tensors of modules that have no values yet."""
        keys = {
            id(tensor): None
            for part in parts for module in part.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if id(tensor) in self._waiting
        }  # fmt: skip
        for key in keys:
            self._draw_ahead(key)
            held = self._waiting.pop(key)
            held.put(_ready(self._drawing.pop(key).result(), held, device))
        if not self._waiting:
            self._threads.shutdown()

    def _draw_ahead(self, key: int) -> None:
        """Start threads that compute the values of a tensor and of the next tensors in the order.

        Args:
            key: ``id()`` of the tensor.
        """
        order = list(self._waiting)
        ahead = order[order.index(key) :][: 2 * _THREADS]
        for each in ahead:
            if each not in self._drawing:
                tensor = self._waiting[each].tensor
                self._drawing[each] = self._threads.submit(self._recording.value, tensor)

    def _only_in(self, block: nn.Module) -> list[int]:
        """Return the ids of the tensors that no module outside of the block holds."""
        inside = {id(module) for module in block.modules()}
        return [
            key for key in _list_tensors(block)
            if all(id(module) in inside for module, _, _ in self._held[key].places)
        ]  # fmt: skip


def _ready(value: Tensor, held: _Held, device: torch.device) -> Tensor:
    """Return values on a device, as a parameter if ``held`` is a parameter, else as a buffer.

    A new parameter gets the attributes that the model has set on the old parameter.
    """
    if not isinstance(held.tensor, nn.Parameter):
        return value.to(device)
    made = nn.Parameter(value.to(device), requires_grad=held.tensor.requires_grad)
    made.__dict__.update(held.tensor.__dict__)  # attributes that a model has set on the parameter
    return made


def _list_tensors(block: nn.Module) -> Iterator[int]:
    """Return an iterator over the ids of a block's tensors. A tied tensor occurs once."""
    result = (
        id(tensor)
        for module in block.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    return iter(dict.fromkeys(result))


LARGE = 1_000_000_000  # parameters; the same on all hosts, whatever their memory
_COUNTED = LARGE // 3  # parameters drawn before all are counted


class _Large(BaseException):
    """An exception that reports that the model has many parameters.

    The class derives from BaseException, so that a task's ``except Exception`` does not catch it.
    """


def build(task: Task, config: Config) -> tuple[nn.Module, BlockByBlock | None]:
    """Return the task's network, and the builder that fills the network with initial values.

    The builder is None if the network has its values already. The option ``--build`` selects
    whether the network is built as a whole or block by block.

    Raises:
        MotleyError: ``--build blocks`` is given, and the network cannot be built that way.
    """
    if config.build == "blocks":
        if given := _begins_with_weights(task, config):
            raise MotleyError(
                f"--build blocks draws random initial weights, and {given} loads other weights; "
                "leave out one of the two"
            )
        _open_data(task)
        try:
            return _by_blocks(task, config)
        except (NotImplementedError, RuntimeError) as error:
            text = " ".join(str(error).split())[:200]
            raise MotleyError(
                f"--build blocks: the model of {type(task).__name__} cannot be built on the meta "
                f"device, without values ({text}); take --build whole"
            ) from error
    if config.build == "whole" or _begins_with_weights(task, config):
        return build_net(task, config), None
    try:
        return _build_small(task, config), None
    except _Large:
        _open_data(task)
    try:
        net, by_blocks = _by_blocks(task, config)
    except (NotImplementedError, RuntimeError, MotleyError):  # all ranks raise it
        return build_net(task, config), None
    if sum(each.numel() for each in net.parameters()) > LARGE:
        return net, by_blocks
    return build_net(task, config), None


def _begins_with_weights(task: Task, config: Config) -> str:
    """Return the option that names pretrained weights for the task, as a user writes the option.

    Return an empty string if the task starts with random weights.
    """
    if config.initial_checkpoint is not None:
        return "--initial-checkpoint"
    return "--pretrained" if task.begins_with_weights else ""


def _build_small(task: Task, config: Config) -> nn.Module:
    numbers = 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal numbers
        numbers += 0 if parameter is None else parameter.numel()
        if numbers > _COUNTED:
            raise _Large

    hook = register_module_parameter_registration_hook(count)
    try:
        return build_net(task, config)
    finally:
        hook.remove()


def _open_data(task: Task) -> None:
    """Open the data before the network is recorded.

    ``model()`` may open the data. If it did so during the recording, the tensors of the data would
    have no values.
    """
    for held_out in (False, True):
        task.data(held_out)


def _by_blocks(task: Task, config: Config) -> tuple[nn.Module, BlockByBlock]:
    torch.manual_seed(config.seed)
    net, recording = record(task.model, config.seed)
    if norms := batch_norms(net):
        raise MotleyError(
            f"--build blocks: the model has a batch norm ({next(iter(norms))}), which this option "
            "does not support; take --build whole"
        )
    for path, part in net.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = ".".join(filter(None, (path, name)))
                raise NotImplementedError(
                    f"{where} is a tensor, and neither a parameter nor a buffer"
                )
    net = prepared(net, task, config)
    return net, BlockByBlock(net, recording, task.blocks(net))

"""The FSDP engine: torch's fully_shard, a few blocks at a time, with unequal shares.

Each rank keeps a shard of every parameter, of its gradient and of the optimizer's state. The
parameters of blocks are gathered before the blocks compute, and their gradients are
reduce-scattered afterwards. Every micro-batch therefore communicates, and all ranks have the same
number of micro-batches. The optimizer steps this rank's shard of each parameter as a plain tensor.
For a DTensor, Python dispatches each operation. For a ViT-B, this dispatch takes ten times as long
as the step of AdamW itself (pytorch#134191).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from motley.data.source import Batch
from motley.engines.base import check_types, name_types, silenced
from motley.engines.named_state import (
    State,
    find_parameter,
    is_by_rows,
    on_cpu,
    own_rows,
    rows_as,
    rows_of_rank,
    snapshot,
)
from motley.engines.optimizer import Sharding, is_elementwise
from motley.engines.optimizers import find_row
from motley.engines.out_of_memory import no_second_try, out_of_memory
from motley.engines.protocol import EngineContext
from motley.engines.step import SynchronousEngine
from motley.engines.strategies import check_offload
from motley.engines.strategies.fsdp import TRAITS, FsdpOptions
from motley.errors import MotleyError
from motley.tasks.check import found_unused, refuse_unused, without_gradient
from motley.tasks.model import AUTOCAST, TaskModel, common_type
from motley.text import name_some


class LocalShards:
    """Plain tensors that replace the DTensors of an optimizer, and share their memory.

    Args:
        optimizer: an optimizer that steps each element, or each row, independently of the rest of
            its tensor.

    Attributes:
        whole: the DTensors.
        own: this rank's shard of each DTensor as a plain tensor, in the same order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.whole = [each for group in optimizer.param_groups for each in group["params"]]
        self.own = [nn.Parameter(each.detach().to_local()) for each in self.whole]
        self._exchange(self.whole, self.own)

    def with_gradients(self) -> Sequence[Tensor]:
        """Return this rank's shards as plain tensors, whose ``grad`` is this rank's gradient."""
        with torch.no_grad():  # makes to_local() of a DTensor cheap
            for whole, own in zip(self.whole, self.own, strict=True):
                own.grad = None if whole.grad is None else own_rows(whole.grad)
        return self.own

    def zero_gradients(self) -> None:
        """Set the gradients of the DTensors and of the plain tensors to None."""
        for each in (*self.whole, *self.own):
            each.grad = None

    @contextlib.contextmanager
    def put_together(self) -> Iterator[None]:
        """Give the optimizer its DTensors in a ``with`` block, to save or load its state."""
        self._exchange(self.own, self.whole)
        try:
            yield
        finally:
            self._exchange(self.whole, self.own)

    @torch.no_grad()
    def _exchange(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        instead = dict(zip(map(id, old), new, strict=True))
        for group in self._optimizer.param_groups:
            group["params"] = [instead[id(each)] for each in group["params"]]
        saved = list(self._optimizer.state.items())
        self._optimizer.state.clear()
        for parameter, slots in saved:
            like = instead[id(parameter)]
            self._optimizer.state[like] = {
                name: _like(value, parameter, like) for name, value in slots.items()
            }


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """Convert a value of the optimizer's state from a plain shard to a DTensor, or back.

    Values that are not shaped like the parameter stay as they are.

    Args:
        value: a value of the optimizer's state for one parameter.
        old: the parameter in the form of ``value``.
        new: the parameter in the form of the result.
    """
    if not isinstance(value, Tensor) or not is_by_rows(value.shape, old.shape):  # such as a step
        return value
    return rows_as(value, new) if isinstance(new, DTensor) else own_rows(value)


_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_parts(net: nn.Module, engine: str, instead: str) -> None:
    """Raise MotleyError if the parameters of a network cannot be cut into rows.

    Args:
        net: the network.
        engine: name of the engine for the message.
        instead: name of an engine that accepts any parameter, for the message.
    """
    if scalars := [name for name, each in net.named_parameters() if each.dim() == 0]:
        raise MotleyError(
            f"{engine} cuts parameters into rows, and {name_some(scalars)} has no dimension: give "
            f"it the shape [1], as nn.Parameter(torch.ones(1)) has, or take {instead}"
        )
    kinds = {each.dtype for each in net.parameters()}
    if len(kinds) > 1:
        raise MotleyError(
            f"{engine} gathers parameters of one type, and the model has several "
            f"({name_types(sorted(kinds, key=str))}): take {instead}, or make all parameters "
            "float32"
        )


def shard_net(
    net: nn.Module,
    blocks: Sequence[nn.Module],
    fill: Callable[..., object],
    wire: torch.dtype | None,
    **options: Any,
) -> Callable[[nn.Module], object]:
    """Split a network into shards: first the blocks, a few at a time, then the other modules.

    Args:
        net: the network.
        blocks: blocks of the network, in order.
        fill: function that gives the parameters of some modules their values. Its arguments are the
            modules that are sharded next.
        wire: dtype in which gradients are reduce-scattered; None: float64 for float64 parameters,
            else float32.
        options: arguments for torch's fully_shard, and ``param_dtype`` for its
            MixedPrecisionPolicy.

    Returns:
        A function that shards another module in the same way.
    """
    is_double = any(each.dtype == torch.float64 for each in net.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=options.pop("param_dtype", None),
        reduce_dtype=wire or (torch.float64 if is_double else torch.float32),
        cast_forward_inputs=False,
    )
    shard = partial(fully_shard, mp_policy=policy, **options)
    assert TRAITS.gathered is not None
    numbers = [sum(p.numel() for p in each.parameters()) for each in blocks]
    for piece in map(blocks.__getitem__, TRAITS.gathered.cut(numbers)):
        fill(*piece)
        # A single block is passed as a module, not as a list.
        shard(piece[0] if len(piece) == 1 else piece)
    fill(net)
    shard(net)
    return shard


def share_tensor(value: Tensor, own: Tensor | None) -> Tensor:
    """Return this rank's shard of a whole tensor, cut in the same way as a parameter.

    Args:
        value: the whole tensor, equal on all ranks.
        own: the parameter to which the tensor belongs. If it is None or not sharded, the whole
            tensor is returned.
    """
    if not isinstance(own, DTensor) or not is_by_rows(value.shape, own.shape):
        return value
    part = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return part.to(own.device)


def reshard(net: nn.Module) -> None:
    """Free gathered parameters after a forward pass that no backward pass has followed."""
    for part in net.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class BlockCalls:
    """A record of the blocks that a forward pass has called.

    All ranks must gather each block together, so a rank must not leave out a block.

    Args:
        blocks: the blocks by name.

    Attributes:
        modules: the blocks, in order.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.modules, self._names = list(blocks.values()), list(blocks)
        self._called: set[str] = set()
        for name, block in blocks.items():
            block.register_forward_pre_hook(partial(self._note, name))

    def _note(self, name: str, *_: Any) -> None:
        self._called.add(name)

    def start(self) -> None:
        """Start to record the calls of a new forward pass."""
        self._called.clear()

    def list_left_out(self) -> list[str]:
        """Return the names of the blocks that the forward pass has not called so far."""
        return [name for name in self._names if name not in self._called]


class FsdpEngine(SynchronousEngine):
    """The engine that wraps torch's fully_shard.

    FSDP averages gradients over W ranks, so each loss has a factor W/N for N samples. Gradients are
    reduce-scattered in the wire mode's dtype. Parameters are gathered in 16 bits if all ranks
    compute in the same 16-bit type, otherwise in fp32. Gathering in 16 bits also rounds values that
    autocast would not round, such as a norm's scale.
    """

    traits = TRAITS
    equal_micro_steps = True
    replicated = False

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        own = context.config.group(FsdpOptions)
        check_offload(own.offload, context)
        refuse_unused(model, "--strategy fsdp")
        check_types(model, _TYPES, "--strategy fsdp", "--strategy ddp")
        check_parts(model.net, "--strategy fsdp", "--strategy ddp")
        if context.config.clip_grad is not None and context.config.clip_mode == "agc":
            raise MotleyError(
                "--clip-mode agc needs whole parameters, and --strategy fsdp gives each rank a "
                "part of each parameter: take --strategy ddp, or --clip-mode norm"
            )
        self.loss_weight = context.size
        options: dict[str, Any] = {"reshard_after_forward": own.reshard_after_forward}
        if own.offload == "parameters":
            options["offload_policy"] = CPUOffloadPolicy()
        self._blocks = BlockCalls(model.task.blocks(model.net))
        shard = shard_net(
            model.net, self._blocks.modules, model.fill, AUTOCAST[context.plan.wire.dtype],
            mesh=init_device_mesh(context.device.type, (context.size,)),
            param_dtype=common_type(model.task, context.precisions), **options,
        )  # fmt: skip
        self._sharding = Sharding("--strategy fsdp", context.size, shard, self._share)
        super().__init__(model, context)  # creates the optimizer, after parameters are sharded
        traits, by_rows = self.optimizer_traits, find_row(context.config.opt) > 1
        plain = not (traits.wraps or traits.nests) and (by_rows or is_elementwise(context.config))
        self._shards = LocalShards(self.optimizer) if plain else None

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        try:
            with silenced(self._model.net, not len(batch)):
                self._blocks.start()
                losses, total = self._losses(self._model, batch)
                self._check_called()
                self._backward(total * (self.scale.value * self.loss_weight / self._nominal_weight))
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                gathers = self._context.config.group(FsdpOptions).reshard_after_forward
                instead = "--strategy ddp" if gathers else "--reshard-after-forward"
                no_second_try(error, self.device, self.traits.words, instead)
            raise
        if any(each.grad is None for each in self._parameters):
            # The other ranks wait for gradients that this rank has not scattered.
            raise found_unused(self._model, "--strategy fsdp", without_gradient(self._model.net))
        self.clock.lap("compute", ready=last)
        return losses.detach()

    def _check_called(self) -> None:
        """Raise MotleyError if the forward pass has not called a block of the model.

        All ranks must gather each block together.
        """
        if left_out := self._blocks.list_left_out():
            raise found_unused(self._model, "--strategy fsdp", left_out)

    def _stepped(self) -> Sequence[Tensor]:
        return self._shards.with_gradients() if self._shards else super()._stepped()

    def _zero_gradients(self) -> None:
        if self._shards:
            self._shards.zero_gradients()
        else:
            super()._zero_gradients()

    def _norm(self, norms: Tensor) -> Tensor:
        return norms.square().sum().sqrt()  # each rank has the norm of its part

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the average of the parameters as the model's parameters in a ``with`` block."""
        reshard(self._model.net)
        try:
            with super().averaged():
                yield
        finally:
            reshard(self._model.net)

    def _global_state(self) -> State:
        first = self._context.rank == 0
        with self._put_together():
            state = self._held_state(snapshot if first else on_cpu)
        return state if first else State()

    def _load_global(self, state: State) -> None:
        with self._put_together():
            super()._load_global(self._share(self._model.net, state))

    def _rows(self) -> State:
        cut: set[int] = set()

        def keep(value: Tensor) -> Tensor:
            own = snapshot(value.to_local() if isinstance(value, DTensor) else value)
            if isinstance(value, DTensor):
                cut.add(id(own))
            return own

        with self._put_together():
            state = self._held_state(keep)
        first = self._context.rank == 0
        tensors = {key: each for key, each in state.tensors.items() if first or id(each) in cut}
        return State(tensors, state.plain)

    def get_rows(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the range of rows of a whole tensor that this rank loads. None: all rows."""
        own = find_parameter(name, self._model.net)
        if not isinstance(own, DTensor) or not is_by_rows(shape, own.shape):
            return None
        return rows_of_rank(shape[0], self._context.rank, self._context.size)

    def _load_rows(self, state: State) -> None:
        # The model is loaded first, to free its tensors before those of the optimizer come.

        def shared(kinds: Sequence[str]) -> State:
            result = {}
            for name, value in state.tensors.items():
                if name.partition(".")[0] in kinds:
                    result[name] = self._as_held(value, find_parameter(name, self._model.net))
            return State(result, state.plain)

        with self._put_together():
            self._load_model(shared(("model", "ema", "ema_numbers")))
            self.memory.load(shared(("optimizer",)))

    def _as_held(self, value: Tensor, own: Tensor | None) -> Tensor:
        """Return a tensor in the form in which this rank holds its parameter.

        If the parameter ``own`` is a DTensor, the rows ``value`` become a DTensor, too.
        """
        if not isinstance(own, DTensor) or not is_by_rows(value.shape, own.to_local().shape):
            return value
        return rows_as(value.to(own.device), own)

    def _put_together(self) -> contextlib.AbstractContextManager[None]:
        """Give the optimizer its DTensors in a ``with`` block."""
        return self._shards.put_together() if self._shards else contextlib.nullcontext()

    def _share(self, net: nn.Module, state: State) -> State:
        """Return a state in which each whole tensor is cut to this rank's shard.

        A tensor is sharded in the same way as its parameter in ``net``.
        """
        tensors = {
            key: share_tensor(value, find_parameter(key, net))
            for key, value in state.tensors.items()
        }
        return State(tensors, state.plain)

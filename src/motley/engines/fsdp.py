"""The FSDP engine: torch's fully_shard, a few blocks at a time, with unequal shares.

Each rank keeps a part of every parameter, of its gradient and of the optimizer's state. The
parameters of blocks are gathered before the blocks compute, and their gradient is scattered
afterwards. Every micro-batch therefore communicates, and all ranks have the same number of
micro-batches. The optimizer steps this rank's own part of each parameter as a plain tensor. For a
DTensor, Python dispatches each operation, which takes ten times as long as the step of AdamW for a
ViT-B itself (pytorch#134191).
"""

import contextlib
from collections.abc import Iterator, Sequence
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
    """Plain tensors in place of an optimizer's DTensors, with which they share memory.

    Args:
        optimizer: optimizer that steps each number, or each row, independently of the rest of the
            tensor. The optimizer has taken no step yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole = [each for group in optimizer.param_groups for each in group["params"]]
        self._own = [nn.Parameter(each.detach().to_local()) for each in self._whole]
        self._exchange(self._whole, self._own)

    def with_gradients(self) -> Sequence[Tensor]:
        """Return the parts, each with its gradient."""
        with torch.no_grad():  # makes to_local() of a DTensor cheap
            for whole, own in zip(self._whole, self._own, strict=True):
                own.grad = None if whole.grad is None else own_rows(whole.grad)
        return self._own

    def zero_gradients(self) -> None:
        """Drop the gradients of both DTensors and plain tensors."""
        for each in (*self._whole, *self._own):
            each.grad = None

    @contextlib.contextmanager
    def put_together(self) -> Iterator[None]:
        """Give the optimizer DTensors for the time of the context, to save or load its state."""
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
        saved = list(self._optimizer.state.items())
        self._optimizer.state.clear()
        for parameter, slots in saved:
            like = instead[id(parameter)]
            self._optimizer.state[like] = {
                name: _like(value, parameter, like) for name, value in slots.items()
            }


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """Convert an optimizer's value for one parameter to the form of another parameter."""
    if not isinstance(value, Tensor) or not is_by_rows(value.shape, old.shape):  # such as a step
        return value
    return rows_as(value, new) if isinstance(new, DTensor) else own_rows(value)


_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FsdpEngine(SynchronousEngine):
    """The engine that wraps torch's fully_shard. Implements Engine and HoldsParts.

    FSDP averages gradients over ranks, so each loss has a factor W/N. Gradients are scattered in
    the wire mode's dtype. Parameters are gathered in 16 bits if all ranks compute in the same
    16-bit type, otherwise in fp32. In 16 bits, values are rounded that autocast would not round,
    such as a norm's scale.
    """

    traits = TRAITS
    equal_micro_steps = True
    replicated = False

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        own = context.config.group(FsdpOptions)
        check_offload(own.offload, context)
        refuse_unused(model, "--strategy fsdp")
        check_types(model, _TYPES, "--strategy fsdp", "--strategy ddp")
        if scalars := [name for name, each in model.net.named_parameters() if each.dim() == 0]:
            raise MotleyError(
                f"--strategy fsdp cuts parameters into rows, and {name_some(scalars)} has none: "
                "give it the shape [1], as nn.Parameter(torch.ones(1)) has, or take --strategy ddp"
            )
        if context.config.clip_grad is not None and context.config.clip_mode == "agc":
            raise MotleyError(
                "--clip-mode agc needs whole parameters, and --strategy fsdp gives each rank a "
                "part of them: take --strategy ddp, or --clip-mode norm"
            )
        kinds = {each.dtype for each in model.net.parameters()}
        if len(kinds) > 1:
            raise MotleyError(
                "--strategy fsdp gathers parameters of one type, and the model has "
                f"{name_types(sorted(kinds, key=str))}: take --strategy ddp, or make them all "
                "float32"
            )
        self.loss_weight = context.size
        self._mesh = init_device_mesh(context.device.type, (context.size,))
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=common_type(model.task, context.precisions),
                reduce_dtype=AUTOCAST[context.plan.wire.dtype]
                or (torch.float64 if torch.float64 in kinds else torch.float32),
                cast_forward_inputs=False,
            ),
            "reshard_after_forward": own.reshard_after_forward,
        }
        if own.offload == "parameters":
            options["offload_policy"] = CPUOffloadPolicy()
        self._sharding = Sharding(
            "--strategy fsdp", context.size, lambda net: fully_shard(net, **options), self._share
        )
        self._blocks = model.task.blocks(model.net)
        self._called: set[str] = set()  # blocks that the current pass has called
        for name, block in self._blocks.items():
            block.register_forward_pre_hook(partial(_note_call, self._called, name))
        blocks = list(self._blocks.values())
        assert self.traits.gathered is not None
        numbers = [sum(p.numel() for p in each.parameters()) for each in blocks]
        for piece in map(blocks.__getitem__, self.traits.gathered.cut(numbers)):
            model.fill(*piece)
            # A single block is passed as a module, not as a list.
            fully_shard(piece[0] if len(piece) == 1 else piece, **options)
        model.fill(model.net)
        fully_shard(model.net, **options)
        super().__init__(model, context)  # creates the optimizer, after parameters are sharded
        traits, by_rows = self.optimizer_traits, find_row(context.config.opt) > 1
        plain = not (traits.wraps or traits.nests) and (by_rows or is_elementwise(context.config))
        self._shards = LocalShards(self.optimizer) if plain else None

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        try:
            with silenced(self._model.net, not len(batch)):
                self._called.clear()
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
        """Raise MotleyError if the pass left out a block, which all ranks must gather together."""
        if left_out := [name for name in self._blocks if name not in self._called]:
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
        """See Engine."""
        self._reshard()
        try:
            with super().averaged():
                yield
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Release parameters that remain gathered after a forward pass without a backward pass."""
        for part in self._model.net.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

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
        """See HoldsParts."""
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
        """Return the rows of a parameter as a DTensor, if this rank holds the parameter as one."""
        if not isinstance(own, DTensor) or not is_by_rows(value.shape, own.to_local().shape):
            return value
        return rows_as(value.to(own.device), own)

    def _put_together(self) -> contextlib.AbstractContextManager[None]:
        """Give the optimizer DTensors for the time of the context."""
        return self._shards.put_together() if self._shards else contextlib.nullcontext()

    def _share(self, net: nn.Module, state: State) -> State:
        """Return the state with whole tensors sharded as the parameters of ``net`` are."""

        def share(key: str, value: Tensor) -> Tensor:
            own = find_parameter(key, net)
            if not isinstance(own, DTensor) or not is_by_rows(value.shape, own.shape):
                return value
            part = distribute_tensor(value, self._mesh, own.placements, src_data_rank=None)
            return part.to(own.device)

        return State({key: share(key, value) for key, value in state.tensors.items()}, state.plain)


def _note_call(called: set[str], name: str, *_: Any) -> None:
    called.add(name)

"""The FSDP engine: torch's fully_shard, block by block, with unequal shares.

Each rank keeps a part of every parameter, of its gradient and of the optimizer's memory. A block's
parameters are gathered before it computes, forward and backward, and its gradient is scattered
after it; so every micro-batch communicates, and all ranks take equally many.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from motley.data.batch import Batch
from motley.engines.memory import no_second_try, out_of_memory
from motley.engines.named_state import on_cpu, snapshot
from motley.engines.optimizer_state import State
from motley.engines.optimizer_trial import Sharding
from motley.engines.protocol import EngineContext
from motley.engines.strategies.fsdp import TRAITS, FsdpOptions
from motley.engines.strategy import check_offload
from motley.engines.synchronous import SynchronousEngine
from motley.tasks.model import AUTOCAST, TaskModel


class FsdpEngine(SynchronousEngine):
    """Implements Engine.

    FSDP averages gradients over ranks, so each loss carries a factor W/N. With ``--wire bf16``
    or ``fp16`` gradients are scattered in that, and parameters gathered in it too where all ranks
    compute in it anyway.
    """

    traits = TRAITS
    equal_micro_steps = True
    replicated = False

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        offload = context.config.of(FsdpOptions).offload
        check_offload(offload, context)
        self.loss_weight = context.size
        self._mesh = init_device_mesh(context.device.type, (context.size,))
        sent = context.plan.wire.dtype
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=AUTOCAST[sent] if set(context.precisions) == {sent} else None,
                reduce_dtype=AUTOCAST[sent],
            ),
        }
        if offload == "parameters":
            options["offload_policy"] = CPUOffloadPolicy()
        self._sharding = Sharding(
            "--strategy fsdp", context.size, lambda net: fully_shard(net, **options), self._share
        )
        for block in model.task.blocks(model.net).values():
            fully_shard(block, **options)
        fully_shard(model.net, **options)
        super().__init__(model, context)  # its optimizer is to have the sharded parameters

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        try:
            with self._pass(batch):
                losses, total = self._losses(self._model, batch)
                self._backward(total * (self.scale.value * self.loss_weight / self._usual_weight))
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                no_second_try(error, self.device, self.traits.words, "--strategy ddp")
            raise
        self.clock.lap("compute", ready=last)
        return losses.detach()

    def _norm(self, norms: Tensor) -> Tensor:
        return norms.square().sum().sqrt()  # each rank's is of its part

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
        """Let go of what a pass without a backward pass has left gathered."""
        for part in self._model.net.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def state(self) -> State:
        """See Engine."""
        first = self._context.rank == 0
        state = self.whole_state(snapshot if first else on_cpu)
        return state if first else State()

    def load_state(self, state: State) -> None:
        """See Engine."""
        super().load_state(self._share(self._model.net, state))

    def _share(self, net: nn.Module, state: State) -> State:
        """Whole tensors cut as the parameters of ``net`` are."""
        # By all names: a tied one has two, and the state both.
        parameters = dict(net.named_parameters(remove_duplicate=False))

        def share(key: str, value: Tensor) -> Tensor:
            kind, _, name = key.partition(".")
            own = parameters.get(name.rpartition(".")[0] if kind == "optimizer" else name)
            if not isinstance(own, DTensor) or own.shape != value.shape:
                return value
            part = distribute_tensor(value, self._mesh, own.placements, src_data_rank=None)
            return part.to(own.device)

        return State({key: share(key, value) for key, value in state.tensors.items()}, state.plain)

"""The engine of a gradient that is sent while the backward pass still runs:
DistributedDataParallel with unequal shares."""

import contextlib
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from motley.comm.reducer import Bucket, Unsent
from motley.data.source import Batch
from motley.engines.memory import out_of_memory, shortage
from motley.engines.protocol import EngineContext
from motley.engines.reducing import ReducingEngine
from motley.errors import NoMemoryError
from motley.tasks.model import TaskModel
from motley.tasks.sometimes_unused import found_unused

_FIRST_BUCKET = 2**20  # bytes; torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def _sum_bucket(
    engine: "weakref.ref[DdpEngine]",
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch looks at the annotation
) -> torch.futures.Future[Tensor]:
    found = engine()
    assert found is not None
    return found.sum_bucket(bucket)


class DdpEngine(ReducingEngine):
    """Implements Engine. DDP's own average over ranks, wrong for unequal shares, is not used."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context, str(context.plan.buckets))
        self._mib = sum(parameter.numel() for parameter in self._parameters) * 4 / 2**20
        self._wrap()

    def _wrap(self) -> None:
        buckets = self._context.plan.buckets
        each = None if buckets is None else self._mib / buckets
        # A model that is compiled as a whole is cut where DDP's buckets end, so that they are sent
        # meanwhile: not if nobody is there to hear, nor where they are smaller than what torch
        # takes for the first.
        cuts = (
            self._model.task.compiles_whole
            and self._context.size > 1
            and (each is None or each * 2**20 >= _FIRST_BUCKET)
        )
        torch._dynamo.config.optimize_ddp = cuts
        self._ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._context.device] if self._context.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=each,
        )
        # Each rank has them alike, and after a pass that broke off not all would send them.
        self._ddp.broadcast_buffers = False
        self._buckets: dict[int, Bucket] = {}
        self._sent = 0  # buckets, in a step
        self._broken_off = False  # DDP takes no other backward pass then
        # DDP's own code holds what it calls, unseen by Python's collector: not the engine, which
        # would never be let go of, nor its memory.
        self._ddp.register_comm_hook(weakref.ref(self), _sum_bucket)
        self._fix_buckets()

    def sum_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Add up a bucket of DDP's over all ranks, while the backward pass goes on."""
        own = Bucket(bucket.index(), bucket.buffer(), bucket.gradients(), bucket.is_last())
        if own.final:
            self.clock.lap("compute", ready=True)
        self._buckets[own.place] = own
        future = self._add_up(own)
        self._sent += 1  # if memory had ended, it would be sent again
        return future

    def _fix_buckets(self) -> None:
        # DDP rebuilds its buckets after the first backward pass, in the order in which
        # gradients came, and that changes the order of sums. One sample makes it do so
        # before step 1; else a resumed run would differ from an unbroken one by rounding.
        with warnings.catch_warnings():
            # The first gradients are not views of the buckets yet, and DDP says so.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            reducer, self._reducer = self._reducer, Unsent()  # over a slow link it takes seconds
            # What is compiled for one sample would be compiled for it alone.
            with torch.compiler.set_stance("force_eager"):
                for _ in range(2):
                    self._buckets.clear()
                    self._ddp(self._model.blank()).sum().backward()
        self._reducer, self._sent, self._own_norms = reducer, 0, []
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        # In place: gradients stay views of DDP's buckets, so nothing is copied into them.
        self.optimizer.zero_grad(set_to_none=False)

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            losses: Tensor = self._ddp(batch.data)
            self._broken_off = last
            self._backward(losses.sum() * (self.scale.value / self._usual_weight))
            self._broken_off = False
            if last and self._sent < len(self._buckets):
                raise found_unused(self._model, "a bucket of gradients", self._without())
        if not last:
            self.clock.lap("compute")
        return losses.detach()

    def _without(self) -> list[str]:
        """Return the names of the parameters that hold the next bucket up. Where a gradient is a
        view of DDP's bucket it is all zeros."""
        places = {grad.data_ptr() for grad in self._buckets[self._sent].grads}
        return [
            name for name, each in self._trained.items()
            if each.grad is not None and each.grad.data_ptr() in places and not each.grad.any()
        ]  # fmt: skip

    def _send(self) -> None:
        # Gradients are views of these, and DDP's own hook would sum the very same.
        buckets = [self._buckets[index] for index in range(self._sent, len(self._buckets))]
        for future in [self._add_up(bucket) for bucket in buckets]:
            future.wait()
        self._sent = 0
        self.clock.lap("sync")

    def _after_step(self, stepped: bool, broken_off: bool, factor: float) -> None:
        if broken_off:
            self._wrap_anew()
        super()._after_step(stepped, broken_off, factor)

    def _wrap_anew(self) -> None:
        del self._ddp  # which takes its hooks off, and gives its buckets back
        self._buckets.clear()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._wrap()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            found = shortage(error, self._context.device)
            raise NoMemoryError(f"{found}; no room is left for the gradients themselves") from error

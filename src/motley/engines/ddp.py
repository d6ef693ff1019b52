"""Engines of ``--strategy ddp``: DistributedDataParallel, and an engine without overlap.

Both engines support unequal shares. DistributedDataParallel sends the gradient while the backward
pass still runs. The engine without overlap sends the gradient after the last backward pass. On a
single rank, the engine without overlap sends nothing.

DDP's gradients are views of its buckets. The buckets are filled with zeros before a step, and each
gradient is added by its own kernel. This takes 0.9 ms of a step of 73 ms for ViT-B/16 on an H200.
Without overlap, a gradient is the tensor that the backward pass creates. The memory of the gradient
is free between two steps, and one kernel copies many gradients into the message.
"""

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from motley.comm.collectives import all_gather_object
from motley.comm.reducer import Bucket, Unsent
from motley.data.source import Batch
from motley.engines.gradient_sum import GradientSum, broadcast
from motley.engines.out_of_memory import out_of_memory, release, shortage
from motley.engines.protocol import EngineContext
from motley.engines.step import ReducingEngine, gradient_norm
from motley.errors import NoMemoryError
from motley.plan.wire import Addition
from motley.tasks.check import found_unused
from motley.tasks.model import TaskModel

_FIRST_BUCKET = 2**20  # bytes; torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def _sum_bucket(
    engine: "weakref.ref[DdpEngine]",
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch looks at the annotation
) -> torch.futures.Future[Tensor]:
    result = engine()
    assert result is not None
    return result.sum_bucket(bucket)


class DdpEngine(ReducingEngine):
    """The engine that wraps DistributedDataParallel.

    DDP's own average over ranks is not used, because it is wrong for unequal shares of the batch.
    """

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context, str(context.plan.buckets))
        self._mib = sum(parameter.numel() for parameter in self._parameters) * 4 / 2**20
        self._wrap()

    def _wrap(self) -> None:
        buckets = self._context.plan.buckets
        each = None if buckets is None else self._mib / buckets
        # A model that is compiled as a whole is divided at the ends of DDP's buckets, so that they
        # are sent during the backward pass. There is no division for a single rank, nor for
        # buckets that are smaller than torch's first bucket.
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
        # Buffers are equal on all ranks. After a broken-off pass not all ranks would send them.
        self._ddp.broadcast_buffers = False
        self._buckets: dict[int, Bucket] = {}
        self._sent = 0  # number of buckets that were sent in this step
        self._broken_off = False  # if True, DDP cannot run another backward pass
        # DDP's C++ code holds the hook's state, unseen by Python's garbage collector. A reference
        # to the engine would keep the engine and its memory for ever.
        self._ddp.register_comm_hook(weakref.ref(self), _sum_bucket)
        self._fix_buckets()

    def sum_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to sum one of DDP's buckets over all ranks, while the backward pass continues.

        Returns:
            A future of the sum.
        """
        own = Bucket(bucket.index(), bucket.buffer(), bucket.gradients(), bucket.is_last())
        if own.final:
            self.clock.lap("compute", ready=True)
        self._buckets[own.place] = own
        future = self._add_up(own)
        self._sent += 1  # counted last: after a memory error the bucket is sent again
        return future

    def _fix_buckets(self) -> None:
        # DDP rebuilds its buckets after the first backward pass, in the order in which gradients
        # arrived. This changes the order of sums. A pass over one sample triggers it before step 1.
        # Otherwise a resumed run would differ from an unbroken one by rounding.
        with warnings.catch_warnings():
            # The first gradients are not views of the buckets yet, and DDP says so.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            reducer, self._reducer = self._reducer, Unsent()  # sending takes seconds on a slow link
            # Code compiled here would fit a batch of one sample only.
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
            self._backward(losses.sum() * (self.scale.value / self._nominal_weight))
            self._broken_off = False
            if last and self._sent < len(self._buckets):
                raise found_unused(self._model, "a bucket of gradients", self._without())
        if not last:
            self.clock.lap("compute")
        return losses.detach()

    def _without(self) -> list[str]:
        """Return the names of the parameters that delay the next bucket.

        The backward pass has not computed the gradients of these parameters. Their gradients, which
        are views of DDP's bucket, are still zero.
        """
        places = {grad.data_ptr() for grad in self._buckets[self._sent].grads}
        return [
            name for name, each in self._trained.items()
            if each.grad is not None and each.grad.data_ptr() in places and not each.grad.any()
        ]  # fmt: skip

    def _send(self) -> None:
        # Gradients are views of these buckets, which DDP's own hook would sum.
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
        del self._ddp  # removes its hooks and frees its buckets
        self._buckets.clear()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self._wrap()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            result = shortage(error, self._context.device)
            raise NoMemoryError(f"{result}. No memory is left for the gradients") from error


class NoOverlapEngine(ReducingEngine):
    """The engine that sends gradients after the last backward pass of a step."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context, "no_overlap")
        # A single rank need not send, but --wire may ask it to round its gradient.
        self._sends = context.size > 1 or not context.plan.wire.is_exact
        self._sum = GradientSum(self._parameters, self._begin_sum)
        self._absent: list[int] = []  # indices of parameters without a gradient in this step
        self._may_lack = any(all_gather_object(bool(model.sometimes_unused)))
        self._late = all(all_gather_object(self._may_read_late()))
        if context.size > 1:
            broadcast([*model.net.parameters(), *model.net.buffers()])

    def _may_read_late(self) -> bool:
        """Return True if no decision of the host is needed to finish a step on the device."""
        return dist.get_backend() == "nccl" and self._finishes_on_device()

    def _finishes_on_device(self) -> bool:
        wire = self._context.plan.wire
        return (
            self._skips_by_itself and wire.addition is Addition.NUMBERS and wire.slow_rank is None
        )

    @property
    def reads_late(self) -> bool:
        """True if the host may read the outcome of a step after the next step has started.

        The value is False if the host must know the outcome at once. The host must know it for a
        dynamic loss scale, a moving average, or parameters that may have a gradient on no rank.
        """
        return self._late and not (self.scale.dynamic or self.average or self._may_lack)

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients, so that the batch can be repeated."""
        self._step_losses, self._own_norms, self._weight = [], [], 0.0
        self._zero_gradients()
        if self._model.statistics:
            self._model.statistics.end_step(taken=False)

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        losses: Tensor = self._model(batch.data)
        if len(batch):  # without samples the pass would allocate gradients of zeros
            self._backward(losses.sum() * (self.scale.value / self._nominal_weight))
        self.clock.lap("compute", ready=last)
        return losses.detach()

    def _abandon(self, last: bool) -> None:
        self._zero_gradients()  # no memory is left for gradients, and no rank will step

    def _send(self) -> None:
        if not self._sends:
            return
        self._absent = self._sum.add_up(self._room, self._note_own)
        self.clock.lap("sync")

    def _lacking(self) -> Sequence[int]:
        return self._absent

    def _note_own(self, parameters: Sequence[Tensor]) -> None:
        if self._context.size > 1 and any(p.grad is not None for p in parameters):
            self._own_norms.append(gradient_norm(parameters))

    def _room(self, place: int) -> Bucket:
        """Return a bucket with memory for its gradients.

        If memory runs out, free this rank's gradients and try again. No rank then takes the step.

        Args:
            place: number of the bucket.
        """
        for _ in range(2):
            try:
                return self._sum.make_bucket(place, self._reducer.dtype)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._short = shortage(error, self._context.device)
            self._zero_gradients()  # no rank will step
            release()
        raise NoMemoryError(
            f"{self._short}. No memory is left for the buffer from which the gradient is sent"
        )

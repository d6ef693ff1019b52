"""The engine of a gradient that is sent behind the last backward pass, or not at all.

DDP's gradients are views of its buckets, which are filled with zeros before a step, and into which
each is added by a kernel of its own: 0.9 of 73 ms for ViT-B/16 on an H200. Here a gradient is what
the backward pass makes, its memory is free between two steps, and many are copied by one kernel
into what is sent.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.collectives import all_gather_object
from motley.comm.reducer import Bucket, as_real, empty_bucket, grouped
from motley.data.source import Batch
from motley.engines.gradients import gradient_norm
from motley.engines.memory import out_of_memory, release, shortage
from motley.engines.protocol import EngineContext
from motley.engines.reducing import ReducingEngine
from motley.errors import NoMemoryError
from motley.plan.wire import Addition
from motley.tasks.model import TaskModel

_BUCKET = 2**25  # numbers; twice as many took two H200s 5 % longer, half as many 11 %


class NoOverlapEngine(ReducingEngine):
    """Implements Engine."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context, "no_overlap")
        # What a rank alone would send is what it has; but it may be asked to round it.
        self._sends = context.size > 1 or not context.plan.wire.is_exact
        self._groups = grouped(self._parameters, _BUCKET)
        self._absent: list[int] = []  # places of parameters without a gradient, in this step
        self._may_lack = any(all_gather_object(bool(model.sometimes_unused)))
        self._late = all(all_gather_object(self._may_read_late()))
        if context.size > 1:
            _broadcast([*model.net.parameters(), *model.net.buffers()])

    def _may_read_late(self) -> bool:
        """Return True if the device alone, without the host, can finish a step."""
        return dist.get_backend() == "nccl" and self._finishes_on_device()

    def _finishes_on_device(self) -> bool:
        wire = self._context.plan.wire
        return (
            self._skips_by_itself and wire.addition is Addition.NUMBERS and wire.slow_rank is None
        )

    @property
    def reads_late(self) -> bool:
        """See Engine. The host changes a dynamic loss scale and an average itself, and drops
        gradients that no rank had."""
        return self._late and not (self.scale.dynamic or self.average or self._may_lack)

    def drop_gradients(self) -> None:
        """See Engine."""
        self._step_losses, self._own_norms, self._weight = [], [], 0.0
        self._zero_gradients()
        if self._model.statistics:
            self._model.statistics.end_step(taken=False)

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        losses: Tensor = self._model(batch.data)
        if len(batch):  # else it would make gradients of zeros
            self._backward(losses.sum() * (self.scale.value / self._usual_weight))
        self.clock.lap("compute", ready=last)
        return losses.detach()

    def _abandon(self, last: bool) -> None:
        self._zero_gradients()  # there is no room for them, and nobody will step

    def _send(self) -> None:
        if not self._sends:
            return
        sent = []
        self._absent = [place for place, p in enumerate(self._parameters) if p.grad is None]
        for place, parameters in enumerate(self._groups):
            bucket = self._room(place, parameters)
            if bucket is None:
                self._zero_gradients()  # nobody will step
                release()
                bucket = self._room(place, parameters)
            if bucket is None:
                raise NoMemoryError(f"{self._short}; no room is left to send the gradient from")
            _fill(bucket.grads, parameters)
            future = self._begin_sum(bucket)
            self._note_own(parameters)  # while it travels
            is_rounded = bucket.flat.dtype != as_real(parameters[0]).dtype
            if not is_rounded:
                _take(parameters, bucket.grads)  # the memory of what they were is needed
            sent.append((future, parameters, bucket.grads, is_rounded))
        for future, parameters, sums, is_rounded in sent:
            future.wait()
            if is_rounded:
                _take(parameters, sums)
        self.clock.lap("sync")

    def _lacking(self) -> Sequence[int]:
        return self._absent

    def _note_own(self, parameters: Sequence[Tensor]) -> None:
        if self._context.size > 1 and any(p.grad is not None for p in parameters):
            self._own_norms.append(gradient_norm(parameters))

    def _room(self, place: int, parameters: Sequence[Tensor]) -> Bucket | None:
        final = place == len(self._groups) - 1
        try:
            return empty_bucket(place, parameters, final, self._reducer.dtype)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self._short = shortage(error, self._context.device)
            return None


def _fill(places: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Put the parameters' gradients there; zeros where there are none."""
    made = [(place, p.grad) for place, p in zip(places, parameters, strict=True)]
    pairs = [(place, as_real(grad)) for place, grad in made if grad is not None]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [grad for _, grad in pairs])
    for place, grad in made:
        if grad is None:
            place.zero_()


def _take(parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """Have these as gradients; what was rounded goes where a gradient is already."""
    rounded = []
    for parameter, summed in zip(parameters, sums, strict=True):
        found = summed
        if parameter.is_complex():
            found = torch.view_as_complex(summed.to(as_real(parameter).dtype))
        if parameter.grad is None or found.dtype == parameter.dtype:
            parameter.grad = found.to(parameter.dtype)
        else:
            rounded.append((parameter.grad, found))
    if rounded:
        torch._foreach_copy_([grad for grad, _ in rounded], [found for _, found in rounded])


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Have rank 0's on all ranks; all call it."""
    for group in grouped(tensors, _BUCKET):
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

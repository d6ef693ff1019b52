"""The engine of one rank, who has nobody to send to."""

from torch import Tensor

from motley.data.batch import Batch
from motley.engines.synchronous import SynchronousEngine
from motley.plan.engine_traits import EngineTraits


class AloneEngine(SynchronousEngine):
    """Implements Engine: :class:`motley.engines.ddp.DdpEngine` without DDP.

    Gradients are what the backward pass makes, in no buckets: nothing is added into them, nothing
    is filled with zeros, and between two steps their memory is free.
    """

    traits = EngineTraits()
    loss_weight = 1
    rescuable = True
    equal_micro_steps = False

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        losses: Tensor = self._model(batch.data)
        self._backward(losses.sum() * (self.scale.value / self._usual_weight))
        self.clock.lap("compute", ready=last)
        return losses.detach()

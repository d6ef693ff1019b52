"""A step whose gradients a wire mode adds up, in buckets; see motley.comm.reducer."""

import torch
from torch import Tensor

from motley.comm.collectives import leavable
from motley.comm.reducer import Bucket, Reducer
from motley.engines.gradients import check_types
from motley.engines.named_state import part_of
from motley.engines.protocol import EngineContext
from motley.engines.synchronous import SynchronousEngine
from motley.plan.engine_traits import EngineTraits
from motley.plan.wire import Addition
from motley.tasks.model import TaskModel


class ReducingEngine(SynchronousEngine):
    """What remains of Engine is how gradients come into buckets, and when these are sent.

    The gradient of the global mean is a *sum* over ranks of (1/N) x summed losses, so buckets are
    added up and never divided: no rank's share enters anywhere else.
    """

    traits = EngineTraits(additions=(Addition.NUMBERS, Addition.BUCKETS))
    loss_weight = 1
    rescuable = True
    equal_micro_steps = False

    def __init__(self, model: TaskModel, context: EngineContext, layout: str) -> None:
        """Args: layout: of buckets; what a wire mode keeps of one is of no use to another."""
        super().__init__(model, context)
        wire = context.plan.wire
        if wire.addition is Addition.BUCKETS:
            check_types(model, (torch.float32,), f"--wire {wire}", "--wire exact")
        self._reducer: Reducer = context.plan.wire.reducer(context.device)
        self._keeps = f"wire.{context.plan.wire}.{layout}"  # between steps
        self._own_norms: list[Tensor] = []  # of what was sent, as it was before

    def _add_up(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        if self._context.size > 1:  # the sum does not tell whose it was
            self._own_norms.append(torch.linalg.vector_norm(bucket.flat))
        return self._begin_sum(bucket)

    def _begin_sum(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        return leavable(self._reducer.send(bucket), self._context.device)

    def _own_norm(self) -> Tensor | float:
        norms, self._own_norms = self._own_norms, []
        return torch.stack(norms).sum() if norms else 0.0

    def _after_step(self, stepped: bool, broken_off: bool, factor: float) -> None:
        self._reducer.after_step(stepped, factor)

    def own_state(self) -> dict[str, Tensor]:
        """See Engine."""
        kept = self._reducer.state()
        if kept:  # in the unit of the loss scale
            kept["scale"] = torch.tensor(self.scale.value, dtype=torch.float64)
        return super().own_state() | {
            f"{self._keeps}.{name}": value for name, value in kept.items()
        }

    def load_own_state(self, state: dict[str, Tensor]) -> list[str]:
        """See Engine."""
        notes = super().load_own_state(state)
        kept = part_of(state, self._keeps)
        if kept:
            factor = self.scale.value / float(kept.pop("scale"))
            self._reducer.load_state(kept, factor)
        elif self._reducer.state():
            self._reducer.load_state({})
            notes.append(
                f"--wire {self._context.plan.wire} begins with an empty error memory: the "
                "checkpoint is of other ranks, another --wire or other buckets"
            )
        return notes

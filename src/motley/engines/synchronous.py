"""The step of DDP and FSDP: send, agree on overflow, clip, update; on all ranks or on none.
Gradients are added up by a wire mode, in buckets; see motley.comm.reducer.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.collectives import Copy, all_gather, begin_copy, leavable, mark_now
from motley.comm.reducer import Bucket, Reducer
from motley.engines.base import (
    LEAST_CORRECTION,
    EngineBase,
    check_types,
    clip_factor,
    gradient_norm,
    unscale_and_clip,
)
from motley.engines.named_state import part_of
from motley.engines.protocol import EngineContext, LaunchedStep, StepResult
from motley.faults import Phase
from motley.plan.wire import Addition, EngineTraits
from motley.tasks.model import TaskModel


class SynchronousEngine(EngineBase):
    """What remains of Engine is how gradients are made and added up."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context)
        # torch's fused optimizers skip a step themselves, as torch.amp.GradScaler has them do.
        # SGD's momentum would begin as whatever is in memory if the first step is skipped.
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._skips_by_itself = skips and not isinstance(self.optimizer, torch.optim.SGD)
        # They also divide the gradient while they read it, by a number of 32 bits.
        self._divides = self._skips_by_itself and all(
            parameter.dtype == torch.float32 for parameter in self._parameters
        )
        self._may_lack = False  # on some rank a parameter had no gradient in some step
        self._broken_off = False  # a backward pass that communicates

    def _norm(self, norms: Tensor) -> Tensor:
        """Of the gradient, a scalar, from what each rank found, fp64 [ranks].

        All use rank 0's: unlike devices round differently, and a clip factor that differs in
        one bit would drive the ranks apart.
        """
        return norms[0]

    def _own_norm(self) -> Tensor | float:
        """Of this rank's gradient before it was added up, not finite if any entry was not."""
        return 0.0

    def _lacking(self) -> Sequence[int]:
        """Return the places, among the parameters, of those that had no gradient on this rank."""
        return ()

    def _stepped(self) -> Sequence[Tensor]:
        """What the optimizer steps, with its gradients."""
        return self._parameters

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _after_step(self, stepped: bool, broken_off: bool, factor: float) -> None:
        """After a step.

        Args:
            stepped: it was taken. broken_off: on some rank a backward pass was.
            factor: of the loss scale, from this step to the next.
        """

    def _launch(self, loss_sum: Tensor, ready_s: float, late: bool) -> LaunchedStep:
        scale, usual_weight = self.scale.value, self._usual_weight
        if self._copies:
            torch.cuda.synchronize(self._context.device)
        stepped = self._stepped()
        norm = gradient_norm(stepped)
        if self._short:
            norm.fill_(math.nan)  # nobody steps
        alone, lacking = self._context.size == 1, self._lacking()
        if not alone:
            self.clock.lap("opt", ready=True)
        table = all_gather(
            [loss_sum, norm, ready_s, bool(self._short), self._broken_off, self._weight,
             self._own_norm(), len(lacking)]
        )  # fmt: skip
        if not alone:
            self.clock.lap("sync")  # a rank whose host is late keeps the others here
        copy = begin_copy(table)  # on its way while the GPU does what follows
        if lacking:  # then others may lack the same, and nobody has a gradient of it
            copy.wait()
            if bool(copy.table[:, 7].all()):
                self._forget_absent(lacking)
        norms = table[:, 1]
        correction = None
        if self._weighs:
            correction = (table[:, 5].sum() / usual_weight).clamp(min=LEAST_CORRECTION)
        given = (self._norm(norms), scale, self._context.config.clip_grad, correction)
        if self._divides:
            factor = clip_factor(*given)
            self.optimizer.grad_scale = (  # type: ignore[attr-defined]
                None if factor is None else (1 / factor).to(self._parameters[0])
            )
        else:
            unscale_and_clip(stepped, *given)
        if self._skips_by_itself:
            if copy.is_done():  # nothing holds the device back: it steps now
                self.on_change()
            # Queued before the host knows: it waits for the table only, which is on its way
            # already, and queues the next step while the GPU still works on this one.
            found_inf = (~norms.isfinite().all()).float()
            found_inf = found_inf.to(self._parameters[0].device)
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self.optimizer.step()
            self._zero_gradients()
        if late:
            if self._model.statistics:
                self._model.statistics.end_step(norms.isfinite().all())
            self.clock.lap("opt")
        read = partial(self._read, copy, scale, usual_weight, late)
        return LaunchedStep(read, partial(_was_taken, copy), mark_now(self.device))

    def _forget_absent(self, lacking: Sequence[int]) -> None:
        """Have parameters without a gradient on any rank be as without one on one machine: neither
        momentum nor weight decay moves them. All ranks call it, since each lacks some.

        Args:
            lacking: as :meth:`_lacking` of this rank.
        """
        absent = torch.zeros(len(self._parameters), device=self._wire_device())
        absent[list(lacking)] = 1.0
        dist.all_reduce(absent)
        for place in (absent == self._context.size).nonzero().flatten().tolist():
            self._parameters[place].grad = None

    def _wire_device(self) -> torch.device:
        return self._context.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def _read(self, copy: Copy, scale: float, usual_weight: float, late: bool) -> StepResult:
        """Wait for what all ranks told, and finish the step.

        Args:
            scale, usual_weight: of the step.
        """
        if late:
            self.clock.on_phase(Phase.ALL_REDUCE)  # the others may not have launched it yet
        copy.wait()
        if not late:
            self.on_change()
        rows = copy.table.tolist()
        overflow = not all(math.isfinite(row[1]) for row in rows)
        short = self._tell_short([row[3] for row in rows])
        if not self._skips_by_itself:
            if not overflow:
                self.optimizer.step()
            self._zero_gradients()
        if not short:
            self.scale.update(overflow)
        if any(row[7] for row in rows):
            self._may_lack = True
        self._after_step(
            not overflow and not short,
            bool(short) and any(row[4] for row in rows), self.scale.value / scale,
        )  # fmt: skip
        if not late:
            self.clock.lap("opt")
        weight = self._told_weight(row[5] for row in rows)
        factor = scale if weight is None else scale * (weight or math.inf) / usual_weight
        return StepResult(
            loss_sum=math.fsum(row[0] for row in rows),
            grad_norm=None if overflow else float(self._norm(copy.table[:, 1])) / factor,
            overflow=overflow,
            loss_scale=scale,
            ready_s=tuple(row[2] for row in rows),
            weight=weight,
            oom_ranks=short,
            unsound=tuple(rank for rank, row in enumerate(rows) if not math.isfinite(row[6])),
        )


def _was_taken(copy: Copy) -> bool | None:
    """See LaunchedStep."""
    if not copy.is_done():
        return None
    return bool(copy.table[:, 1].isfinite().all()) and not bool(copy.table[:, 3].any())


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

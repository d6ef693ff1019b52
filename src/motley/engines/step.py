"""The step of an engine: forward, backward, send, agree on overflow, clip, update.

Either all ranks take a step, or all ranks skip it. DDP and FSDP sum gradients over ranks in
buckets, in the format that ``--wire`` selects; see motley.comm.reducer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from motley.comm.collectives import (
    Copy,
    all_gather,
    all_gather_object,
    begin_copy,
    broadcast,
    leavable,
    mark_now,
)
from motley.comm.reducer import Bucket, Reducer, as_real, by_type
from motley.data.source import Batch, Tensors
from motley.engines.base import EngineBase, check_types
from motley.engines.gradient_sum import drop_absent, wire_device
from motley.engines.named_state import select_part
from motley.engines.out_of_memory import out_of_memory, release, shortage
from motley.engines.protocol import EngineContext, LaunchedStep, StepResult
from motley.errors import MotleyError
from motley.faults import Phase
from motley.plan.wire import Addition, EngineTraits
from motley.tasks.model import TaskModel

LEAST_CORRECTION = 1e-30  # least divisor by weight: without weight the gradient is and stays 0


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, as a scalar tensor.

    The norm is not finite if any entry is not finite. For sharded gradients, the norm is that of
    this rank's shards.
    """
    return torch.nn.utils.get_total_norm(_gradients(parameters))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


@torch.no_grad()
def clip_factor(
    norm: Tensor, scale: float, most: float | None, correction: Tensor | None = None
) -> Tensor | None:
    """Return the scalar factor that unscales and clips a gradient. None: no factor is needed.

    Clipping follows torch.nn.utils.clip_grad_norm_. The host does not wait for the device.

    Args:
        norm: norm of the scaled gradients, a scalar, equal on all ranks.
        scale: loss scale of the gradients.
        most: norm to clip to. None: do not clip.
        correction: another divisor of the gradients, a scalar. None: there is no other divisor.
    """
    if scale == 1.0 and most is None and correction is None:
        return None
    factor = torch.full_like(norm, 1 / scale)
    if correction is not None:
        factor /= correction.to(norm)
        norm = norm / correction.to(norm)
    if most is not None:
        factor *= torch.clamp(most / (norm / scale + 1e-6), max=1.0)
    return factor


@torch.no_grad()
def unscale_and_clip(
    parameters: Sequence[Tensor],
    norm: Tensor,
    scale: float,
    most: float | None,
    correction: Tensor | None = None,
) -> None:
    """Multiply all gradients by the result of :func:`clip_factor`, in place.

    See :func:`clip_factor` for the arguments.
    """
    factor = clip_factor(norm, scale, most, correction)
    grads = _gradients(parameters)
    if factor is None or not grads:  # memory may have run out before the first gradient
        return
    # The factor has fp32 at least: in bf16 its error would be up to 0.4 %.
    factor = factor.to(grads[0].device)
    for alike in by_type(grads):
        wide = alike[0].dtype in (torch.float32, torch.float64)
        torch._foreach_mul_(alike, factor.to(alike[0].dtype) if wide else factor.float())


@torch.no_grad()
def clip_values(parameters: Sequence[Tensor], most: float) -> None:
    """Clip each element of the gradients to the range from ``-most`` to ``most``, in place."""
    for grad in _gradients(parameters):
        as_real(grad).clamp_(-most, most)


_LEAST_NORM = 1e-3  # least norm of a unit's weights, as in timm
_LEAST_GRADIENT = 1e-6


def _unit_norms(value: Tensor) -> Tensor:
    """Return the norm of each unit, [units, 1, ...]. A unit is a row, or a whole vector."""
    dtype = torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else None
    if value.dim() <= 1:
        norm: Tensor = torch.linalg.vector_norm(value, dtype=dtype)
        return norm.reshape(1)
    along = tuple(range(1, value.dim()))
    norm = torch.linalg.vector_norm(value, dim=along, keepdim=True, dtype=dtype)
    return norm


@torch.no_grad()
def clip_adaptively(
    parameters: Sequence[Tensor],
    most: float,
    share: Callable[[Tensor], Tensor] = lambda factors: factors,
) -> None:
    """Clip the gradient of each unit to ``most`` times the norm of its weights, in place.

    A unit is a row of a matrix or convolution, or a whole vector. Source: Brock et al.,
    "High-Performance Large-Scale Image Recognition Without Normalization", 2021, and
    timm.utils.adaptive_clip_grad.

    Args:
        parameters: whole parameters with their gradients.
        most: largest ratio of a unit's gradient norm to its weight norm.
        share: function that replaces the clip factors of all units, [units], by rank 0's factors.
            Different devices round norms differently, so that the ranks' parameters would diverge.
    """
    factors = []
    for each in parameters:
        weights = _unit_norms(each.detach()).clamp(min=_LEAST_NORM) * most
        own = torch.ones_like(weights)
        if each.grad is not None:
            norms = _unit_norms(each.grad)
            own = torch.where(norms < weights, own, weights / norms.clamp(min=_LEAST_GRADIENT))
        factors.append(own)
    if not factors:
        return
    flat = share(torch.cat([each.flatten() for each in factors]))
    shared = torch.split(flat, [each.numel() for each in factors])
    for parameter, own, factor in zip(parameters, factors, shared, strict=True):
        if parameter.grad is not None:
            parameter.grad.mul_(factor.view_as(own).to(parameter.grad.device))


class StepEngine(EngineBase):
    """Base class of the step in all engines.

    A subclass has ``traits``, equal to those of its :class:`EngineFactory`, and these methods:

    - ``_accumulate`` computes a micro-batch, without the handling of memory errors.

    - ``_abandon`` cleans up after memory ran out, so that no rank takes the step.

    - ``_send`` sends the gradients that the last backward pass has not sent, and for which other
      ranks wait.

    - ``_step`` does the rest of the step.
    """

    traits: EngineTraits
    rescuable = diverges = False

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context)
        # Gloo copies to a GPU in its own stream, and its futures do not wait for this stream.
        self._copies = context.device.type == "cuda" and dist.get_backend() != "nccl"
        self._short = ""  # description of a memory error in this step
        self._step_losses: list[Tensor] = []  # losses of this step's micro-batches
        # If samples differ in weight, losses are divided by the usual weight of a batch. The
        # gradient is corrected as soon as all ranks have the true weight.
        self._weighs = model.task.has_weights
        self._weight = 0.0  # weight of this rank's samples in this step
        self._nominal_weight = 1.0  # usual weight of the global batch in this step

    @property
    def _norm_limit(self) -> float | None:
        """Value of ``--clip-grad`` if it limits the norm of the whole gradient, else None."""
        config = self._context.config
        return config.clip_grad if config.clip_mode == "norm" else None

    def _clip_parts(self, parameters: Sequence[Tensor], shares: bool = True) -> None:
        """Clip the unscaled gradient by ``--clip-mode value`` or ``agc``. All ranks call it.

        Args:
            parameters: the tensors that the optimizer changes.
            shares: True if all ranks have the same gradient. All ranks then use rank 0's factors.
        """
        config = self._context.config
        if config.clip_grad is None or config.clip_mode == "norm":
            return
        if config.clip_mode == "value":
            clip_values(parameters, config.clip_grad)
        elif shares and self._context.size > 1:
            clip_adaptively(parameters, config.clip_grad, self._take_first)
        else:
            clip_adaptively(parameters, config.clip_grad)

    def _take_first(self, factors: Tensor) -> Tensor:
        return broadcast(factors.to(wire_device(self.device))).to(factors.device)

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        """Run a forward and a backward pass, and return each sample's loss, detached.

        The backward pass starts from the sum of the losses, divided by ``_nominal_weight``.
        """
        raise NotImplementedError

    def _abandon(self, last: bool) -> None:
        pass

    def _send(self) -> None:
        pass

    def _step(self, loss_sum: Tensor, ready_s: float) -> StepResult:
        """Finish the global batch. All ranks exchange their losses and norms before the update."""
        raise NotImplementedError

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """Compute the forward and backward pass of one micro-batch.

        If memory runs out, the engine stores the error until all ranks agree to skip the step.
        """
        losses = None
        self._nominal_weight = n_global * self._model.task.weight
        self._weight += batch.weight
        if not self._short:
            try:
                losses = self._accumulate(batch, last)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._short = shortage(error, self._context.device)
        if losses is None:
            release()
            self._abandon(last)
            losses = torch.zeros(len(batch), device=self._context.device)
        elif losses.shape != (len(batch),):
            raise MotleyError(
                f"losses() of {type(self._model.task).__name__} returns a tensor of shape "
                f"{tuple(losses.shape)} for {len(batch)} samples; return one number per sample, "
                "which is 0 for a sample that does not count"
            )
        elif self._model.statistics:
            self._model.statistics.take(len(batch), n_global)
        if last:
            self._send()
        self._step_losses.append(losses)

    @property
    def reads_late(self) -> bool:
        """True if the host may queue the passes of the next step before it reads this outcome."""
        return False

    def step(self) -> StepResult:
        """Finish the global batch, and return the outcome of the step."""
        return self.launch_step(late=False).read()

    def launch_step(self, late: bool) -> LaunchedStep:
        """Start a step, and return an object that reads its outcome."""
        losses, self._step_losses = torch.cat(self._step_losses), []
        short, average = bool(self._short), self.average  # created here, before the first step
        launched = self._launch(losses.sum(), self.clock.ready_s, late)
        laps = self.clock.cut() if late else None

        def read() -> StepResult:
            result = launched.read()
            again = bool(result.oom_ranks) and result.retry
            taken = not (result.overflow or short or again)
            if self._model.statistics and not late:
                self._model.statistics.end_step(taken)
            if average and taken:
                average.update()
            return replace(result, losses=losses, laps=laps or self.clock.cut())

        self._weight = 0.0
        return replace(launched, read=read)

    def _launch(self, loss_sum: Tensor, ready_s: float, late: bool) -> LaunchedStep:
        """Start a step. An engine that cannot read outcomes late takes the whole step at once."""
        result = self._step(loss_sum, ready_s)
        return LaunchedStep(lambda: result, wait=mark_now(self.device))

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients. Needed only if :attr:`reads_late` can be True."""
        raise NotImplementedError

    def _losses(self, forward: Callable[[Tensors], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each sample's loss, fp32 [n], and the sum of the losses.

        Engines whose passes communicate use this method.

        A rank without samples computes one sample, whose gradient is set to zero (see
        motley.engines.base). A real pass is needed, because it takes part in all collectives of the
        other ranks, in the same order.
        """
        if not len(batch):
            losses = forward(self._model.blank())
            return losses.new_empty(0), losses.sum()
        losses = forward(batch.data)
        return losses, losses.sum()

    def _backward(self, loss: Tensor) -> None:
        self.clock.on_phase(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]

    def _result_weight(self, weights: Iterable[float]) -> float | None:
        """Return the total weight of the samples, for :attr:`StepResult.weight`.

        Args:
            weights: total weight of each rank's samples.
        """
        return math.fsum(weights) if self._weighs else None

    def _find_oom_ranks(self, ranks: Sequence[float]) -> dict[int, str]:
        """Return a description of the error of each rank that ran out of memory.

        The result is that of :attr:`StepResult.oom_ranks`. All ranks call this method.

        Args:
            ranks: one flag per rank, nonzero if the rank ran out of memory.
        """
        if not any(ranks):
            return {}
        result, self._short = all_gather_object(self._short), ""
        return {rank: words for rank, words in enumerate(result) if words}

    def _update(self) -> None:
        """Change the parameters by a step of the optimizer."""
        self.optimizer.step()


class SynchronousEngine(StepEngine):
    """Base class of the step in DDP and FSDP. A subclass computes and sums the gradients."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context)
        # Torch's fused optimizers can skip a step on the device, for torch.amp.GradScaler. If they
        # skip the first step, SGD's momentum stays uninitialised memory.
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._skips_by_itself = skips and not isinstance(self.optimizer, torch.optim.SGD)
        # They also divide the gradient while they read it, by an fp32 number.
        self._divides = (
            self._skips_by_itself
            and context.config.clip_mode == "norm"
            and all(parameter.dtype == torch.float32 for parameter in self._parameters)
        )
        self._may_lack = False  # True after a parameter had no gradient on some rank in some step
        self._broken_off = False  # True if a backward pass that communicates was broken off

    def _norm(self, norms: Tensor) -> Tensor:
        """Return the norm of the gradient, a scalar, from the norms of all ranks, fp64 [ranks].

        Here the result is rank 0's norm, on all ranks. Different devices round differently, and
        clip factors that differ in one bit would make the ranks' parameters diverge.
        """
        return norms[0]

    def _own_norm(self) -> Tensor | float:
        """Return the norm of the local gradient before the all-reduce.

        The norm is not finite if any entry is not finite.
        """
        return 0.0

    def _lacking(self) -> Sequence[int]:
        """Return the indices of the parameters that had no gradient on this rank."""
        return ()

    def _stepped(self) -> Sequence[Tensor]:
        """Return the tensors that the optimizer changes, with their gradients."""
        return self._parameters

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _after_step(self, stepped: bool, broken_off: bool, factor: float) -> None:
        """Update the state that the reducer keeps between steps.

        Args:
            stepped: True if the step was taken.
            broken_off: True if an error has interrupted a backward pass on some rank.
            factor: ratio of the next step's loss scale to this step's loss scale.
        """

    def _launch(self, loss_sum: Tensor, ready_s: float, late: bool) -> LaunchedStep:
        scale, usual_weight = self.scale.value, self._nominal_weight
        if self._copies:
            torch.cuda.synchronize(self._context.device)
        stepped = self._stepped()
        norm = gradient_norm(stepped)
        if self._short:
            norm.fill_(math.nan)  # no rank steps
        alone, lacking = self._context.size == 1, self._lacking()
        if not alone:
            self.clock.lap("opt", ready=True)
        table = all_gather(
            [loss_sum, norm, ready_s, bool(self._short), self._broken_off, self._weight,
             self._own_norm(), len(lacking)]
        )  # fmt: skip
        if not alone:
            self.clock.lap("sync")  # a rank whose host is late keeps the others here
        copy = begin_copy(table)  # asynchronous, while the GPU does the work below
        if lacking:  # possibly no rank has a gradient of such a parameter
            copy.wait()
            if bool(copy.table[:, 7].all()):
                drop_absent(self._parameters, lacking, wire_device(self.device))
        norms = table[:, 1]
        correction = None
        if self._weighs:
            correction = (table[:, 5].sum() / usual_weight).clamp(min=LEAST_CORRECTION)
        given = (self._norm(norms), scale, self._norm_limit, correction)
        if self._divides:
            factor = clip_factor(*given)
            self.optimizer.grad_scale = (  # type: ignore[attr-defined]
                None if factor is None else (1 / factor).to(self._parameters[0])
            )
        else:
            unscale_and_clip(stepped, *given)
            self._clip_parts(stepped)
        if self._skips_by_itself:
            if copy.is_done():  # the device will not wait, and changes parameters now
                self.on_change()
            # The update is queued before the host has the table. The host then only waits for the
            # table, and queues the next step while the GPU still works on this one.
            found_inf = (~norms.isfinite().all()).float()
            found_inf = found_inf.to(self._parameters[0].device)
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self._update()
            self._zero_gradients()
        if late:
            if self._model.statistics:
                self._model.statistics.end_step(norms.isfinite().all())
            self.clock.lap("opt")
        read = partial(self._read, copy, scale, usual_weight, late)
        return LaunchedStep(read, partial(_was_taken, copy), mark_now(self.device))

    def _read(self, copy: Copy, scale: float, usual_weight: float, late: bool) -> StepResult:
        """Wait for the table with all ranks' losses, norms and flags, and finish the step.

        Args:
            copy: pending copy of the table to the host. The table has one row per rank.
            scale: loss scale of the step.
            usual_weight: weight by which the gradients of the step were divided.
            late: True if the next step has been queued already.
        """
        if late:
            self.clock.on_phase(Phase.ALL_REDUCE)  # other ranks may not have launched the step yet
        copy.wait()
        if not late:
            self.on_change()
        rows = copy.table.tolist()
        overflow = not all(math.isfinite(row[1]) for row in rows)
        short = self._find_oom_ranks([row[3] for row in rows])
        if not self._skips_by_itself:
            if not overflow:
                self._update()
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
        weight = self._result_weight(row[5] for row in rows)
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
    """Return True if the step was taken, and False if it was skipped.

    None: the table of all ranks' losses, norms and flags has not arrived yet.
    """
    if not copy.is_done():
        return None
    return bool(copy.table[:, 1].isfinite().all()) and not bool(copy.table[:, 3].any())


class ReducingEngine(SynchronousEngine):
    """A synchronous engine that sums buckets by a reducer. A subclass fills and sends the buckets.

    With N samples in the global batch, each rank's loss is the sum of its samples' losses, divided
    by N. The gradient of the global mean is the *sum* of the ranks' gradients. Buckets are
    therefore summed and never divided by the number of ranks or by a rank's share.
    """

    traits = EngineTraits(additions=(Addition.NUMBERS, Addition.BUCKETS))
    loss_weight = 1
    rescuable = True
    equal_micro_steps = False

    def __init__(self, model: TaskModel, context: EngineContext, layout: str) -> None:
        """Create the engine.

        Args:
            model: the model.
            context: the values with which the engine is built.
            layout: name of the way in which gradients are divided into buckets. The state of a
                ``--wire`` mode is valid for one layout only.
        """
        super().__init__(model, context)
        wire = context.plan.wire
        if wire.addition is Addition.BUCKETS:
            check_types(model, (torch.float32,), f"--wire {wire}", "--wire exact")
        self._reducer: Reducer = context.plan.wire.reducer(context.device)
        self._keeps = f"wire.{context.plan.wire}.{layout}"  # name of the state between steps
        self._own_norms: list[Tensor] = []  # norms of buckets before the all-reduce

    def _add_up(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        if self._context.size > 1:  # the sum no longer has the norms of single ranks
            self._own_norms.append(torch.linalg.vector_norm(bucket.flat))
        return self._begin_sum(bucket)

    def _begin_sum(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        return leavable(self._reducer.send(bucket), self._context.device)

    def _own_norm(self) -> Tensor | float:
        norms, self._own_norms = self._own_norms, []
        return torch.stack(norms).sum() if norms else 0.0

    def _after_step(self, stepped: bool, broken_off: bool, factor: float) -> None:
        self._reducer.after_step(stepped, factor)

    def _rank_state(self) -> dict[str, Tensor]:
        saved = self._reducer.state()
        if saved:  # the state is scaled by the loss scale
            saved["scale"] = torch.tensor(self.scale.value, dtype=torch.float64)
        return super()._rank_state() | {
            f"{self._keeps}.{name}": value for name, value in saved.items()
        }

    def _load_rank(self, state: dict[str, Tensor]) -> list[str]:
        notes = super()._load_rank(state)
        saved = select_part(state, self._keeps)
        if saved:
            factor = self.scale.value / float(saved.pop("scale"))
            self._reducer.load_state(saved, factor)
        elif self._reducer.state():
            self._reducer.load_state({})
            notes.append(
                f"the error memory of --wire {self._context.plan.wire} starts empty, because the "
                "checkpoint has other ranks, another --wire or other buckets"
            )
        return notes

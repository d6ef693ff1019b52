"""Local SGD: each rank takes its own optimizer steps, and parameters are averaged at intervals.

The progress of a rank is the change of its parameters since the last averaging round. In a round,
each rank sends its progress, weighted by the number of samples that the rank has used. The ranks
compute the next steps during the all-reduce of this sum. In the next round, the mean replaces the
rank's own progress. Let z be the parameters that are equal on all ranks, x_i the parameters of
rank i, d_i its progress, and n_i its number of samples. Then

    x_i = z + d_i,    and one averaging round later    z <- z + sum_i n_i d_i / sum_i n_i

The all-reduce costs no time if it takes no longer than the steps between two rounds. A rank that is
late by less than this time does not delay the other ranks. Losses and times are sent with the
progress. A rank computes a gradient from its own samples alone, so the result differs from training
on one host.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.collectives import all_gather_floats, all_gather_object, leavable
from motley.comm.reducer import as_real
from motley.data.source import Batch
from motley.engines.named_state import State
from motley.engines.optimizers import find_own
from motley.engines.protocol import EngineContext, StepResult
from motley.engines.step import StepEngine, gradient_norm, unscale_and_clip
from motley.errors import MotleyError, NotFiniteError
from motley.plan.plan import Plan
from motley.plan.wire import Addition, EngineTraits
from motley.tasks.model import TaskModel

_TOLD = 4  # numbers that each rank sends at an averaging round


class LocalEngine(StepEngine):
    """The engine for Local SGD."""

    traits = EngineTraits(additions=(Addition.LOCAL_STEPS,), spares_slow_rank=False)
    loss_weight = 1
    rescuable = diverges = True
    equal_micro_steps = False

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context)
        if self.optimizer_traits.nests:
            raise MotleyError(
                f"--opt {context.config.opt} has state that cannot be averaged over ranks, which "
                f"--wire {context.plan.wire} needs; choose another --wire, or an optimizer such "
                "as adamw"
            )
        self._plan, self._sync_every = context.plan, context.plan.wire.sync_every
        self._heard: Tensor | None = None  # received table that is not yet returned to the loop
        self._agreed = self._vector()
        dist.broadcast(self._agreed, src=0)
        self._begin()

    # -- parameters as one vector: real [numbers], in the widest of their types

    def _vector(self) -> Tensor:
        return torch.cat([as_real(each.detach()).flatten() for each in self._parameters])

    @torch.no_grad()
    def _take(self, vector: Tensor) -> None:
        _copy_into(self._parameters, vector)

    def _begin(self) -> None:
        """Start the steps of a new averaging round. All ranks have equal parameters now."""
        self._take(self._agreed)
        self._start = self._agreed.clone()  # this rank's parameters at the last averaging round
        self._sum: Tensor | None = None  # all-reduce of the progress until then, still running
        self._steps = 0  # steps since that round
        self._used = 0.0  # weight of the samples used since that round
        self._loss_sum = torch.zeros((), device=self._context.device)  # losses of these samples

    # -- a step of this rank

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        losses = torch.zeros(0, device=self._context.device)
        if len(batch):
            losses = self._model(batch.data)
            # The scaling is that of other engines, as in the search for the loss scale.
            self._backward(losses.sum() * (self.scale.value / self._nominal_weight))
        self.clock.lap("compute")
        return losses.detach()

    def _step(self, loss_sum: Tensor, ready_s: float) -> StepResult:
        scale, weight = self.scale.value, self._weight
        norm, overflow = None, False
        averages = self._steps + 1 == self._sync_every
        if averages:  # before anything changes, as this may wait for a lost rank
            self._land()
            self.clock.lap("sync")
        self.on_change()
        if weight and not self._short:
            factor = scale * weight / self._nominal_weight
            result = gradient_norm(self._parameters)
            norm = float(result) / factor
            if math.isfinite(norm):
                unscale_and_clip(self._parameters, result, factor, self._norm_limit)
                self._clip_parts(self._parameters, shares=False)
                self._update()
                self._used += weight
                self._loss_sum += loss_sum
            else:
                norm, overflow = None, True
            self.scale.update(overflow)
            if overflow and not math.isfinite(loss := float(loss_sum)):
                return StepResult(loss, None, True, scale, ())  # the loop reports the samples
            if overflow and not self.scale.may_clear:
                raise NotFiniteError(
                    f"the gradient is not finite at the loss scale {scale:g}, though the loss "
                    f"is {loss / weight:.3g}; lower --lr, set --clip-grad 1.0, or choose another "
                    "--precision"
                )
        self.optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        if averages:
            self._average(ready_s)
        self.clock.lap("opt")
        if self._heard is None:
            return StepResult(None, norm, overflow, scale, ())
        (losses, used, ready, short), self._heard = self._heard.unbind(dim=1), None
        mean = float(losses.sum() / used.sum()) if used.any() else None
        return StepResult(
            None if mean is None else mean * self._nominal_weight, norm, overflow, scale,
            ready_s=tuple(ready.tolist()), weight=self._nominal_weight,
            oom_ranks=self._find_oom_ranks(short.tolist()), retry=False,
        )  # fmt: skip

    # -- averaging rounds

    def _average(self, ready_s: float = 0.0) -> None:
        """Apply the sum of the last averaging round, and send this rank's progress since then.

        The all-reduce of the last round must have finished.

        Args:
            ready_s: seconds until this rank's gradient was ready in the last step. Sent with the
                progress.
        """
        own = self._agreed.new_zeros(self._context.size, _TOLD)
        own[self._context.rank] = torch.stack([
            self._loss_sum, *own.new_tensor([self._used, ready_s, bool(self._short)])
        ])  # fmt: skip
        progress = self._vector() - self._start
        self._sum = torch.cat([progress * self._used, own.flatten()])
        self._work = dist.all_reduce(self._sum, async_op=True)
        self._landed = leavable(self._work.get_future(), self._context.device)
        self._start = self._agreed + progress
        self._take(self._start)
        self._steps, self._used = 0, 0.0
        self._loss_sum.zero_()

    def _land(self) -> None:
        """Wait for the all-reduce of the last averaging round, if one is running."""
        if self._sum is None:
            return
        self._landed.wait()
        self._work.wait()  # releases the tensor that was sent
        if self._copies:
            torch.cuda.synchronize(self._context.device)
        progress, rows = torch.split(
            self._sum, [len(self._agreed), len(self._sum) - len(self._agreed)]
        )
        # One row per rank, fp32 [ranks, 4]: the sum of its losses and the weight of its samples
        # since the round before, ready_s, and a flag for a memory error.
        table = rows.view(-1, _TOLD)
        self._agreed.add_(progress / table[:, 1].sum().clamp(min=1))
        self._sum = None
        if self._heard is not None:  # two averaging rounds without a step between them
            table = torch.cat([self._heard[:, :2] + table[:, :2],
                               torch.maximum(self._heard[:, 2:], table[:, 2:])], dim=1)  # fmt: skip
        self._heard = table

    def sync_parameters(self) -> None:
        """Make the parameters equal on all ranks: run an averaging round, and wait for its sum.

        The optimizer's state is averaged, too, so that a checkpoint has one state for all ranks.
        """
        super().sync_parameters()
        if self._steps == 0 and self._sum is None:
            return
        self._land()
        with self._changing():
            self._average()
        self._land()
        self._synchronize_start()

    def unite(self) -> None:
        """Set the parameters to their mean over all ranks, weighted by the ranks' shares."""
        self._agreed = self._vector() * self._share
        dist.all_reduce(self._agreed)
        self._synchronize_start()

    @property
    def _share(self) -> float:
        return self._plan.counts[self._context.rank] / self._plan.global_batch

    def _synchronize_start(self) -> None:
        """Start a round from equal parameters, and make the remaining state equal on all ranks."""
        with self._changing():
            self._begin()
        self._average_memory()
        scale = self.scale
        values, steps = zip(*all_gather_floats([scale.value, scale.good_steps]), strict=True)
        scale.value, scale.good_steps = min(values), int(min(steps))

    def _average_memory(self) -> None:
        # This rank may lack slots, if it had no samples yet, or none that use some parameters.
        known = [set(slots) for slots in all_gather_object(list(self.memory.slots()))]
        missing = set.union(*known) - known[self._context.rank]
        if missing:
            with self._changing():
                self._step_of_size_0(missing, counts=not known[self._context.rank])
        memory, registered = self.memory.slots(), find_own(self._context.config.opt)
        codec = registered.codec if registered else None
        wide = {name: codec.widen(slots) if codec else {} for name, slots in memory.items()}
        groups = zip(self.optimizer.param_groups, self.memory.changed(), strict=True)
        saved: list[tuple[dict[str, Any], str]] = [
            (wide[n] if slot in wide[n] else memory[n], slot)
            for n in sorted(memory) for slot in sorted(memory[n])
            if not (codec and codec.is_extra(slot))
        ]  # fmt: skip
        saved += [(group, key) for group, changed in groups for key in sorted(changed)]
        if self.average:  # a mean of the ranks' averages is right, because averages are linear
            own = self.average
            saved += [(d, key) for d in (own.tensors, own.numbers) for key in sorted(d)]
        tensors = [each[key] for each, key in saved if isinstance(each[key], Tensor)]
        for many in (True, False):  # moments first, then step counters
            some = [tensor for tensor in tensors if (tensor.dim() > 0) == many]
            if not some:
                continue
            flat = torch.cat([_wide(t) for t in some]).to(self._context.device)
            if many:
                flat *= self._share
            dist.all_reduce(flat, dist.ReduceOp.SUM if many else dist.ReduceOp.MAX)
            with self._changing():
                _copy_into(some, flat)
                if many and codec:
                    for name, slots in wide.items():
                        codec.narrow(memory[name], slots)
        numbers = [
            (each, key) for each, key in saved if type(each[key]) in (int, float)
        ]  # step counters
        if numbers:
            table = all_gather_floats([float(each[key]) for each, key in numbers])
            for (each, key), column in zip(numbers, zip(*table, strict=True), strict=True):
                each[key] = type(each[key])(max(column))

    def _step_of_size_0(self, names: set[str], counts: bool) -> None:
        """Create missing state of the optimizer by a step with learning rate 0.

        Args:
            names: names of the parameters that the optimizer has not stepped yet.
            counts: True: a step counter in a parameter group counts this step.
        """
        before = [dict(group) for group in self.optimizer.param_groups]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for name in names:
            parameter = self._model.net.get_parameter(name)
            parameter.grad = torch.zeros_like(parameter)
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate, was in zip(self.optimizer.param_groups, rates, before, strict=True):
            if not counts:
                group.update(was)
            group["lr"] = rate
        self._take(self._agreed)  # MADGRAD computes parameters as a mean, with rounding

    def reconfigure(self, plan: Plan) -> None:
        """Use a new plan from the next step on."""
        self._plan = plan

    # -- checkpoints

    def _load_global(self, state: State) -> None:
        super()._load_global(state)
        self._heard = None
        self._agreed = self._vector()
        self._begin()


@torch.no_grad()
def _copy_into(tensors: Sequence[Tensor], vector: Tensor) -> None:
    reals = [as_real(tensor) for tensor in tensors]
    parts = torch.split(vector, [real.numel() for real in reals])
    for real, part in zip(reals, parts, strict=True):
        real.copy_(part.view_as(real))


def _wide(value: Tensor) -> Tensor:
    """Return a tensor's elements as a real vector, [elements], in fp32 or fp64."""
    real = as_real(value).flatten()
    return real if real.dtype == torch.float64 else real.float()

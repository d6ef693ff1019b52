"""The part that all engines share: memory that ends, the loss scale, the norm and clipping of the
gradient, evaluation, state.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from motley.comm.collectives import all_gather_object, mark_now
from motley.comm.reducer import by_type
from motley.data.source import Batch, Tensors
from motley.engines.average import Named, ParameterAverage, trained
from motley.engines.named_state import (
    OptimizerMemory,
    State,
    fill_tied,
    load_model_state,
    model_state,
    part_of,
    snapshot,
)
from motley.engines.optimizer import Sharding, make_optimizer, try_optimizer, try_types
from motley.engines.out_of_memory import in_halves, out_of_memory, release, shortage
from motley.engines.protocol import EngineContext, LaunchedStep, StepResult
from motley.engines.step_timer import Clock
from motley.errors import MotleyError
from motley.faults import Phase
from motley.plan.plan import Plan
from motley.plan.wire import EngineTraits
from motley.tasks.model import TaskModel
from motley.tasks.task import weighs


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """2-norm of all gradients together, a scalar; not finite if any entry is not.

    Of sharded ones, of this rank's part.
    """
    return torch.nn.utils.get_total_norm(_gradients(parameters))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


@torch.no_grad()
def clip_factor(
    norm: Tensor, scale: float, most: float | None, correction: Tensor | None = None
) -> Tensor | None:
    """Return the factor, a scalar, that unscales and clips a gradient; None if there is none.

    Clips as torch.nn.utils.clip_grad_norm_ does; waits for nothing.

    Args:
        norm: of the gradients as they are, scaled; a scalar, the same on all ranks.
        scale: the loss scale in them. most: the norm to clip to, if any.
        correction: what else is in them, a scalar; None: nothing.
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
    """Multiply all gradients by :func:`clip_factor` in place, in one pass."""
    factor = clip_factor(norm, scale, most, correction)
    grads = _gradients(parameters)
    if factor is None or not grads:  # memory may have ended before there were any
        return
    # The factor has the widest type: in bf16 it would be wrong by up to 0.4 %.
    factor = factor.to(grads[0].device)
    for alike in by_type(grads):
        wide = alike[0].dtype in (torch.float32, torch.float64)
        torch._foreach_mul_(alike, factor.to(alike[0].dtype) if wide else factor.float())


@contextlib.contextmanager
def silenced(net: nn.Module, empty: bool) -> Iterator[None]:
    """A pass through a model, forward and backward; where it is of a rank without samples all
    gradients are zeros, whatever is computed: 0 times what is not finite would not be."""
    hooks: list[RemovableHandle] = []

    def silence(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    if empty:
        units = {net, *(part for part in net.modules() if isinstance(part, FSDPModule))}
        # FSDP gives a module the parameters that it computes with just before it does.
        hooks += [unit.register_forward_pre_hook(silence) for unit in units]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_types(model: TaskModel, known: Sequence[torch.dtype], engine: str, instead: str) -> None:
    """Raise MotleyError if a parameter that is trained has a type that an engine cannot add up.

    Args:
        known: the types that it can. engine: as a user names it. instead: what takes any type.
    """
    for name, parameter in model.net.named_parameters():
        if parameter.requires_grad and parameter.dtype not in known:
            others = name_types(known)
            raise MotleyError(
                f"{engine} adds up gradients of {others}, and {name} is of "
                f"{name_types([parameter.dtype])}: take {instead}, or make the parameter one of "
                f"{others}"
            )


def name_types(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of types, as in ``float32, bfloat16``."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@torch.no_grad()
def score(model: TaskModel, batch: Batch) -> Tensor:
    """Sums of the task's scores, in order of ``model.score_names``, then the weight and the number
    of the samples: float64 [k + 2]."""
    model.eval()
    scores = model(batch.data, scored=True)
    model.train()
    sums = [scores[name].sum().double() for name in model.score_names]
    return torch.stack([*sums, *sums[0].new_tensor([batch.weight, len(batch)])])


LEAST_CORRECTION = 1e-30  # of a gradient by its weight: if nothing counts it is 0, and stays so


class EngineBase:
    """What is the same in all engines, whatever the wire between ranks.

    An engine adds ``traits``, of its :class:`EngineFactory`; ``_accumulate``, which is
    :meth:`Engine.accumulate` with memory enough; ``_abandon``, which puts what is not finite in
    its place when there was not; ``_send``, which sends what the others wait for and the last
    backward pass has not sent; and ``_step``, which does the rest.
    """

    traits: EngineTraits
    replicated = True
    rescuable = diverges = False
    _sharding: Sharding | None = None

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        self._model, self._context = model, context
        self.scale, self.device = context.scale, context.device
        self.on_change: Callable[[], None] = lambda: None
        self.on_same: Callable[[], None] = lambda: None
        self.clock = Clock(context.device)
        # Gloo copies to a GPU in a stream of its own, for which no future waits.
        self._copies = context.device.type == "cuda" and dist.get_backend() != "nccl"
        self._short = ""  # of memory, in this step: what was found
        self._step_losses: list[Tensor] = []  # of this step's micro-batches
        # Where samples count differently, losses are divided by what the batch usually weighs, and
        # the gradient is corrected once all ranks know of its true weight.
        self._weighs = weighs(model.task)
        self._weight = 0.0  # of this rank's samples, in this step
        self._usual_weight = 1.0  # of the global batch, in this step
        self._trained = trained(model.net)
        self._parameters = list(self._trained.values())
        self.optimizer_traits = try_optimizer(context.config, context.device, self._sharding)
        try_types(context.config, model.net, context.device)
        self.optimizer = make_optimizer(model.net, context.config, self.optimizer_traits.fused)
        self.memory = OptimizerMemory(model.net, self.optimizer)

    @cached_property
    def average(self) -> ParameterAverage | None:
        """See :class:`Engine`. Made when it is first asked for: an engine may still put other
        tensors in the parameters' place while it is built."""
        config = self._context.config
        if not config.model_ema:
            return None
        return self._make_average(config.model_ema_decay, config.model_ema_warmup)

    def _make_average(self, decay: float, warmup: bool) -> ParameterAverage:
        return ParameterAverage(self._held, decay, warmup)

    def _held(self) -> Named:
        """What this rank holds of each parameter that is trained."""
        return {name: each.detach() for name, each in self._trained.items()}

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        """Each sample's loss, detached; what is backpropagated is their sum / _usual_weight."""
        raise NotImplementedError

    def _abandon(self, last: bool) -> None:
        pass

    def _send(self) -> None:
        pass

    def _step(self, loss_sum: Tensor, ready_s: float) -> StepResult:
        """Finish the global batch; tells this rank's numbers to the others on the way."""
        raise NotImplementedError

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """See :class:`Engine`. Another user may have taken the memory that was free before."""
        losses = None
        self._usual_weight = n_global * self._model.task.weight
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
                f"losses() of {type(self._model.task).__name__} gives a tensor of shape "
                f"{tuple(losses.shape)} for {len(batch)} samples; it should give one number a "
                "sample, 0 where nothing counts in it"
            )
        elif self._model.statistics:
            self._model.statistics.take(len(batch), n_global)
        if last:
            self._send()
        self._step_losses.append(losses)

    @property
    def reads_late(self) -> bool:
        """See :class:`Engine`."""
        return False

    def step(self) -> StepResult:
        """See :class:`Engine`."""
        return self.launch_step(late=False).read()

    def launch_step(self, late: bool) -> LaunchedStep:
        """See :class:`Engine`."""
        losses, self._step_losses = torch.cat(self._step_losses), []
        short, average = bool(self._short), self.average  # which begins before the first step
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
        """Begin :meth:`_step`; where nothing can be read late, take it."""
        result = self._step(loss_sum, ready_s)
        return LaunchedStep(lambda: result, wait=mark_now(self.device))

    def drop_gradients(self) -> None:
        """See :class:`Engine`. Only for what :attr:`reads_late`."""
        raise NotImplementedError

    def sync_parameters(self) -> None:
        """See :class:`Engine`. Parameters always are; what batch norms have seen is not."""
        if self._model.statistics:
            self._model.statistics.unite(self.on_change)
            self.on_same()

    def unite(self) -> None:
        """See :class:`Engine`."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """See :class:`Engine`."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        assert self.average is not None
        with self._changing():
            self.average.exchange()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """What belongs to the state changes, but not by a step."""
        self.on_change()
        yield
        self.on_same()

    def evaluate(self, batch: Batch) -> Tensor:
        """See :class:`Engine`. In halves if memory does not do for the whole."""
        if not self.replicated:
            return self._evaluate_together(batch)
        if not len(batch):
            return self._no_scores()
        whole = slice(0, len(batch))
        found = in_halves(lambda part: score(self._model, batch[part]), whole)
        return torch.stack(found).sum(dim=0)

    def _evaluate_together(self, batch: Batch) -> Tensor:
        if len(batch):
            return score(self._model, batch)
        score(self._model, Batch(self._model.blank(), (0,)))
        return self._no_scores()

    def _no_scores(self) -> Tensor:
        count = len(self._model.score_names) + 2
        return torch.zeros(count, dtype=torch.float64, device=self._context.device)

    def _losses(self, forward: Callable[[Tensors], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Each sample's loss, fp32 [n], and their sum; where every pass communicates.

        A rank without samples computes one nevertheless, silenced (see motley.engines.base):
        only a real pass takes part in all that the others do, in their order.
        """
        if not len(batch):
            losses = forward(self._model.blank())
            return losses.new_empty(0), losses.sum()
        losses = forward(batch.data)
        return losses, losses.sum()

    def _backward(self, loss: Tensor) -> None:
        self.clock.on_phase(Phase.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]

    def _told_weight(self, weights: Iterable[float]) -> float | None:
        """:attr:`StepResult.weight`, of what each rank told."""
        return math.fsum(weights) if self._weighs else None

    def _tell_short(self, ranks: Sequence[float]) -> dict[int, str]:
        """:attr:`StepResult.oom_ranks`, if any of ``ranks`` (one flag a rank) is; all call it."""
        if not any(ranks):
            return {}
        found, self._short = all_gather_object(self._short), ""
        return {rank: words for rank, words in enumerate(found) if words}

    def state(self) -> State:
        """See :class:`Engine`. All ranks hold the same, so rank 0 alone copies it."""
        return self.whole_state(snapshot) if dist.get_rank() == 0 else State()

    def load_state(self, state: State) -> None:
        """See :class:`Engine`."""
        self._load_model(state)
        self.memory.load(state)

    def _load_model(self, state: State) -> None:
        load_model_state(self._model.net, state.tensors)
        self._go_on_beside(state)

    def _go_on_beside(self, state: State) -> None:
        """What is kept beside the parameters, once they are loaded."""
        if self._model.statistics:
            self._model.statistics.forget()
        if self.average:
            self.average.load(state.tensors)

    def alike(self) -> State:
        """See :class:`Engine`."""
        return self.whole_state(Tensor.detach)

    def load_alike(self, state: State) -> None:
        """See :class:`Engine`."""
        self.load_state(state)

    def whole_state(self, keep: Callable[[Tensor], Tensor]) -> State:
        """See :class:`Engine`."""
        kept = self.memory.state(keep)
        tensors = model_state(self._model.net, keep) | self._average_state(keep) | kept.tensors
        if self.average and self.average.exchanged:
            self.average.put_back(tensors)
            fill_tied(self._model.net, tensors)
        return State(tensors, kept.plain)

    def _average_state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return self.average.state(keep) if self.average else {}

    def seen(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """See :class:`Engine`."""
        return self._model.statistics.state(keep) if self._model.statistics else {}

    def estimate_seen(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """See :class:`Engine`."""
        found = self._model.statistics.estimate(keep) if self._model.statistics else {}
        return {f"model.{name}": value for name, value in found.items()}

    def unite_seen(self, seen: dict[str, Tensor]) -> None:
        """See :class:`Engine`."""
        if self._model.statistics:
            self._model.statistics.go_on(seen)

    def own_state(self) -> dict[str, Tensor]:
        """See :class:`Engine`."""
        statistics = self._model.statistics
        kept = statistics.own_state() if statistics else {}
        return {f"statistics.{name}": snapshot(value) for name, value in kept.items()}

    def load_own_state(self, state: dict[str, Tensor]) -> list[str]:
        """See :class:`Engine`."""
        if self._model.statistics:
            self._model.statistics.load_own_state(part_of(state, "statistics"))
        return []

    def reconfigure(self, plan: Plan) -> None:
        """See :class:`Engine`. Each micro-step is told all that it needs of the plan."""

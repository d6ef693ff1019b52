"""Base class of engines, which has the optimizer, the evaluation and the state, but no step."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from motley.data.source import Batch
from motley.engines.named_state import (
    Named,
    OptimizerMemory,
    ParameterAverage,
    State,
    fill_tied,
    load_model_state,
    model_state,
    select_part,
    snapshot,
    trained,
)
from motley.engines.optimizer import Sharding, make_optimizer, try_optimizer, try_types
from motley.engines.out_of_memory import in_halves
from motley.engines.protocol import EngineContext, Scope
from motley.engines.step_timer import Clock
from motley.errors import MotleyError
from motley.plan.plan import Plan
from motley.tasks.model import TaskModel, select_gathered
from motley.tasks.task import LABEL, PREDICTED


@contextlib.contextmanager
def silenced(net: nn.Module, empty: bool) -> Iterator[None]:
    """Set all gradients of passes in a ``with`` block to zero, if the rank has no samples.

    Each gradient is replaced by zeros. A multiplication by 0 would turn infinite values into NaN.

    Args:
        net: the network.
        empty: True if the rank has no samples. False: nothing is changed.
    """
    hooks: list[RemovableHandle] = []

    def silence(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    if empty:
        units = {net, *(part for part in net.modules() if isinstance(part, FSDPModule))}
        # FSDP creates the parameters of a module just before the module computes.
        hooks += [unit.register_forward_pre_hook(silence) for unit in units]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_types(model: TaskModel, known: Sequence[torch.dtype], engine: str, instead: str) -> None:
    """Raise MotleyError if a trained parameter has a dtype whose gradients an engine cannot sum.

    Args:
        model: the model that is trained.
        known: dtypes that the engine can sum over ranks.
        engine: name of the engine for the message.
        instead: name of an engine that accepts any dtype, for the message.
    """
    for name, parameter in model.net.named_parameters():
        if parameter.requires_grad and parameter.dtype not in known:
            others = name_types(known)
            raise MotleyError(
                f"{engine} sums gradients of the types {others}, and the parameter {name} has the "
                f"type {name_types([parameter.dtype])}: take {instead}, or give the parameter one "
                "of these types"
            )


def name_types(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of dtypes, as in ``float32, bfloat16``."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@torch.no_grad()
def score(model: TaskModel, batch: Batch, counts: bool = True) -> Tensor:
    """Return the sums of the task's k scores over a batch, float64 [k + 2].

    The scores are in the order of ``model.score_names``. The last two entries are the total weight
    of the samples and the number of samples.

    Args:
        model: the model.
        batch: held-out samples.
        counts: True: also add the samples' labels and predicted classes to ``model.class_pairs``,
            their gathered scores to ``model.gathered``, and the samples with the largest loss to
            ``model.worst``, as far as the task has these.
    """
    model.eval()
    scores = model(batch.data, scored=True)
    model.train()
    sums = [scores[name].sum().double() for name in model.score_names]
    result = torch.stack([*sums, *sums[0].new_tensor([batch.weight, len(batch)])])
    if counts and {LABEL, PREDICTED} <= scores.keys():
        model.class_pairs.append(torch.stack([scores[LABEL].long(), scores[PREDICTED].long()]))
    if counts and model.worst is not None:
        pictures = model.task.pictures(batch.data)
        model.worst.add(batch.indices, scores, pictures, batch.weights)
    if counts and model.task.gathered:
        rows = select_gathered(model.task, scores, len(batch))
        model.gathered.append((batch.indices, rows))
    return result


class EngineBase:
    """Base class of all engines, which has the optimizer, the evaluation and the state.

    Subclasses add the step.
    """

    replicated = True
    _sharding: Sharding | None = None

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        self._model, self._context = model, context
        self.scale, self.device = context.scale, context.device
        self.on_change: Callable[[], None] = lambda: None
        self.on_same: Callable[[], None] = lambda: None
        self.clock = Clock(context.device)
        self._trained = trained(model.net)
        self._parameters = list(self._trained.values())
        self.optimizer_traits = try_optimizer(context.config, context.device, self._sharding)
        try_types(context.config, model.net, context.device)
        self.optimizer = make_optimizer(model.net, context.config, self.optimizer_traits.fused)
        self.memory = OptimizerMemory(model.net, self.optimizer)

    @cached_property
    def average(self) -> ParameterAverage | None:
        """Moving average of the parameters. None without the option ``--model-ema``.

        The average is created at the first access, because an engine may still replace the
        parameters' tensors while it is built.
        """
        config = self._context.config
        if not config.model_ema:
            return None
        return self._make_average(config.model_ema_decay, config.model_ema_warmup)

    def _make_average(self, decay: float, warmup: bool) -> ParameterAverage:
        return ParameterAverage(self._held, decay, warmup)

    def _held(self) -> Named:
        """Return the part of each trained parameter that this rank holds."""
        return {name: each.detach() for name, each in self._trained.items()}

    def sync_parameters(self) -> None:
        """Make the running statistics of batch norms equal on all ranks.

        The parameters of these engines are equal on all ranks after every step.
        """
        if self._model.statistics:
            self._model.statistics.unite(self.on_change)
            self.on_same()

    def unite(self) -> None:
        """Set the parameters to their mean over all ranks, if they differ between ranks."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use :attr:`average` as the model's parameters in a ``with`` block. All ranks call it."""
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
        """Report the start and the end of a ``with`` block that changes the state between steps.

        The context manager calls :attr:`on_change` before the block, and :attr:`on_same` after it.
        """
        self.on_change()
        yield
        self.on_same()

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the sums of the scores of held-out samples; see :func:`score`.

        If memory runs out, the method evaluates the batch in halves.
        """
        if not self.replicated:
            return self._evaluate_together(batch)
        if not len(batch):
            return self._no_scores()
        whole = slice(0, len(batch))
        result = in_halves(lambda part: score(self._model, batch[part]), whole)
        return torch.stack(result).sum(dim=0)

    def _evaluate_together(self, batch: Batch) -> Tensor:
        if len(batch):
            return score(self._model, batch)
        score(self._model, Batch(self._model.blank(), (0,)), counts=False)
        return self._no_scores()

    def _no_scores(self) -> Tensor:
        count = len(self._model.score_names) + 2
        return torch.zeros(count, dtype=torch.float64, device=self._context.device)

    def state(self, scope: Scope, keep: Callable[[Tensor], Tensor] = snapshot) -> State:
        """Return a part of the training state; see :meth:`Engine.state`."""
        match scope:
            case Scope.GLOBAL:
                return self._global_state()
            case Scope.HELD:
                return self._held_state(keep)
            case Scope.REPLICATED:
                return self._replicated_state()
            case Scope.ROWS:
                return self._rows()
            case Scope.RANK:
                return State(self._rank_state())
            case Scope.STATISTICS:
                return State(self._evaluated_state(keep))
            case Scope.BUFFERS:
                return State(self._estimate_buffers(keep))

    def load_state(self, scope: Scope, state: State) -> list[str]:
        """Restore a part of the training state; see :meth:`Engine.load_state`."""
        match scope:
            case Scope.GLOBAL:
                self._load_global(state)
            case Scope.REPLICATED:
                self._load_replicated(state)
            case Scope.ROWS:
                self._load_rows(state)
            case Scope.RANK:
                return self._load_rank(state.tensors)
            case Scope.STATISTICS:
                self._unite_seen(state.tensors)
            case _:
                raise ValueError(f"{scope} is read and not loaded")
        return []

    def _global_state(self) -> State:
        # All ranks hold the same state, so only rank 0 copies it.
        return self._held_state(snapshot) if dist.get_rank() == 0 else State()

    def _load_global(self, state: State) -> None:
        self._load_model(state)
        self.memory.load(state)

    def _load_model(self, state: State) -> None:
        load_model_state(self._model.net, state.tensors)
        self._go_on_beside(state)

    def _go_on_beside(self, state: State) -> None:
        """Load all state except the parameters. The caller has loaded the parameters already."""
        if self._model.statistics:
            self._model.statistics.reset()
        if self.average:
            self.average.load(state.tensors)

    def _replicated_state(self) -> State:
        return self._held_state(Tensor.detach)

    def _load_replicated(self, state: State) -> None:
        self._load_global(state)

    def _rows(self) -> State:
        raise NotImplementedError

    def _load_rows(self, state: State) -> None:
        raise NotImplementedError

    def _held_state(self, keep: Callable[[Tensor], Tensor]) -> State:
        saved = self.memory.state(keep)
        tensors = model_state(self._model.net, keep) | self._average_state(keep) | saved.tensors
        if self.average and self.average.exchanged:
            self.average.put_back(tensors)
            fill_tied(self._model.net, tensors)
        return State(tensors, saved.plain)

    def _average_state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return self.average.state(keep) if self.average else {}

    def _evaluated_state(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return self._model.statistics.state(keep) if self._model.statistics else {}

    def _estimate_buffers(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        result = self._model.statistics.estimate(keep) if self._model.statistics else {}
        return {f"model.{name}": value for name, value in result.items()}

    def _unite_seen(self, seen: dict[str, Tensor]) -> None:
        if self._model.statistics:
            self._model.statistics.go_on(seen)

    def _rank_state(self) -> dict[str, Tensor]:
        statistics = self._model.statistics
        saved = statistics.own_state() if statistics else {}
        return {f"statistics.{name}": snapshot(value) for name, value in saved.items()}

    def _load_rank(self, state: dict[str, Tensor]) -> list[str]:
        if self._model.statistics:
            self._model.statistics.load_own_state(select_part(state, "statistics"))
        return []

    def reconfigure(self, plan: Plan) -> None:
        """Do nothing. The values of a new plan reach the engine by :meth:`accumulate`."""

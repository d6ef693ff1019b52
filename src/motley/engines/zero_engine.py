"""The DeepSpeed engines: ZeRO with unequal shares and one loss scale.

DeepSpeed runs with fp32 parameters and without its own mixed precision. Autocast is inside the
model, and the loss scale is Motley's, the same number on every rank.

DeepSpeed runs some operations of a step separately for each parameter. This engine runs these
operations for all parameters at once. Separate operations would leave a GPU idle: for a third of a
step of ViT-L/16 on two H100s at stage 3, and for 4 of 163 ms at stage 1. At stage 3 the model is
sharded block by block while its initial values are drawn. No rank ever holds the whole model.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from motley.comm.collectives import all_gather, all_gather_floats
from motley.data.source import Batch, Tensors
from motley.engines.base import check_types, silenced
from motley.engines.import_deepspeed import comm, deepspeed, utils
from motley.engines.named_state import (
    Named,
    ParameterAverage,
    State,
    fill_tied,
    find_parameter,
    is_by_rows,
    model_state,
    rows_of_rank,
    snapshot,
)
from motley.engines.optimizer import is_elementwise
from motley.engines.optimizers import decode
from motley.engines.out_of_memory import no_second_try, out_of_memory
from motley.engines.protocol import EngineContext, StepResult
from motley.engines.step import LEAST_CORRECTION, StepEngine, gradient_norm, unscale_and_clip
from motley.engines.strategies.zero import TRAITS
from motley.engines.zero_config import ZeroOptions, config_path, read_zero_config
from motley.engines.zero_state import AverageOfParts, cut_state, gather_state, rows_in
from motley.errors import MotleyError
from motley.faults import Phase
from motley.tasks.check import found_unused, refuse_unused, without_gradient
from motley.tasks.model import TaskModel


def work_at_once(optimizer: Any, device: torch.device) -> None:
    """Make DeepSpeed's optimizer of stage 1, 2 or 3 process all parameters in joint operations.

    DeepSpeed computes the norm of each gradient separately, in fp64. At stage 3 DeepSpeed also
    gathers small parameters after each step, one by one. After this call, each small parameter is
    gathered together with the block that needs it first, in one message.

    Args:
        optimizer: DeepSpeed's optimizer, changed in place.
        device: device on which ranks communicate.
    """
    optimizer.persistent_parameters = []  # used at stage 3 alone
    group = optimizer.dp_process_group

    def get_grad_norm_direct(
        gradients: Sequence[Tensor], params: Sequence[Tensor], norm_type: float = 2.0
    ) -> Tensor:
        """Return the norm of the gradients of all ranks' partitions, a scalar.

        The result is -1 if the norm is not finite, as in DeepSpeed's own function.
        """
        own = [each for each in gradients if not getattr(each, "_zero_padding", False)]
        # A rank may have no part of a few small parameters.
        total = torch.nn.utils.get_total_norm(own, norm_type).to(device)
        squared = total.double().square()
        dist.all_reduce(squared, group=group)
        norm = squared.sqrt().float()
        return torch.where(norm.isfinite(), norm, -1.0)

    optimizer.get_grad_norm_direct = get_grad_norm_direct


def take_in_order(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Make DeepSpeed's optimizer of stage 2 or 3 take gradients in one order on all ranks.

    DeepSpeed stores gradients in a buffer in the order in which they arrive, and sums the buffers
    over all ranks. Autocast and torch.compile change this order. If only some ranks use autocast or
    torch.compile, the gradients of different parameters would be summed silently. After this call,
    a gradient that arrives too early is stored in its turn.

    Args:
        optimizer: DeepSpeed's optimizer, changed in place.
        parameters: the trained parameters in the order of the model. Each has a gradient in each
            pass.
    """
    name = "process_gradients"  # method of stage 2
    if not hasattr(optimizer, name):
        name = "reduce_ready_partitions_and_remove_grads"
    take = getattr(optimizer, name)
    turns = {id(each): turn for turn, each in enumerate(reversed(parameters))}
    waiting: dict[int, tuple[Any, ...]] = {}
    taken = 0

    def take_next(parameter: Tensor, *others: Any) -> None:
        nonlocal taken
        if turns[id(parameter)] < taken:  # a pass was broken off
            waiting.clear()
            taken = 0
        waiting[turns[id(parameter)]] = (parameter, *others)
        while taken in waiting:
            take(*waiting.pop(taken))
            taken += 1
        if taken == len(turns):
            taken = 0

    setattr(optimizer, name, take_next)


def _nothing(value: Tensor) -> Tensor:
    return value.new_empty(0)


class ZeroEngine(StepEngine):
    """The engine for stages 0 to 2 of ZeRO. See Zero3Engine for stage 3.

    DeepSpeed averages gradients over W ranks, so each loss has a factor W/N for N samples. With
    ``scale_wrt_gas=False`` DeepSpeed's own accumulation count has no effect.

    At stage 0, this class computes the norm, agrees on overflow with all ranks, unscales and clips
    the gradients, and steps the optimizer. At stages 1 to 3, DeepSpeed does this work on its
    partitions. DeepSpeed gets the loss scale before each backward pass.
    """

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        config = read_zero_config(
            config_path(context.config.group(ZeroOptions)), context, parameters
        )
        self._stage = int(config["zero_optimization"].get("stage", 0))
        self.traits = TRAITS[self._stage]
        self.equal_micro_steps, self.replicated = self._stage >= 2, self._stage < 3
        self.rescuable = self._stage == 0
        mode = context.config.clip_mode
        if self._stage and context.config.clip_grad is not None and mode != "norm":
            raise MotleyError(
                f"--clip-mode {mode}: at ZeRO stage {self._stage}, DeepSpeed clips only by the "
                "norm; take --clip-mode norm, --stage 0, or torch_dist/train.py"
            )
        refuse_unused(model, f"ZeRO stage {self._stage}")
        check_types(
            model, (torch.float32,), f"ZeRO stage {self._stage}",
            "torch_dist/train_vit.py --strategy ddp",
        )  # fmt: skip
        if scalars := [name for name, each in model.net.named_parameters() if not each.ndim]:
            raise MotleyError(
                "DeepSpeed does not support a parameter without a dimension, such as "
                f"{scalars[0]}; give it the shape [1], or take torch_dist/train_vit.py"
            )
        self._model = model
        with self._prepared(config):
            super().__init__(model, context)
        self._check_optimizer()
        self.loss_weight = context.size
        # DeepSpeed uses GPU number LOCAL_RANK, which is wrong if each rank sees only its own GPU.
        local = int(os.environ["LOCAL_RANK"])
        index = local if context.device.index is None else context.device.index
        self._engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(local_rank=local, device_rank=index),
            model=model,
            optimizer=self.optimizer,
            config=config,
            dist_init_required=False,
        )
        if self._stage:
            work_at_once(self._engine.optimizer, context.device)
        if self._stage >= 2:
            take_in_order(self._engine.optimizer, self._parameters)
        # At stages 0 and 1 this engine starts the reduction itself, to measure when compute ends.
        self._engine.enable_backward_allreduce = self._stage >= 2

    def _prepared(self, config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Prepare the model, and return a context in which the optimizer is created.

        Args:
            config: configuration of DeepSpeed.
        """
        return contextlib.nullcontext()

    def _check_optimizer(self) -> None:
        """Raise MotleyError if ``--opt`` does not work with this stage.

        The optimizer may compute different values on partitions, have state that cannot be saved,
        or count steps wrongly.
        """
        traits, stage = self.optimizer_traits, self._stage
        others = ["torch_dist/train_vit.py", "an optimizer such as adamw"]
        if stage and traits.wraps:
            why = "wraps another optimizer, which DeepSpeed bypasses"
        elif stage and traits.nests:
            why = f"has lists in its state, and ZeRO stage {stage} cuts tensors"
            others.insert(0, "--stage 0")
        elif stage == 3 and traits.counts:
            why = "counts steps, and ZeRO stage 3 steps once for each part of the model"
            others.insert(0, "--stage 1")
        elif stage and isinstance(self.optimizer, torch.optim.Adagrad):
            why = (
                "computes other values once DeepSpeed has recreated it with one group of parameters"
            )
            others.insert(0, "--stage 0")
        elif stage and not is_elementwise(self._context.config):
            why = (
                f"computes with whole tensors, and ZeRO stage {stage} gives it flat parts of "
                "tensors, so it would compute other values without an error"
            )
            others.insert(0, "--stage 0")
        else:
            return
        raise MotleyError(
            f"--opt {self._context.config.opt} {why}; take {', '.join(others[:-1])} or {others[-1]}"
        )

    def _accumulate(self, batch: Batch, last: bool) -> Tensor:
        def forward(data: Tensors) -> Tensor:
            return self._forward(data, last)

        weight = self.loss_weight / self._nominal_weight
        if self.equal_micro_steps:
            with silenced(self._model.net, not len(batch)):
                losses, total = self._losses(forward, batch)
                self._backward(total * weight)
        else:
            losses = forward(batch.data)
            self._backward(losses.sum() * weight)
        self.clock.lap("compute", ready=last)
        return losses.detach()

    def _abandon(self, last: bool) -> None:
        if last or self._stage >= 2:
            loss = self._forward(self._model.blank(), last).sum() * math.nan
            self._backward(loss)
        self.clock.lap("compute", ready=last)

    def _send(self) -> None:
        if self._stage < 2:
            if not self._short and any(each.grad is None for each in self._parameters):
                names = without_gradient(self._model.net)
                raise found_unused(self._model, f"ZeRO stage {self._stage}", names)
            self._engine.allreduce_gradients()
            self.clock.lap("sync")

    def _forward(self, data: Tensors, last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        try:
            losses: Tensor = self._engine(data)
        except (RuntimeError, MemoryError) as error:
            if not self.replicated and out_of_memory(error):
                no_second_try(error, self.device, self.traits.words, "--stage 1")
            raise
        return losses

    def _backward(self, loss: Tensor) -> None:
        self.clock.on_phase(Phase.BACKWARD)
        if self._stage == 0:
            loss = loss * self.scale.value
        else:
            self._engine.optimizer.override_loss_scale(self.scale.value)
        try:
            self._engine.backward(loss, scale_wrt_gas=False)
        except (RuntimeError, MemoryError) as error:
            if self._stage >= 2 and out_of_memory(error):
                no_second_try(error, self.device, self.traits.words, "--stage 1")
            raise

    def _step(self, loss_sum: Tensor, ready_s: float) -> StepResult:
        scale = self.scale.value
        values: list[Tensor | float] = [loss_sum, ready_s, float(bool(self._short)), self._weight]
        if self._stage == 0:
            rows, overflow, correction = self._step_stage_0(values)
            norm = rows[0][4] / scale / correction
        else:
            if self._weighs:  # DeepSpeed divides by the scale when it steps
                rows = all_gather_floats(values)
                self._engine.optimizer.override_loss_scale(scale * self._correction(rows))
            self._update()
            overflow = bool(self._engine.optimizer.overflow)
            norm = math.nan if overflow else float(self._engine.get_global_grad_norm())
            if not self._weighs:
                rows = all_gather_floats(values)
        short = self._find_oom_ranks([row[2] for row in rows])
        if not short:
            self.scale.update(overflow)
        self.clock.lap("opt")
        return StepResult(
            loss_sum=math.fsum(row[0] for row in rows),
            grad_norm=None if overflow else norm,
            overflow=overflow,
            loss_scale=scale,
            ready_s=tuple(row[1] for row in rows),
            weight=self._result_weight(row[3] for row in rows),
            oom_ranks=short,
        )

    def _update(self) -> None:
        self._engine.step()

    def _correction(self, rows: Sequence[Sequence[float]]) -> float:
        """Return the number by which the gradient must be divided, besides the loss scale.

        Args:
            rows: the numbers that all ranks exchange in a step, one row per rank. One of them is
                the total weight of the rank's samples.
        """
        if not self._weighs:
            return 1.0
        return max(LEAST_CORRECTION, math.fsum(row[3] for row in rows) / self._nominal_weight)

    def _step_stage_0(self, told: list[Tensor | float]) -> tuple[list[list[float]], bool, float]:
        """Take a step at stage 0: agree on overflow, unscale, clip and step.

        All ranks compute the same update.

        Args:
            told: numbers of this rank that all ranks exchange.

        Returns:
            Three values: the numbers and the norm of each rank, True if any norm is not finite, and
                the divisor of the gradient besides the loss scale.
        """
        gathered = all_gather([*told, gradient_norm(self._parameters)]).cpu()
        overflow = not bool(gathered[:, 4].isfinite().all())
        correction = self._correction(gathered.tolist())
        self.on_change()
        if overflow:  # a step without gradients would be counted by some optimizers
            self._engine.zero_grad()
        else:
            unscale_and_clip(
                self._parameters, gathered[0, 4], self.scale.value, self._norm_limit,
                torch.tensor(correction) if self._weighs else None,
            )  # fmt: skip
            self._clip_parts(self._parameters)
            self._update()
        return gathered.tolist(), overflow, correction

    def _global_state(self) -> State:
        # At stages 1 to 3, partitions are gathered.
        if self._stage == 0:
            return super()._global_state()
        first = self._context.rank == 0
        state = self._put_together(snapshot if first else _nothing)
        return state if first else State()

    def _put_together(self, keep: Callable[[Tensor], Tensor]) -> State:
        """Return the state at stage 1 and above, gathered from all ranks. All ranks call it.

        Args:
            keep: function that returns the value that this rank stores for each tensor.
        """
        net = self._model.net
        groups: dict[str, Tensor] = {}
        state = gather_state(self._engine.optimizer, self.optimizer, net, keep)
        state.tensors.update(self._average_state(keep))
        fill_tied(net, state.tensors)
        state.plain["groups"] = self.memory.groups(groups)
        state.tensors.update({name: keep(each) for name, each in groups.items()})
        return state

    def _replicated_state(self) -> State:
        # From stage 1 on, the optimizer's state is sharded.
        if self._stage == 0:
            return super()._replicated_state()
        return State(
            model_state(self._model.net, Tensor.detach) | self._average_state(Tensor.detach)
        )

    def _load_replicated(self, state: State) -> None:
        if self._stage == 0:
            super()._load_replicated(state)
        else:
            self._load_model(state)

    def _load_global(self, state: State) -> None:
        if self._stage == 0:
            super()._load_global(state)
            return
        state = State(decode(state.tensors), state.plain)
        if any(name.startswith("optimizer.") for name in state.tensors):
            # Partitions get their slots only by a step, here with a gradient of zeros. The step
            # decays the weights, so they are loaded afterwards. If the checkpoint has no slots, no
            # step was taken yet, and this one must not be counted.
            with silenced(self._model.net, empty=True):
                self._backward(self._forward(self._model.blank(), last=True).sum())
            self._send()
            self._update()
        cut_state(state, self._engine.optimizer, self.optimizer, self._model.net)
        self._go_on_beside(state)
        self.memory.load_groups(state)


def cut_model(model: TaskModel, config: Mapping[str, Any]) -> None:
    """Divide each parameter among the ranks, and keep only this rank's shard.

    All ranks call this function. Each block gets its initial values and is sharded before the next
    block gets its values. Parameters outside of blocks are sharded module by module.

    Args:
        model: the model.
        config: configuration of DeepSpeed.
    """
    blocks = list(model.task.blocks(model.net).values())
    if blocks and _backward_reaches_blocks(model, blocks):  # gathers a block's parameters together
        utils.set_z3_leaf_modules(model, list({type(block) for block in blocks}))
    backend = deepspeed.get_accelerator().communication_backend_name()
    comm.init_distributed(backend, dist_init_required=False)  # DeepSpeed would do it too late
    with _on(model.device):
        for part in (*blocks, *reversed(list(model.net.modules()))):  # children before parents
            model.fill(part)
            if not all(hasattr(each, "ds_id") for each in part.parameters()):
                # DeepSpeed changes the configuration, hence the copy.
                deepspeed.zero.Init(module=part, config_dict_or_path=deepcopy(dict(config)))


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to a device's index in a ``with`` block.

    DeepSpeed shards on the GPU whose index is LOCAL_RANK. This index is wrong if each rank sees
    only its own GPU.
    """
    before = os.environ["LOCAL_RANK"]
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def _backward_reaches_blocks(model: TaskModel, blocks: Sequence[nn.Module]) -> bool:
    """Return True if the backward pass continues into the layers before each block.

    If the backward pass ends in a block, DeepSpeed releases the block's parameters too early. This
    happens if the layers before the block are not trained.
    """
    result = []

    def look(_: nn.Module, given: Any, named: Any) -> None:
        tensors = [each for each in tree_leaves((given, named)) if isinstance(each, Tensor)]
        result.append(any(tensor.requires_grad for tensor in tensors))

    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    by_blocks = model.by_blocks
    with by_blocks.folded(model.device) if by_blocks else contextlib.nullcontext():
        model(model.blank())
    for hook in hooks:
        hook.remove()
    return all(result)


@contextlib.contextmanager
def true_shapes(net: nn.Module) -> Iterator[None]:
    """Give sharded parameters their true shape in a ``with`` block, without memory.

    An optimizer needs the shape to distinguish matrices, which have weight decay, from vectors.
    """
    cut: list[Any] = [each for each in net.parameters() if hasattr(each, "ds_shape")]
    held = [each.data for each in cut]
    for each in cut:
        each.data = torch.zeros((), dtype=each.dtype, device=each.device).expand(each.ds_shape)
    try:
        yield
    finally:
        for each, data in zip(cut, held, strict=True):
            each.data = data


class Zero3Engine(ZeroEngine):
    """The engine for stage 3 of ZeRO, which shards the parameters over the ranks."""

    def _prepared(self, config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Split the model into shards, and return a context in which the optimizer is created.

        The model is sharded first, because it may be too large for one rank.
        """
        cut_model(self._model, config)
        return true_shapes(self._model.net)

    def _held(self) -> Named:
        """Return the part of each trained parameter that this rank holds between two passes."""
        parts: dict[str, Any] = self._trained
        return {name: each.ds_tensor for name, each in parts.items()}

    def _make_average(self, decay: float, warmup: bool) -> ParameterAverage:
        return AverageOfParts(self._trained, self._held, decay, warmup)

    def _rows(self) -> State:
        # DeepSpeed's parts may end within a row, so each parameter is gathered, and each rank takes
        # its rows.
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def take_rows(value: Tensor) -> Tensor:
            return snapshot(value[slice(*rows_of_rank(len(value), rank, ranks))]
                            if value.ndim else value)  # fmt: skip

        state = self._put_together(take_rows)
        tensors = {name: each for name, each in state.tensors.items() if each.ndim or rank == 0}
        return State(tensors, state.plain)

    def get_rows(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the range of rows of a whole tensor that this rank loads. None: all rows."""
        own: Any = find_parameter(name, self._model.net)
        if not shape or own is None or not is_by_rows(shape, own.ds_shape):
            return None
        return rows_in(own)

    def _load_rows(self, state: State) -> None:
        self._load_global(state)

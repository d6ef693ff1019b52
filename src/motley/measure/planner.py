"""The planner, which opens the data, builds the model, and makes the plan.

The planner refuses a model that cannot fit in memory. The plan comes from ``--shares``, from the
run to continue, or from measurements.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from motley.checkpoint.run import Run
from motley.cluster.gpus import MIB
from motley.comm.modes import parse_wire
from motley.comm.modes.numbers import EXACT
from motley.config.option import Decides
from motley.config.options import Config
from motley.engines.optimizer import kept_numbers
from motley.engines.optimizers import own_optimizers
from motley.errors import MotleyError, NoMemoryError
from motley.launch.world import World
from motley.measure.device import room_mib
from motley.measure.measured_plan import Planned, measure_and_plan
from motley.measure.process_group import (
    ProcessGroup,
    join_process_group,
    kept_workers,
    leave_process_group,
    shrink_group,
)
from motley.plan.forecast import Forecast
from motley.plan.length import make_ramp
from motley.plan.memory import (
    Foreseen,
    MemoryNeed,
    ModelSize,
    amount,
    enough_ranks,
    estimate_rank_memory,
)
from motley.plan.plan import Rank, make_plan, whole_share_pieces
from motley.plan.speeds import SpeedTable
from motley.plan.wire import EngineTraits, WireMode
from motley.tasks.build import build
from motley.tasks.builtin import get_task
from motley.tasks.check import check_task
from motley.tasks.model import AUTOCAST, TaskModel, common_type, set_matmul_precision
from motley.tasks.net import set_attention
from motley.tasks.task import Task


def prepare(
    task: Task, net: nn.Module, group: ProcessGroup, config: Config, traits: EngineTraits
) -> MemoryNeed:
    """Estimate the memory of a rank without activations, before anything is allocated.

    Raises:
        NoMemoryError: the rank needs more memory than is free.
    """
    need = _need(task, net, list(net.parameters()), group, config, traits)
    _check(need, group, config, traits, _room(group))
    return need


def narrow_type(
    task: Task, precisions: Collection[str], traits: EngineTraits
) -> torch.dtype | None:
    """Return the 16-bit dtype in which an engine gathers parameters; None means fp32."""
    return common_type(task, precisions) if traits.narrow_parameters else None


def estimate_memory(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits,
    planned: Planned,
) -> Planned:
    """Return the plan with the estimated memory of each rank, if no rank holds the whole model.

    Every launched rank calls this function.

    Raises:
        NoMemoryError: a rank needs more memory than is free.
    """
    own = None
    if model is not None and model.by_blocks and group.rank is not None:
        plan, rank = planned.plan, group.rank
        wire = AUTOCAST[plan.wire.dtype] or torch.float32
        parameters = model.every_parameter()
        need = _need(model.task, model.net, parameters, group, config, traits, wire.itemsize)
        sizes = plan.micro_batches[rank]
        steps = max(map(len, plan.micro_batches))  # all ranks take as many micro-steps
        if planned.speeds and sizes:
            activations = planned.speeds[rank].activations_mib(max(sizes))
            need = replace(
                need, activations=activations, accumulates=steps > 1 or traits.flat_parts
            )
        room = _room(group)
        _check(need, group, config, traits, room)
        own = rank, need, room
    result = sorted((each for each in world.allgather(own) if each is not None), key=lambda e: e[0])
    if not result:
        return planned
    needs, rooms = tuple(need for _, need, _ in result), tuple(room for *_, room in result)
    return replace(planned, foreseen=Foreseen(needs, rooms))


def _need(
    task: Task,
    net: nn.Module,
    parameters: Sequence[Tensor],
    group: ProcessGroup,
    config: Config,
    traits: EngineTraits,
    wire_bytes: int = 4,
) -> MemoryNeed:
    blocks = [sum(p.numel() for p in block.parameters()) for block in task.blocks(net).values()]
    # Without gathered parameters there are no pieces.
    cut = traits.gathered.cut(blocks) if traits.gathered else []
    pieces = [sum(blocks[piece]) for piece in cut]
    numbers = sum(each.numel() for each in parameters)
    size = ModelSize(
        numbers, sum(each.numel() for each in parameters if each.requires_grad),
        max(pieces, default=0), numbers - sum(pieces),
        kept_numbers(config) + config.model_ema,
    )  # fmt: skip
    is_narrow = narrow_type(task, group.precisions, traits) is not None
    return estimate_rank_memory(size, traits, group.size, is_narrow, wire_bytes)


def _room(group: ProcessGroup) -> float | None:
    """Return the MiB that this rank can use on its GPU; None for a CPU."""
    return room_mib(group.device) if group.device.type == "cuda" else None


def _check(
    need: MemoryNeed,
    group: ProcessGroup,
    config: Config,
    traits: EngineTraits,
    room: float | None,
) -> None:
    """Raise NoMemoryError if a rank needs more memory than its GPU or its host has."""
    if traits.shards_optimizer and not traits.fills_model:
        return  # the memory that such an engine needs is unknown
    assert group.rank is not None
    own = group.workers[group.rank]
    here = sum(worker.host == own.host for worker in group.workers)
    host = here * (need.peak if room is None else need.host)
    free = psutil.virtual_memory().available / MIB
    if room is not None and need.peak > room:
        where, needed, there = f"{own.device} of", need.peak, room
    elif host > free:
        where, needed, there = f"{here} rank{'s' * (here > 1)} on", host, free
    else:
        return
    changes = _changes(need, group, config, traits, there)
    raise NoMemoryError(
        f"the model does not fit in memory: {where} {own.host} would need {amount(needed)}, and "
        f"{amount(there)} are free. A rank needs {need.words()}. Take {', or '.join(changes)}"
    )


def _changes(
    need: MemoryNeed, group: ProcessGroup, config: Config, traits: EngineTraits, room: float
) -> list[str]:
    """Return the options that a user may change so that the model fits into memory."""
    on_gpu, result = group.device.type == "cuda", []
    if not traits.shards_parameters:
        result.append("--strategy fsdp")
    elif on_gpu and not need.in_host and (ranks := enough_ranks(need, group.size, room)):
        result.append(f"{ranks} such ranks")
    if not traits.flat_parts:
        result += [
            f"--opt {own.name}" for own in own_optimizers() if own.codec and own.like == config.opt
        ]
    if traits.gathered:
        result += traits.gathered.options
    if need.activations:
        result.append("a smaller --micro-batch")
        if not config.grad_checkpointing:
            result.append("--grad-checkpointing")
    if traits.shards_parameters and on_gpu and "parameters" not in need.in_host:
        result.append("--offload parameters")
    return [*result, "a smaller model"]


# A function that wraps a task's network, in a precision, on a device.
ModelFactory = Callable[[Task, nn.Module, str, torch.device], TaskModel]


def open_model(
    group: ProcessGroup,
    config: Config,
    make: ModelFactory = TaskModel,
    traits: EngineTraits | None = None,
) -> TaskModel | None:
    """Open the data and build the model; return None on a rank that is left out.

    Args:
        group: process group of the ranks.
        config: the options.
        make: function that makes the module around the network.
        traits: traits of the engine that will train the model; None: the model is only measured.

    Raises:
        MotleyError: the task has an error, or the model does not fit in memory.
    """
    if group.rank is None:
        return None
    traits = traits or EngineTraits()
    task, precision = get_task(config), group.precisions[group.rank]
    set_matmul_precision(precision)
    net, by_blocks = build(task, config)
    held = 0.0
    if by_blocks:
        held = prepare(task, net, group, config, traits).beside_activations
        by_blocks.fold(group.device)
    sometimes_unused = check_task(TaskModel(task, net, "fp32", group.device))
    set_attention(net, config.attention)
    model = make(task, net, precision, group.device)
    model.by_blocks, model.held_mib = by_blocks, held
    if task.sometimes_unused and not sometimes_unused:
        sometimes_unused = tuple(key for key, each in net.named_parameters() if each.requires_grad)
    model.sometimes_unused = sometimes_unused
    model.try_attention(config.attention)
    if by_blocks and (dtype := narrow_type(task, group.precisions, traits)):
        by_blocks.narrow(dtype)
    return model


def plan_batch(
    world: World,
    run: Run | None,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits | None = None,
) -> tuple[ProcessGroup, Planned]:
    """Plan the number of samples that each rank takes. Every launched rank calls it.

    Args:
        world: the ranks.
        run: the run, which may be a continued one; None: nothing is trained.
        group: process group of the ranks.
        model: the model; None on a rank that is left out.
        config: the options.
        traits: traits of the engine; None: an engine that supports every device and wire mode.

    Returns:
        The ranks that train, and their plan. Hosts that would make a step longer are left out.
    """
    traits = traits or EngineTraits()
    named = config.wire
    requested = named and named.in_job(group.precisions)
    _check_engine(requested, group, traits)
    grain = check_grain(get_task(config), config.batch_size, group.size)
    if config.shares is not None:
        shares = config.shares.for_ranks(group.size)
        sizes = (
            config.micro_batch.for_ranks(group.size)
            if config.micro_batch
            else whole_share_pieces(config.batch_size, shares, grain)
        )
        mode = requested if requested is not None and group.size > 1 else EXACT
        planned = Planned(make_plan(config.batch_size, shares, sizes, mode, grain=grain))
    elif run is not None and (before := _plan_before(world, run, group, config, traits)):
        group, planned = before
    else:
        equal, least = (1.0,) * group.size, (grain,) * group.size
        most = config.micro_batch.for_ranks(group.size) if config.micro_batch else least
        # Refuses a small batch, or a micro-batch of less than a group, before anything is measured.
        make_plan(config.batch_size, equal, most, EXACT, grain=grain)
        group, planned = measure_and_plan(world, run, group, model, config, traits, requested)
    if (taken := planned.plan.wire).is_inexact:
        planned = planned.with_note(taken)
    elif named is not None and named != requested and not named.is_inexact:
        planned = planned.with_note(named)
    return group, estimate_memory(world, group, model, config, traits, planned)


def plan_only(world: World, config: Config) -> tuple[ProcessGroup, Planned]:
    """Make a plan on all ranks, without training.

    Returns:
        The ranks that would train, and their plan.

    Raises:
        MotleyError: the options already set the shares.
    """
    if config.shares is not None:
        raise MotleyError(
            "--shares sets the split already; leave it out to see the plan that Motley would choose"
        )
    task = get_task(config)
    world.once_per_node(task.prepare)
    group = join_process_group(world, config.precision, config.hosts)
    group, planned = plan_batch(world, None, group, open_model(group, config), config)
    if group.rank is not None:
        leave_process_group()
    return group, planned


def check_grain(task: Task, batch_size: int, ranks: int) -> int:
    """Return the number of samples of a task that stay together in one micro-batch.

    Args:
        task: the task.
        batch_size: the global batch.
        ranks: number of ranks. Each rank needs at least one group of samples.

    Raises:
        MotleyError: the batch size is no multiple of the number.
    """
    grain = task.grain
    for global_batch in make_ramp(batch_size).batches():
        if global_batch % grain == 0:
            continue
        less = global_batch // grain * grain
        text = global_batch if batch_size == global_batch else f"{batch_size}: {global_batch}"
        raise MotleyError(
            f"--batch-size {text} is not a multiple of {grain}, and {grain} samples "
            f"{task.grain_is}; take {f'{less} or ' if less else ''}{less + grain}"
            + _other_group(task, global_batch, ranks)
        )
    return grain


def _other_group(task: Task, batch_size: int, ranks: int) -> str:
    """Return a phrase that suggests a ``--bn-group`` that divides the batch; may be empty."""
    if "--bn-group" not in task.grain_is:
        return ""
    most = min(task.grain, batch_size // ranks)
    largest = max((size for size in range(1, most + 1) if batch_size % size == 0), default=0)
    return f", or --bn-group {largest}" if largest > 1 else ""


def _check_engine(asked: WireMode | None, group: ProcessGroup, traits: EngineTraits) -> None:
    """Raise MotleyError if the engine does not support these devices or the given ``--wire``."""
    if group.is_mixed and not traits.mixed:
        raise MotleyError(
            f"{traits.words}, which {group.kinds} cannot do together. Leave out one kind with "
            "--hosts, or train with torch_dist/train_vit.py --strategy ddp"
        )
    if asked is not None and not traits.can(asked):
        raise MotleyError(
            f"--wire {asked} does not work with this strategy: {traits.words}, whole or rounded "
            "to 16 bits. Choose exact, bf16 or fp16, or train with torch_dist/train_vit.py "
            "--strategy ddp"
        )
    if asked is not None and group.is_mixed and not asked.mixes_devices:
        raise MotleyError(
            f"--wire {asked} does not work with {group.kinds} together; choose exact, bf16 or "
            "fp16, or leave out one kind with --hosts"
        )
    if asked is not None and asked.slow_rank is not None and not asked.slow_rank < group.size > 2:
        raise MotleyError(
            f"--wire {asked}: /leafK spares the link of rank K, counted from 0, and needs 3 or "
            f"more ranks; {group.size} ranks take part. Leave the choice to the plan with --wire "
            "exact"
        )


def _are(workers: Sequence[Rank], before: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the ranks are equal to those that a run has recorded in its run.json.

    Facts that an older run.json lacks are not compared.
    """
    pairs = zip(workers, before, strict=False)
    is_equal = all(old.items() <= asdict(worker).items() for worker, old in pairs)
    return is_equal and len(workers) == len(before)


def _plan_before(
    world: World, run: Run, group: ProcessGroup, config: Config, traits: EngineTraits
) -> tuple[ProcessGroup, Planned] | None:
    """Return the first plan of the run to continue, and its ranks, if they still apply.

    The result is None if the ranks, the options or the engine differ. With the same plan the resume
    is bit-exact. A run that changed its plan on the way does not resume bit-exactly.
    """
    content = world.from_first(run.read_continued)
    old: dict[str, Any] = content.get("config", {})
    ranks: list[dict[str, Any]] = content.get("ranks", [])
    left_out: list[dict[str, Any]] = content.get("left_out", [])
    trained = {rank["rank"] for rank in ranks}
    workers = kept_workers(group.workers, trained)
    started = trained | {rank["rank"] for rank in left_out} == set(range(world.size))
    if not ranks or not started or not _are(workers, ranks):
        return None
    same = config.as_json(Decides.SPEED | Decides.PLAN) | get_task(config).identity()
    if any(old.get(key) != value for key, value in same.items()):
        return None
    plan = content["plan"]
    wire = parse_wire(plan.get("wire", "auto"))
    if wire is None or plan.get("overlaps") != traits.overlaps:  # or of an older version
        return None
    if plan.get("sends") != traits.numbers:
        return None
    speeds = [SpeedTable.from_json(each) for each in plan["speeds"]]
    known = plan["forecast"] and Forecast.from_json(plan["forecast"])
    if len(workers) < group.size:
        reasons = {entry["rank"]: entry["reason"] for entry in left_out}
        group = shrink_group(world, group, trained, reasons)
    made = make_plan(
        plan["global_batch"], plan["shares"], plan["max_micro_batch"], wire, plan["buckets"],
        get_task(config).grain,
    )  # fmt: skip
    return group, Planned(made, tuple(speeds), known)

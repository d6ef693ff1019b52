"""The memory that a model which no rank holds whole is going to take, estimated before it is
built; one that cannot fit is refused.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import psutil
import torch
from torch import Tensor, nn

from motley.cluster.device_facts import MIB
from motley.config.options import Config
from motley.engines.fsdp import pieces_of
from motley.engines.optimizer import kept_numbers
from motley.engines.own_optimizer import own_optimizers
from motley.errors import NoMemoryError
from motley.launch.world import World
from motley.measure.device import room_mib
from motley.measure.measured_plan import Planned
from motley.measure.process_group import ProcessGroup
from motley.plan.engine_traits import EngineTraits
from motley.plan.memory import Foreseen, MemoryNeed, ModelSize, amount, enough_ranks, need_of
from motley.tasks.model import AUTOCAST, TaskModel, common_type
from motley.tasks.task import Task


def prepare(
    task: Task, net: nn.Module, group: ProcessGroup, config: Config, traits: EngineTraits
) -> MemoryNeed:
    """What a rank is going to hold besides activations, before there is anything.

    Raises:
        NoMemoryError: more than there is.
    """
    need = _need(task, net, list(net.parameters()), group, config, traits)
    _check(need, group, config, traits, _room(group))
    return need


def narrow_type(
    task: Task, precisions: Collection[str], traits: EngineTraits
) -> torch.dtype | None:
    """The 16 bits that an engine gathers parameters in; None: it does so in fp32, or not at all."""
    return common_type(task, precisions) if traits.narrow_parameters else None


def estimate_memory(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits,
    planned: Planned,
) -> Planned:
    """The plan, with what each rank is going to hold, if none holds the whole model. Every launched
    rank calls it.

    Raises:
        NoMemoryError: more than there is.
    """
    own = None
    if model is not None and model.by_blocks and group.rank is not None:
        plan, rank = planned.plan, group.rank
        wire = AUTOCAST[plan.wire.dtype] or torch.float32
        parameters = model.every_parameter()
        need = _need(model.task, model.net, parameters, group, config, traits, wire.itemsize)
        sizes = plan.micro_batches[rank]
        steps = max(map(len, plan.micro_batches))  # of those that communicate all take as many
        if planned.speeds and sizes:
            activations = planned.speeds[rank].activations_mib(max(sizes))
            need = replace(
                need, activations=activations, accumulates=steps > 1 or traits.flat_parts
            )
        room = _room(group)
        _check(need, group, config, traits, room)
        own = rank, need, room
    found = sorted((each for each in world.allgather(own) if each is not None), key=lambda e: e[0])
    if not found:
        return planned
    needs, rooms = tuple(need for _, need, _ in found), tuple(room for *_, room in found)
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
    blocks = list(task.blocks(net).values())
    pieces = [
        sum(each.numel() for block in piece for each in block.parameters())
        for piece in ([[block] for block in blocks] if traits.flat_parts else pieces_of(blocks))
    ]
    numbers = sum(each.numel() for each in parameters)
    size = ModelSize(
        numbers, sum(each.numel() for each in parameters if each.requires_grad),
        max(pieces, default=0), numbers - sum(pieces),
        kept_numbers(config) + config.model_ema,
    )  # fmt: skip
    is_narrow = narrow_type(task, group.precisions, traits) is not None
    return need_of(size, traits, group.size, is_narrow, wire_bytes)


def _room(group: ProcessGroup) -> float | None:
    """MiB that this rank's GPU has for it; None for a processor."""
    return room_mib(group.device) if group.device.type == "cuda" else None


def _check(
    need: MemoryNeed,
    group: ProcessGroup,
    config: Config,
    traits: EngineTraits,
    room: float | None,
) -> None:
    """NoMemoryError if a rank needs more than its GPU or its host has."""
    if traits.shards_optimizer and not traits.fills_model:
        return  # of such an engine nobody knows what it holds
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
        f"the model does not fit: {where} {own.host} would hold {amount(needed)}, and "
        f"{amount(there)} are free; of a rank that is {need.words()}. Take {', or '.join(changes)}"
    )


def _changes(
    need: MemoryNeed, group: ProcessGroup, config: Config, traits: EngineTraits, room: float
) -> list[str]:
    """What a user may do."""
    on_gpu, found = group.device.type == "cuda", []
    if not traits.shards_parameters:
        found.append("--strategy fsdp")
    elif on_gpu and not need.in_host and (ranks := enough_ranks(need, group.size, room)):
        found.append(f"{ranks} such ranks")
    if not traits.flat_parts:
        found += [
            f"--opt {own.name}" for own in own_optimizers() if own.codec and own.like == config.opt
        ]
    if traits.keeps_gathered:
        found.append("--reshard-after-forward")
    if need.activations:
        found.append("a smaller --micro-batch")
        if not config.grad_checkpointing:
            found.append("--grad-checkpointing")
    if traits.shards_parameters and on_gpu and "parameters" not in need.in_host:
        found.append("--offload parameters")
    return [*found, "a smaller model"]

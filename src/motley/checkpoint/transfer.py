"""Moves training state between ranks, and to checkpoints: gather, save, spread."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.store import Checkpoints
from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.engines.named_state import State
from motley.engines.protocol import Engine, HoldsParts
from motley.plan.length import TrainState
from motley.plan.plan import Plan


@dataclass(frozen=True)
class Kept:
    """What a rank holds of a job, apart from its group.

    Attributes:
        state: where training stood. plan: how a full batch was split then.
        found: parameters, optimizer and what belongs to them, on the CPU. scale: of the loss.
        seen: what its batch norms have, since all ranks' were united.
        estimated: buffers of the batch norms, for a checkpoint that this rank writes alone.
    """

    state: TrainState
    plan: Plan
    found: State
    scale: dict[str, Any]
    seen: dict[str, Tensor]
    estimated: dict[str, Tensor]


def save(
    engine: Engine, checkpoints: Checkpoints, position: TrainState, config: dict[str, Any]
) -> None:
    """Take a checkpoint, which is written behind the training, by rank 0, or of ranks that cut the
    model and see its disk by each; all ranks call it."""
    if checkpoints.in_parts and isinstance(engine, HoldsParts):
        _save_parts(engine, engine.part(), checkpoints, position, config)
        return
    state = engine.state()
    own: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object(engine.own_state(), own if first else None)
    if not first:
        return
    tensors = dict(state.tensors)
    for rank, part in enumerate(own):
        tensors |= {f"ranks.{rank}.{name}": value for name, value in part.items()}
    progress = progress_of(position, len(own), engine.scale.state_dict(), config, state.plain)
    checkpoints.save_behind(tensors, progress)


def _save_parts(
    engine: Engine,
    part: State,
    checkpoints: Checkpoints,
    position: TrainState,
    config: dict[str, Any],
) -> None:
    checkpoints.wait()  # all do: rank 0 waits for each rank's part of the one before
    rank, ranks = dist.get_rank(), dist.get_world_size()
    told: list[Any] = [checkpoints.begin_parts(position.step) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0, device=engine.device)
    if rank > 0:
        checkpoints.save_part_behind(told[0], rank, part.tensors, position.step)
        return
    progress = progress_of(position, ranks, engine.scale.state_dict(), config, part.plain)
    checkpoints.save_parts_behind(told[0], ranks, part.tensors, progress)


def progress_of(
    position: TrainState,
    ranks: int,
    scale: dict[str, Any],
    config: dict[str, Any],
    optimizer: dict[str, Any],
) -> dict[str, Any]:
    """What a checkpoint tells besides tensors.

    Args:
        ranks: whose own state it has. scale, optimizer: their states.
    """
    return {**asdict(position), "ranks": ranks, "scale": scale, "config": config,
            "optimizer": optimizer}  # fmt: skip


def go_on(engine: Engine, kept: Kept) -> tuple[TrainState, list[str]]:
    """Continue from what each rank has kept of a group that has broken; all ranks call it.

    Those who were a step ahead have it right: a step that one has finished is finished. Where all
    have finished the same, theirs are equal to the bit, and nothing is sent. Ranks that diverge are
    steps apart, and what each has learned counts: they go on from the mean, at rank 0's step.

    Returns:
        As motley.checkpoint.resume.resume.
    """
    state, notes = _unite(engine, kept) if engine.diverges else (_newest(engine, kept), [])
    return state, [*notes, *engine.load_own_state({})]


def _newest(engine: Engine, kept: Kept) -> TrainState:
    # Of the same step, those who have united what their batch norms had seen are ahead.
    steps = kept.seen.get("steps")
    own = float(kept.state.step), 0.0 if steps is None else -float(steps.max())
    told = all_gather_floats(own)
    newest, state = told.index(max(told)), kept.found
    position: TrainState
    position, plain, scale = all_gather_object((kept.state, state.plain, kept.scale))[newest]
    if min(told) < max(told):
        tensors = state.tensors if dist.get_rank() == newest else {}
        state = State(spread(tensors, engine.device, newest), plain)
    engine.load_state(state)
    engine.scale.load_state_dict(scale)
    engine.unite_seen({} if own[1] < told[newest][1] else kept.seen)  # it is in there already
    return position


def _unite(engine: Engine, kept: Kept) -> tuple[TrainState, list[str]]:
    positions = all_gather_object(kept.state)
    engine.load_state(kept.found)
    engine.scale.load_state_dict(kept.scale)
    engine.unite()
    engine.unite_seen(kept.seen)
    steps = [position.step for position in positions]
    where = f"{min(steps)} to {max(steps)}" if min(steps) < max(steps) else f"{steps[0]}"
    note = (
        f"continuing from the mean of those who are left, at their steps {where}; what the lost "
        "rank had learned and not yet sent is lost"
    )
    return positions[0], [note]


def spread(tensors: dict[str, Tensor], device: torch.device, source: int = 0) -> dict[str, Tensor]:
    """One rank's tensors on all ranks, on the CPU: no device need hold a whole model's at once."""
    header: list[Any] = [[(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]]
    dist.broadcast_object_list(header, src=source, device=device)
    found, first = {}, dist.get_rank() == source
    for name, shape, dtype in header[0]:
        tensor = (
            tensors[name].to(device, copy=True).contiguous()
            if first
            else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(tensor, src=source)
        found[name] = tensor.cpu()
    return found

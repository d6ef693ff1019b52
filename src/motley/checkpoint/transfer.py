"""Moves training state between ranks and checkpoints: gather, save, load, spread."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.read import newest_whole
from motley.checkpoint.store import Checkpoints
from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.config.option import Decides, flag_of
from motley.config.options import Config
from motley.engines.optimizer_state import State
from motley.engines.protocol import Engine
from motley.errors import MotleyError
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.tasks.find import identity_of

_PROGRESS = ("epoch", "consumed", "ranks", "scale", "config")  # what a checkpoint must tell


@dataclass(frozen=True)
class Kept:
    """What a rank holds of a job, apart from its group.

    Attributes:
        state: where training stood. plan: how a full batch was split then.
        found: parameters, optimizer and what belongs to them, on the CPU. scale: of the loss.
        seen: what its batch norms have, since all ranks' were united.
    """

    state: TrainState
    plan: Plan
    found: State
    scale: dict[str, Any]
    seen: dict[str, Tensor]


def save(
    engine: Engine, checkpoints: Checkpoints, position: TrainState, config: dict[str, Any]
) -> None:
    """Take a checkpoint, which rank 0 writes behind the training; all ranks call it."""
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


def resume(
    engine: Engine, folders: list[Path], config: Config, now: dict[str, Any], device: torch.device
) -> tuple[TrainState, list[str]]:
    """Continue from the first whole checkpoint of ``folders``; all ranks call it.

    Rank 0 reads and gives everything to the others, so the folders need exist there alone.

    Args:
        now: what a checkpoint keeps of ``config``.

    Returns:
        Where training stands, and what the user should know.
    """
    if not folders:
        return TrainState(), []
    content: list[Any] = [None, None, None]
    tensors: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        try:
            found, tensors, progress, damaged = newest_whole(folders, _PROGRESS)
            notes = [f"not used: {problem}" for problem in damaged]
            content = [progress, notes + _differences(progress["config"], now, config), str(found)]
        except MotleyError as error:  # the others must hear of it
            content = [None, str(error), None]
    dist.broadcast_object_list(content, src=0, device=device)
    progress, notes, source = content
    if progress is None:
        raise MotleyError(notes)
    own = _scatter_own(tensors, progress["ranks"])
    shared = {n: t for n, t in tensors.items() if not n.startswith("ranks.")}
    engine.load_state(State(spread(shared, device), progress.get("optimizer", {})))
    if progress["config"]["loss_scale"] == now["loss_scale"]:  # else: asked for anew
        engine.scale.load_state_dict(progress["scale"])
    position = TrainState(progress["step"], progress["epoch"], progress["consumed"])
    notes += engine.load_own_state(own)
    return position, [f"continuing from {source} at step {position.step}", *notes]


def go_on(engine: Engine, kept: Kept) -> tuple[TrainState, list[str]]:
    """Continue from what each rank has kept of a group that has broken; all ranks call it.

    Those who were a step ahead have it right: a step that one has finished is finished. Where all
    have finished the same, theirs are equal to the bit, and nothing is sent. Ranks that diverge are
    steps apart, and what each has learned counts: they go on from the mean, at rank 0's step.

    Returns:
        As :func:`resume`.
    """
    state, notes = _unite(engine, kept) if engine.diverges else (_newest(engine, kept), [])
    return state, [*notes, *engine.load_own_state({})]


def _newest(engine: Engine, kept: Kept) -> TrainState:
    # Of the same step, those who have united what their batch norms had seen are ahead.
    own = float(kept.state.step), -float(kept.seen.get("steps", 0))
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


def _differences(saved: dict[str, Any], now: dict[str, Any], config: Config) -> list[str]:
    """What is said where the run goes on with other options; MotleyError if it cannot."""

    def differing(decides: Decides) -> list[str]:
        return [
            f"{flag_of(declared)} {now[name]} (the checkpoint: {saved[name]})"
            for name, declared, _ in config.options()
            if declared.decides & decides
            and name in saved  # an older version's may not be
            and saved[name] != now[name]
        ]

    declared = {name for name, _, _ in config.options()}
    wrong = differing(Decides.MODEL) + [
        f"{name.replace('_', ' ')} {value} (the checkpoint: {saved[name]})"
        for name, value in identity_of(config).items()
        if name not in declared and name in saved and saved[name] != value
    ]
    if wrong:
        raise MotleyError(f"the checkpoint cannot be continued with {', '.join(wrong)}")
    return [f"note: {text}" for text in differing(Decides.NUMBERS)]


def _scatter_own(tensors: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Scatter per-rank state, which rank 0 holds; empty if the number of ranks has changed."""
    if ranks != dist.get_world_size():
        return {}
    parts: list[dict[str, Tensor]] | None = None
    if dist.get_rank() == 0:
        parts = [{} for _ in range(ranks)]
        for name, tensor in tensors.items():
            if name.startswith("ranks."):
                _, rank, rest = name.split(".", 2)
                parts[int(rank)][rest] = tensor
    own: list[dict[str, Tensor]] = [{}]
    dist.scatter_object_list(own, parts, src=0)
    return own[0]


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

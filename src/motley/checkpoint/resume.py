"""Continues from a checkpoint: the first that is whole, given to all ranks, or read by each."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.read import first_whole, open_checkpoint
from motley.checkpoint.transfer import spread
from motley.comm.collectives import all_gather_object
from motley.config.option import Decides, flag_of, format_value
from motley.config.options import Config
from motley.engines.named_state import State
from motley.engines.own_optimizer import are_convertible
from motley.engines.protocol import Engine, HoldsParts
from motley.errors import MotleyError
from motley.plan.length import TrainState
from motley.tasks.find import SAMPLES, check_classes, identity_of, task_of

_READERS = 8  # threads: a hash takes as long as a disk
_PROGRESS = ("epoch", "consumed", "ranks", "scale", "config")  # what a checkpoint must tell


def resume(
    engine: Engine, folders: list[Path], config: Config, now: dict[str, Any], device: torch.device
) -> tuple[TrainState, list[str]]:
    """Continue from the first whole checkpoint of ``folders``; all ranks call it.

    Rank 0 reads and gives everything to the others, so the folders need exist there alone. Of a
    checkpoint that no rank put together, ranks that hold parts, and see it, read their own.

    Args:
        now: what a checkpoint keeps of ``config``.

    Returns:
        Where training stands, and what the user should know.
    """
    if not folders:
        return TrainState(), []
    by_parts = isinstance(engine, HoldsParts) and all(all_gather_object(folders[0].exists()))
    problems: list[str] = []
    while True:
        content: list[Any] = [None, None, None]
        tensors: dict[str, Tensor] | None = {}
        if dist.get_rank() == 0:
            try:
                found, (progress, tensors) = first_whole(
                    folders, lambda folder: _read_first(folder, by_parts), problems
                )
                notes = [f"not used: {problem}" for problem in problems]
                notes += _differences(progress["config"], now, config)
                content = [(progress, tensors is None), notes, found]
            except MotleyError as error:  # the others must hear of it
                content = [None, str(error), None]
        dist.broadcast_object_list(content, src=0, device=device)
        told, notes, source = content
        if told is None:
            raise MotleyError(notes)
        progress, in_parts = told
        if not in_parts:
            own = _load_whole(engine, tensors or {}, progress, device)
            break
        own = {}
        if not (wrong := _load_parts(engine, source, progress)):
            break
        problems.append(wrong)
        folders = folders[folders.index(source) + 1 :]
    if progress["config"]["loss_scale"] == now["loss_scale"]:  # else: asked for anew
        engine.scale.load_state_dict(progress["scale"])
    position = TrainState(progress["step"], progress["epoch"], progress["consumed"])
    notes += engine.load_own_state(own)
    return position, [f"continuing from {source} at step {position.step}", *notes]


def state_of(folders: list[Path]) -> TrainState | None:
    """Where :func:`resume` is going to continue, unless it finds the tensors of the newest
    checkpoint damaged; None: no checkpoint can be read, which it says."""
    if not folders:
        return TrainState()
    try:
        _, opened = first_whole(folders, lambda each: open_checkpoint(each, _PROGRESS), [])
    except MotleyError:
        return None
    progress = opened.progress
    return TrainState(progress["step"], progress["epoch"], progress["consumed"])


def read_saved_options(folders: list[Path]) -> dict[str, Any] | None:
    """Return the options that the newest readable checkpoint keeps; None if there is none."""
    try:
        _, opened = first_whole(folders, lambda each: open_checkpoint(each, _PROGRESS), [])
    except MotleyError:  # resume() says what is wrong with each
        return None
    config: dict[str, Any] = opened.progress["config"]
    return config


def _read_first(folder: Path, by_parts: bool) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """A checkpoint's progress and tensors; None: each rank is to read its own, and it is not known
    yet whether they are whole.

    Args:
        by_parts: ranks can do so.
    """
    opened = open_checkpoint(folder, _PROGRESS)
    by_each = by_parts and opened.parts is not None
    return opened.progress, None if by_each else opened.read()


def _load_whole(
    engine: Engine, tensors: dict[str, Tensor], progress: dict[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Rank 0's tensors, on all ranks; returns each rank's own state."""
    own = _scatter_own(tensors, progress["ranks"])
    shared = {n: t for n, t in tensors.items() if not n.startswith("ranks.")}
    engine.load_state(State(spread(shared, device), progress.get("optimizer", {})))
    return own


def _load_parts(engine: Engine, folder: Path, progress: dict[str, Any]) -> str:
    """Each rank's rows; what is wrong with those of the first rank that cannot have them, if of
    any, and then nothing is loaded."""
    assert isinstance(engine, HoldsParts)
    found: dict[str, Tensor] = {}
    wrong = ""
    try:
        parts = open_checkpoint(folder).parts
        assert parts is not None
        rows = {name: engine.rows_of(name, shape) for name, shape in parts.shapes().items()}
        with ThreadPoolExecutor(min(_READERS, len(os.sched_getaffinity(0)))) as readers:
            read = [
                readers.submit(parts.whole, name) if own is None
                else readers.submit(parts.rows, name, *own)
                for name, own in rows.items()
            ]  # fmt: skip
            found = {name: each.result() for name, each in zip(rows, read, strict=True)}
    except MotleyError as error:
        wrong = str(error)
    wrong = next((str(each) for each in all_gather_object(wrong) if each), "")
    if wrong:
        return wrong
    engine.load_part(State(found, progress.get("optimizer", {})))
    return ""


def _differences(saved: dict[str, Any], now: dict[str, Any], config: Config) -> list[str]:
    """What is said where the run goes on with other options; MotleyError if it cannot."""

    def differing(is_fixed: bool) -> list[str]:
        return [
            f"{flag_of(declared)} {format_value(now[name])} "
            f"(the checkpoint: {format_value(saved[name])})"
            for name, declared, _ in config.options()
            if bool(declared.decides & Decides.MODEL) == is_fixed
            and not declared.per_launch
            and name in saved  # an older version's may not be
            and saved[name] != now[name]
            and not (name == "opt" and converts)
            and (name != "max_steps" or config.schedule_ends_with_run)
        ]

    converts = are_convertible(saved.get("opt"), now["opt"])

    check_classes(task_of(config), saved)
    declared = {name for name, _, _ in config.options()}
    wrong = differing(is_fixed=True) + [
        f"{name.replace('_', ' ')} {value} (the checkpoint: {saved[name]})"
        for name, value in identity_of(config).items()
        if name not in declared and name in saved and saved[name] != value
    ]
    if wrong:
        raise MotleyError(f"the checkpoint cannot be continued with {', '.join(wrong)}")
    changed = ", ".join(differing(is_fixed=False))
    notes = [f"note: other options than the checkpoint's: {changed}"] if changed else []
    if saved.get(SAMPLES) and now.get(SAMPLES) and saved[SAMPLES] != now[SAMPLES]:
        notes.append(
            f"note: other samples than the checkpoint's: {now[SAMPLES]} (the checkpoint: "
            f"{saved[SAMPLES]}); their order changes"
        )
    if converts:
        notes.append(
            f"note: --opt {now['opt']}, and the moments of the checkpoint's {saved['opt']}"
        )
    return notes


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

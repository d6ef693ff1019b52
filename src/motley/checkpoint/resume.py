"""The loading of a run's initial state.

A run continues from its newest intact checkpoint. A new run may start with the weights of another
run, of a file, or of a folder in the format of timm or Hugging Face. Rank 0 broadcasts the
checkpoint to all ranks, or each rank reads its part of the checkpoint.
"""

import os
import pickle
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from motley.checkpoint.read import (
    checkpoints_at,
    find_first_intact,
    load_newest_intact,
    open_checkpoint,
)
from motley.checkpoint.store import spread
from motley.comm.collectives import all_gather_object
from motley.config.option import NONE, Decides, format_value, get_flag, keyword
from motley.config.options import Config
from motley.data.source import make_seed
from motley.engines.named_state import State, select_part
from motley.engines.optimizers import are_convertible
from motley.engines.protocol import Engine, HoldsParts, Scope
from motley.errors import MotleyError
from motley.plan.length import TrainState
from motley.tasks.builtin import CLASS_NAMES, SAMPLES, check_classes, get_identity, get_task
from motley.tasks.model import TaskModel
from motley.tasks.task import Task, is_in

_LOCAL = "local-dir:"  # timm's word for a folder, in place of a name at a hub
_IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")
_NESTED = ("state_dict", "state_dict_ema", "model", "model_ema")  # where pickles keep weights
_SHOWN = 3  # names in a message


def load_initial(model: TaskModel | None, config: Config) -> list[str]:
    """Load the weights of ``--initial-checkpoint``, or the task's pretrained weights.

    Rank 0 reads the weights, and broadcasts them. All ranks that compute call this function.

    Args:
        model: the model to fill; None on a rank that takes no part in training.
        config: the options.

    Returns:
        Notes for the user.

    Raises:
        MotleyError: the weights are missing, are a pickle that is not trusted, or do not fit the
            model.
    """
    requested = config.initial_checkpoint
    if model is None:
        return []
    content: list[Any] = [None, None]
    tensors: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        try:
            result = (
                _of_task(model.task) if requested is None else read_weights(requested, config.trust)
            )
            if result is not None:
                tensors, notes = fit(
                    result, model.task, model.net, _has_same_head(result, model.task, config)
                )
                tensors |= _drawn_anew(model, tensors.keys(), config.seed)
                content = [[f"begins with the weights of {result.source}", *notes], None]
        except MotleyError as error:  # the other ranks must receive it
            content = [None, str(error)]
    dist.broadcast_object_list(content, src=0, device=model.device)
    notes, wrong = content
    if wrong:
        raise MotleyError(wrong)
    if notes is None:
        return []
    model.net.load_state_dict(spread(tensors, model.device), strict=False)
    return list(notes)


def _has_same_head(found: "Weights", task: Task, config: Config) -> bool:
    """Return True unless the weights were trained on other classes than those of the task."""
    before, names = found.config.get(CLASS_NAMES), list(task.class_names)
    if before and names:
        return bool(before == names)
    now = config.as_json()
    return all(found.config.get(name, now[name]) == now[name] for name in task.head_options)


def _drawn_anew(model: TaskModel, taken: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return new random values for the weights of ``model`` that are not among ``taken``.

    The values differ from the initial values of a run with the same seed. If the loaded features
    were trained with a head that had these initial values, a new head with the same values would
    predict wrong classes with confidence.

    Args:
        model: the model.
        taken: names of the weights that are loaded from a file.
        seed: seed of this run.
    """
    remaining = model.net.state_dict().keys() - taken
    if not remaining:
        return {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_seed(seed, 1))
        fresh = model.task.model().state_dict()
    return {name: fresh[name] for name in sorted(remaining)}


@dataclass(frozen=True)
class Weights:
    """Weights of a model, with their source.

    Attributes:
        tensors: tensors by name, on the CPU.
        source: path or name of the source, for the user.
        config: options of the run that trained the weights; empty if they are not known.
    """

    tensors: dict[str, Tensor]
    source: Path | str
    config: Mapping[str, Any] = field(default_factory=dict)


def _of_task(task: Task) -> Weights | None:
    result = task.pretrained_weights()
    return None if result is None else Weights(*result)


def read_weights(asked: str, trust: bool) -> Weights:
    """Find and read the weights that ``--initial-checkpoint`` names.

    Args:
        asked: path of a run, of a checkpoint or of a file, or ``local-dir:`` and a folder.
        trust: True: also read pickled weights.

    Raises:
        MotleyError: the file does not exist, is damaged, or is a pickle that is not trusted.
    """
    flag = f"--initial-checkpoint {asked}"
    path = Path(asked.removeprefix(_LOCAL))
    if not asked.startswith(_LOCAL) and (result := checkpoints_at(path)):
        folder, content, progress, _ = load_newest_intact(result, only=("model",))
        return Weights(select_part(content, "model"), folder, progress.get("config", {}))
    if path.is_dir():
        inside = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not inside:
            raise MotleyError(
                f"{flag}: this folder has no checkpoints, and neither {' nor '.join(_IN_FOLDERS)}"
            )
        path = inside[0]
    if not path.is_file():
        raise MotleyError(f"{flag}: rank 0's host has no such run, file or folder")
    if path.suffix == ".safetensors":
        try:
            return Weights(load_file(path), path)
        except (SafetensorError, OSError) as error:
            raise MotleyError(
                f"{flag}: {path.name} cannot be read as safetensors: {error}. Copy it again if it "
                "is damaged, or convert it if it has another format"
            ) from None
    if not trust:
        raise MotleyError(
            f"{flag}: {path.name} is not a .safetensors file. It may be a pickle, which can run "
            "code when it is read. Convert it, or add --trust, which reads tensors from it and "
            "refuses everything else"
        )
    return Weights(_read_pickle(flag, path), path)


def _read_pickle(flag: str, path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MotleyError(
            f"{flag}: the file is damaged, or it holds objects other than tensors: {why}"
        ) from None
    while isinstance(content, Mapping):
        inner = [content[name] for name in _NESTED if isinstance(content.get(name), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
        raise MotleyError(f"{flag}: the file does not hold a dictionary of tensors by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def fit(
    weights: Weights, task: Task, net: nn.Module, keep_head: bool = True
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that ``net`` can use, in the net's dtypes, and notes for the user.

    The notes name the weights that are not used, and the weights that the net still lacks.

    Args:
        weights: the weights that were read.
        task: the task of this run.
        net: the network.
        keep_head: True if the weights were trained on the task's classes. The weights of the head
            are then used if their shapes fit.

    Raises:
        MotleyError: the weights belong to another model.
    """
    tensors = task.adapt(dict(weights.tensors), net)
    own, head = net.state_dict(), task.head(net)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():  # files often have a tied tensor under one name alone
        if known := [name for name in tied if name in tensors]:
            tensors = {**dict.fromkeys(tied, tensors[known[0]]), **tensors}
    outside = {name for name in own if not is_in(name, head)}
    missing = sorted(outside - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - own.keys() if not is_in(name, head))
    shaped = [
        f"{name} is {_shape(tensors[name])} there and {_shape(own[name])} here"
        for name in sorted(outside & tensors.keys()) if tensors[name].shape != own[name].shape
    ]  # fmt: skip
    if missing or unknown or shaped:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
            for names, what in ((missing, "missing"), (unknown, "unknown here"),
                                (shaped, "of another shape")) if names
        ]  # fmt: skip
        raise MotleyError(
            f"the weights of {weights.source} do not fit this model: {'; '.join(parts)}. Give the "
            "options of the model that they were trained with"
        )
    anew = sorted(
        name for name in own.keys() - outside
        if not keep_head or name not in tensors or tensors[name].shape != own[name].shape
    )  # fmt: skip
    why = (
        "because the checkpoint was trained on other classes" if not keep_head
        else "because their shape differs from the checkpoint's" if tensors.keys() & {*anew}
        else "because the checkpoint lacks them"
    )  # fmt: skip
    notes = [f"new random weights for {', '.join(anew)}, {why}"] if anew else []
    taken = own.keys() & tensors.keys() - {*anew}
    return {name: tensors[name].to(own[name].dtype) for name in sorted(taken)}, notes


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


_READERS = 8  # threads: hashing takes as long as reading
_PROGRESS = ("epoch", "consumed", "ranks", "scale", "config")  # fields that a checkpoint must have


def resume(
    engine: Engine, folders: list[Path], config: Config, now: dict[str, Any], device: torch.device
) -> tuple[TrainState, list[str]]:
    """Continue from the first intact checkpoint of ``folders``. All ranks call it.

    Rank 0 reads the checkpoint and broadcasts its tensors, so the folders need to exist only on
    rank 0's disk. If the checkpoint is in parts, the engine can load rows, and all ranks see the
    disk, each rank reads its own rows instead.

    Args:
        engine: the engine that loads the state.
        folders: folders of checkpoints, the newest first.
        config: the options.
        now: the options of this launch, in the form that a checkpoint stores.
        device: device on which ranks communicate.

    Returns:
        The state of the training, and notes for the user.

    Raises:
        MotleyError: no checkpoint is intact, or an option differs that a continued run must keep.
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
                result, (progress, tensors) = find_first_intact(
                    folders, lambda folder: _read_first(folder, by_parts), problems
                )
                notes = [f"not used: {problem}" for problem in problems]
                notes += _differences(progress["config"], now, config)
                content = [(progress, tensors is None), notes, result]
            except MotleyError as error:  # the other ranks must receive it
                content = [None, str(error), None]
        dist.broadcast_object_list(content, src=0, device=device)
        received, notes, source = content
        if received is None:
            raise MotleyError(notes)
        progress, in_parts = received
        if not in_parts:
            own = _broadcast_state(engine, tensors or {}, progress, device)
            break
        own = {}
        if not (wrong := _load_parts(engine, source, progress)):
            break
        problems.append(wrong)
        folders = folders[folders.index(source) + 1 :]
    if progress["config"]["loss_scale"] == now["loss_scale"]:  # a changed option starts a new scale
        engine.scale.load_state_dict(progress["scale"])
    position = TrainState(progress["step"], progress["epoch"], progress["consumed"])
    notes += engine.load_state(Scope.RANK, State(own))
    return position, [f"continuing from {source} at step {position.step}", *notes]


def find_state(folders: list[Path]) -> TrainState | None:
    """Return the position at which :func:`resume` will continue, without reading tensors.

    If the tensors of the newest checkpoint are damaged, :func:`resume` continues at an earlier
    position. The result is None if no checkpoint can be read.
    """
    if not folders:
        return TrainState()
    try:
        _, opened = find_first_intact(folders, lambda each: open_checkpoint(each, _PROGRESS), [])
    except MotleyError:
        return None
    progress = opened.progress
    return TrainState(progress["step"], progress["epoch"], progress["consumed"])


def read_saved_options(folders: list[Path]) -> dict[str, Any] | None:
    """Return the options in the newest readable checkpoint. None: no checkpoint is readable."""
    try:
        _, opened = find_first_intact(folders, lambda each: open_checkpoint(each, _PROGRESS), [])
    except MotleyError:  # resume() reports the error of each
        return None
    config: dict[str, Any] = opened.progress["config"]
    return config


def _read_first(folder: Path, by_parts: bool) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Return a checkpoint's progress and tensors.

    The tensors are None if each rank will read its own rows. Each rank then checks its rows itself.

    Args:
        folder: folder of the checkpoint.
        by_parts: True if ranks can read their own rows.
    """
    opened = open_checkpoint(folder, _PROGRESS)
    by_each = by_parts and opened.parts is not None
    return opened.progress, None if by_each else opened.read()


def _broadcast_state(
    engine: Engine, tensors: dict[str, Tensor], progress: dict[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Load rank 0's tensors into the engines of all ranks.

    Return the tensors of the checkpoint that only this rank needs.
    """
    own = _scatter_own(tensors, progress["ranks"])
    shared = {n: t for n, t in tensors.items() if not n.startswith("ranks.")}
    engine.load_state(Scope.GLOBAL, State(spread(shared, device), progress.get("optimizer", {})))
    return own


def _load_parts(engine: Engine, folder: Path, progress: dict[str, Any]) -> str:
    """Load the rows of this rank, and return an error message, or an empty text on success.

    All ranks call this function. If a rank cannot read its rows, no rank loads anything. All ranks
    then return the error of the first rank that failed.
    """
    assert isinstance(engine, HoldsParts)
    result: dict[str, Tensor] = {}
    wrong = ""
    try:
        parts = open_checkpoint(folder).parts
        assert parts is not None
        rows = {name: engine.get_rows(name, shape) for name, shape in parts.shapes().items()}
        with ThreadPoolExecutor(min(_READERS, len(os.sched_getaffinity(0)))) as readers:
            read = [
                readers.submit(parts.load, name) if own is None
                else readers.submit(parts.rows, name, *own)
                for name, own in rows.items()
            ]  # fmt: skip
            result = {name: each.result() for name, each in zip(rows, read, strict=True)}
    except MotleyError as error:
        wrong = str(error)
    wrong = next((str(each) for each in all_gather_object(wrong) if each), "")
    if wrong:
        return wrong
    engine.load_state(Scope.ROWS, State(result, progress.get("optimizer", {})))
    return ""


def _differences(saved: dict[str, Any], now: dict[str, Any], config: Config) -> list[str]:
    """Return notes on the options whose values differ from those in the checkpoint.

    Args:
        saved: options of the checkpoint.
        now: options of this launch, in the same form.
        config: options of this launch.

    Raises:
        MotleyError: an option differs that a continued run must keep.
    """

    def differing(is_fixed: bool) -> list[str]:
        return [
            f"{get_flag(declared)} {format_value(now[name])} "
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

    check_classes(get_task(config), saved)
    declared = {name for name, _, _ in config.options()}
    wrong = differing(is_fixed=True) + [
        f"{name.replace('_', ' ')} {value} (the checkpoint: {saved[name]})"
        for name, value in get_identity(config).items()
        if name not in declared and name in saved and saved[name] != value
    ]
    here, there = _list_switches(now), _list_switches(saved)
    if here != there:  # they decide which state an optimizer has
        texts = [" ".join(each) or NONE for each in (here, there)]
        wrong.append(f"--opt-kwargs {texts[0]} (the checkpoint: {texts[1]})")
    if wrong:
        raise MotleyError(
            f"the checkpoint cannot be continued with {', '.join(wrong)}; give the values of the "
            "checkpoint"
        )
    changed = ", ".join(differing(is_fixed=False))
    notes = [f"note: these options differ from the checkpoint's: {changed}"] if changed else []
    if saved.get(SAMPLES) and now.get(SAMPLES) and saved[SAMPLES] != now[SAMPLES]:
        notes.append(
            f"note: the samples differ from the checkpoint's: {now[SAMPLES]} (the checkpoint: "
            f"{saved[SAMPLES]}); their order changes"
        )
    if converts:
        notes.append(
            f"note: --opt {now['opt']} continues with the moments of the checkpoint's "
            f"{saved['opt']}"
        )
    return notes


def _list_switches(options: dict[str, Any]) -> list[str]:
    """Return the entries of ``--opt-kwargs`` that are not numbers, such as amsgrad=True."""
    texts = options.get("opt_kwargs")
    given = map(keyword, texts if isinstance(texts, list) else ())
    return sorted(str(each) for each in given if type(each.value) not in (int, float, tuple))


def _scatter_own(tensors: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Send each rank its own tensors from rank 0, and return this rank's tensors.

    The result is empty if the checkpoint was written by another number of ranks.
    """
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

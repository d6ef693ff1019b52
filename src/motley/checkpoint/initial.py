"""Weights that a run begins with: of another run, of a file, or of a folder of timm's or Hugging
Face's."""

import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from motley.checkpoint.read import checkpoints_at, newest_whole
from motley.checkpoint.transfer import spread
from motley.config.options import Config
from motley.data.order import seed_of
from motley.engines.named_state import part_of
from motley.errors import MotleyError
from motley.tasks.find import CLASS_NAMES
from motley.tasks.model import TaskModel
from motley.tasks.task import Task, is_in

_LOCAL = "local-dir:"  # timm's word for a folder, in place of a name at a hub
_IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")
_NESTED = ("state_dict", "state_dict_ema", "model", "model_ema")  # where pickles keep weights
_SHOWN = 3  # names in a message


def load_initial(model: TaskModel | None, config: Config) -> list[str]:
    """Begin with ``--initial-checkpoint``, or with what the task says; all ranks that compute call
    it.

    Rank 0 reads, and gives the weights to the others.

    Returns:
        What the user should know.

    Raises:
        MotleyError: there are no weights, not to be trusted, or of another model.
    """
    asked = config.initial_checkpoint
    if model is None:
        return []
    content: list[Any] = [None, None]
    tensors: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        try:
            found = _of_task(model.task) if asked is None else read_weights(asked, config.trust)
            if found is not None:
                tensors, notes = fit(
                    found, model.task, model.net, _has_same_head(found, model.task, config)
                )
                tensors |= _drawn_anew(model, tensors.keys(), config.seed)
                content = [[f"begins with the weights of {found.source}", *notes], None]
        except MotleyError as error:  # the others must hear of it
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
    """Return True unless the head of the weights tells other classes apart, as far as is known."""
    before, names = found.config.get(CLASS_NAMES), list(task.class_names)
    if before and names:
        return bool(before == names)
    now = config.as_json()
    return all(found.config.get(name, now[name]) == now[name] for name in task.head_options)


def _drawn_anew(model: TaskModel, taken: Collection[str], seed: int) -> dict[str, Tensor]:
    """What is left, from other random numbers than a run of this seed begins with: features that
    were learnt for a head of the same numbers would be sure of the wrong classes."""
    left = model.net.state_dict().keys() - taken
    if not left:
        return {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, 1))
        fresh = model.task.model().state_dict()
    return {name: fresh[name] for name in sorted(left)}


@dataclass(frozen=True)
class Weights:
    """Some, and where they are from.

    Attributes:
        tensors: by name, on the CPU. source: for people.
        config: of the run that they are of; empty where that is not known.
    """

    tensors: dict[str, Tensor]
    source: Path | str
    config: Mapping[str, Any] = field(default_factory=dict)


def _of_task(task: Task) -> Weights | None:
    found = task.pretrained_weights()
    return None if found is None else Weights(*found)


def read_weights(asked: str, trust: bool) -> Weights:
    """Find and read what ``--initial-checkpoint`` names.

    Args:
        asked: a run, one of its checkpoints, a file, or ``local-dir:`` and a folder.
        trust: pickles are read too.
    """
    flag = f"--initial-checkpoint {asked}"
    path = Path(asked.removeprefix(_LOCAL))
    if not asked.startswith(_LOCAL) and (found := checkpoints_at(path)):
        folder, content, progress, _ = newest_whole(found, only=("model",))
        return Weights(part_of(content, "model"), folder, progress.get("config", {}))
    if path.is_dir():
        inside = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not inside:
            raise MotleyError(
                f"{flag}: neither checkpoints nor {' nor '.join(_IN_FOLDERS)} are in this folder"
            )
        path = inside[0]
    if not path.is_file():
        raise MotleyError(f"{flag}: there is no such run, file or folder on rank 0's machine")
    if path.suffix == ".safetensors":
        try:
            return Weights(load_file(path), path)
        except (SafetensorError, OSError) as error:
            raise MotleyError(
                f"{flag}: {path.name} is damaged, or no safetensors but for its name: {error}; "
                "copy it anew, or convert it"
            ) from None
    if not trust:
        raise MotleyError(
            f"{flag}: {path.name} is no .safetensors, but perhaps a pickle, which may hold code; "
            "convert it, or add --trust to read the tensors in it, and nothing else"
        )
    return Weights(_read_pickle(flag, path), path)


def _read_pickle(flag: str, path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MotleyError(f"{flag}: it holds more than tensors, or is damaged: {why}") from None
    while isinstance(content, Mapping):
        inner = [content[name] for name in _NESTED if isinstance(content.get(name), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
        raise MotleyError(f"{flag}: it is no table of tensors by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def fit(
    weights: Weights, task: Task, net: nn.Module, keep_head: bool = True
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights that ``net`` takes as they are, and what is said of the others.

    Args:
        keep_head: what the head tells apart is the same there, if its shape is.

    Raises:
        MotleyError: they are of another model.
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
        said = [
            f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
            for names, what in ((missing, "missing"), (unknown, "unknown here"),
                                (shaped, "of another shape")) if names
        ]  # fmt: skip
        raise MotleyError(
            f"the weights of {weights.source} are of another model; {'; '.join(said)}. "
            "Give the options of the model that they were made with"
        )
    anew = sorted(
        name for name in own.keys() - outside
        if not keep_head or name not in tensors or tensors[name].shape != own[name].shape
    )  # fmt: skip
    why = (
        "which tells other classes apart there" if not keep_head
        else "of another shape there" if tensors.keys() & {*anew} else "not there"
    )  # fmt: skip
    notes = [f"made anew: {', '.join(anew)}, {why}"] if anew else []
    taken = own.keys() & tensors.keys() - {*anew}
    return {name: tensors[name].to(own[name].dtype) for name in sorted(taken)}, notes


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"

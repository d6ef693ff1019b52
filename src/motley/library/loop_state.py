"""The state of a user's own loop: objects with ``state_dict``, and their checkpoints."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from motley.checkpoint.read import find_first_intact, open_checkpoint
from motley.checkpoint.store import Checkpoints
from motley.engines.named_state import snapshot
from motley.errors import MotleyError
from motley.library.model_shards import ModelShards
from motley.library.state_tree import put_together, take_apart

Keep = Callable[[Tensor], Tensor]
_KEEP = 2  # checkpoints that stay on the disk
_LOOP = "loop"  # entry of progress.json


class LoopState:
    """All objects of a loop whose state a checkpoint holds, in the order in which they came.

    Attributes:
        models: the models.
        optimizers: the optimizers.
        shards: the ranks' parts of the models; None: each rank has whole models.
    """

    def __init__(self) -> None:
        self.shards: ModelShards | None = None
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._others: list[Any] = []

    def add(self, owner: Any) -> None:
        """Add an object with ``state_dict`` and ``load_state_dict``, unless it was added before.

        Raises:
            MotleyError: the object has no such methods.
        """
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(owner, name, None)):
                raise MotleyError(
                    f"{type(owner).__name__} has no method {name}(), so its state cannot be saved: "
                    "give it state_dict() and load_state_dict()"
                )
        kinds: list[tuple[type, list[Any]]] = [
            (nn.Module, self.models), (Optimizer, self.optimizers), (object, self._others),
        ]  # fmt: skip
        chosen = next(each for kind, each in kinds if isinstance(owner, kind))
        if not any(each is owner for each in chosen):
            chosen.append(owner)

    def has(self, owner: Any) -> bool:
        """Return True if an object was added."""
        return any(each is owner for each in (*self.models, *self.optimizers, *self._others))

    def take(self, keep: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of all objects: JSON, and tensors by name.

        If the models are in parts, all ranks call it.

        Args:
            keep: returns the value to store for a tensor, such as a copy on the CPU.
        """
        tensors: dict[str, Tensor] = {}
        with self._put_together():
            content = {
                name: take_apart(owner.state_dict(), name, tensors) for name, owner in self._named()
            }
            return content, {name: keep(tensor) for name, tensor in tensors.items()}

    def _put_together(self) -> AbstractContextManager[None]:
        return self.shards.put_together() if self.shards else nullcontext()

    def load(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the state that :meth:`take` has returned.

        Raises:
            MotleyError: the script has other objects than the one that saved the state.
        """
        own = dict(self._named())
        if own.keys() != content.keys():
            names = ", ".join(sorted(own.keys() ^ content.keys()))
            raise MotleyError(
                f"the checkpoint is of other objects ({names}): give lab.prepare() and "
                "lab.register() the same objects in the same order as the script that saved it"
            )
        for name, owner in own.items():
            try:
                state = put_together(content[name], tensors)
                with self._put_together():
                    owner.load_state_dict(self.shards.share(owner, state) if self.shards else state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise MotleyError(
                    f"the checkpoint does not fit the {type(owner).__name__} of this script: "
                    f"{str(error).splitlines()[0]}; make the same model and optimizer, or start "
                    "without lab.resume()"
                ) from None

    def load_step(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load what a step of the optimizers changes, as another rank has it after the step.

        Schedulers and other objects stay: this rank's own code changes them after the step.
        """
        for name, owner in self._named():
            state = put_together(content[name], tensors)
            if isinstance(owner, nn.Module):
                owner.load_state_dict(state)
            elif isinstance(owner, Optimizer):
                owner.load_state_dict({**owner.state_dict(), "state": state["state"]})

    def _named(self) -> list[tuple[str, Any]]:
        """Return all objects with the names by which a checkpoint knows them."""
        models = [("model" if n == 0 else f"optimizer.model{n}", each)
                  for n, each in enumerate(self.models)]  # fmt: skip
        rest = [(f"optimizer.optimizer{n}", each) for n, each in enumerate(self.optimizers)]
        others = [(f"optimizer.object{n}", each) for n, each in enumerate(self._others)]
        return [*models, *rest, *others]


class LoopCheckpoints:
    """The checkpoints of a loop, written and read by rank 0.

    Args:
        state: objects of the loop.
        folder: the folder ``checkpoints``.
    """

    def __init__(self, state: LoopState, folder: Path) -> None:
        self._state = state
        self._checkpoints = Checkpoints(folder, _KEEP)
        self._best = Checkpoints(folder.parent / "best", 1)

    def save(
        self,
        progress: Mapping[str, Any],
        position: Mapping[str, Any],
        best: bool,
        keep: Keep = snapshot,
    ) -> None:
        """Write a checkpoint while training continues.

        Args:
            progress: entries that every checkpoint has; see motley.checkpoint.store.
            position: state of the loop besides its objects; tensors and numbers.
            best: True: write it to the folder ``best`` too.
            keep: returns a copy of a tensor.
        """
        content, tensors = self._state.take(keep)
        content[_LOOP] = take_apart(position, f"ranks.{_LOOP}", tensors)
        whole = {**progress, _LOOP: content}
        self._checkpoints.save_behind(tensors, whole)
        if best:
            self._best.save_behind(tensors, whole)

    def wait(self) -> None:
        """Wait until all checkpoints have reached the disk."""
        self._checkpoints.wait()
        self._best.wait()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written."""
        self._checkpoints.check()

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps; see Checkpoints."""
        self._checkpoints.set_aside_after(step)


def read_loop(folders: list[Path]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Return the JSON and the tensors of the first intact checkpoint, and notes for the user.

    Args:
        folders: folders of checkpoints, the newest first.

    Raises:
        MotleyError: no checkpoint is intact, or it is of ``motley train``.
    """
    problems: list[str] = []
    folder, opened = find_first_intact(folders, lambda each: open_checkpoint(each, ()), problems)
    notes = [f"not used: {problem}" for problem in problems]
    if _LOOP not in opened.progress:
        raise MotleyError(
            f"{folder} is a checkpoint of motley train, and not of a loop of your own: continue it "
            "with motley train --resume, or load its model with motley export"
        )
    content = opened.progress[_LOOP]
    return content, opened.read(), [f"continuing from {folder}", *notes]


def get_position(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the position that :meth:`LoopCheckpoints.save` was given."""
    position: dict[str, Any] = put_together(content[_LOOP], tensors)
    return position


def get_objects(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of all objects in a checkpoint."""
    return {name: each for name, each in content.items() if name != _LOOP}


def cuda_state() -> list[Tensor]:
    """Return the state of the random generator of each GPU of this process."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

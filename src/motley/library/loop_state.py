"""The state of a user's own loop: objects with ``state_dict``, as JSON and tensors.

Nothing is pickled.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from motley.errors import MotleyError
from motley.library.model_shards import ModelShards

Keep = Callable[[Tensor], Tensor]
_PLAIN = (bool, int, float, str)


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


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON, and move its tensors to a dictionary.

    Args:
        value: nested dictionaries, lists and tuples of tensors, arrays, numbers, texts and None.
        name: name of the state, with which names of tensors start.
        tensors: receives the tensors by name.

    Raises:
        MotleyError: the state has a value of another type.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [take_apart(key, "", {}), take_apart(each, f"{name}.{key}", tensors)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {
            kind: [take_apart(each, f"{name}.{place}", tensors) for place, each in enumerate(value)]
        }
    raise MotleyError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: have its "
        "state_dict() return tensors, numbers, texts, lists and dictionaries"
    )


def put_together(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that :func:`take_apart` has taken apart."""
    if not isinstance(content, dict):
        return content
    ((kind, value),) = content.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            return tensors[value].numpy()
        case "dict":
            return {put_together(key, {}): put_together(each, tensors) for key, each in value}
        case "list":
            return [put_together(each, tensors) for each in value]
    return tuple(put_together(each, tensors) for each in value)

"""The state of a user's own loop, stored as JSON and tensors, without pickles.

A checkpoint holds the state of all objects with ``state_dict``, and the position of the loop. The
position consists of the epoch, the batch, the step, and the random state of the sample order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.library.model_shards import ModelShards
from motley.library.sample_order import RandomState

Keep = Callable[[Tensor], Tensor]
_PLAIN = (bool, int, float, str)
_FACTORS = ("MulBackward0", "DivBackward0")  # autograd nodes of a loss that a script has scaled


class LoopState:
    """All objects of a loop whose state a checkpoint holds, in the order of :meth:`add`.

    Attributes:
        models: the models.
        optimizers: the optimizers.
        shards: the models if they are sharded over the ranks; None: each rank has whole models.
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
        """Return True if :meth:`add` was called with this object."""
        return any(each is owner for each in (*self.models, *self.optimizers, *self._others))

    def take(self, keep: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of all objects: JSON, and tensors by name.

        If the models are sharded, all ranks call it.

        Args:
            keep: function that returns the value to store for a tensor, such as a copy on the CPU.
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
            MotleyError: the script's objects differ from those of the script that saved the state.
        """
        own = dict(self._named())
        if own.keys() != content.keys():
            names = ", ".join(sorted(own.keys() ^ content.keys()))
            raise MotleyError(
                f"the checkpoint was saved with other objects ({names}): give lab.prepare() and "
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
                    f"{str(error).splitlines()[0]}. Create the same model and optimizer, or start "
                    "without lab.resume()"
                ) from None

    def load_step(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load another rank's models and optimizers after a step that this rank has missed.

        Schedulers and other objects stay, because this rank's own code steps them afterwards.
        """
        for name, owner in self._named():
            state = put_together(content[name], tensors)
            if isinstance(owner, nn.Module):
                owner.load_state_dict(state)
            elif isinstance(owner, Optimizer):
                owner.load_state_dict({**owner.state_dict(), "state": state["state"]})

    def _named(self) -> list[tuple[str, Any]]:
        """Return all objects by their names in a checkpoint."""
        models = [("model" if n == 0 else f"optimizer.model{n}", each)
                  for n, each in enumerate(self.models)]  # fmt: skip
        rest = [(f"optimizer.optimizer{n}", each) for n, each in enumerate(self.optimizers)]
        others = [(f"optimizer.object{n}", each) for n, each in enumerate(self._others)]
        return [*models, *rest, *others]


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON, and add its tensors to a dictionary.

    Args:
        value: nested dictionaries, lists and tuples of tensors, arrays, numbers, texts and None.
        name: name of the state, and prefix of the names of its tensors.
        tensors: dictionary to which the tensors are added by name.

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
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: let its "
        "state_dict() return tensors, numbers, strings, lists and dictionaries"
    )


def put_together(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a state, given the JSON and the tensors that :func:`take_apart` has made of it."""
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


class LoopPosition:
    """The position at which a loop continues.

    Attributes:
        epoch: number of the present epoch.
        step: number of the next global batch since the start of training.
        batch: number of the next global batch in the present pass over the data.
        in_pass: True while the user's code is inside the loop over the training data.
        is_done: True once the pass of the present epoch has ended.
        counts_epochs: True if the script takes its epochs from ``lab.epochs``. Otherwise each pass
            over the training data is an epoch.
        order: random state from which the order of the present pass was drawn.
        generators: states of the user's ``torch.Generator`` objects when that order was drawn.
    """

    def __init__(self) -> None:
        self.epoch = self.step = self.batch = 0
        self.in_pass = self.is_done = self.counts_epochs = False
        self.order: RandomState | None = None
        self.generators: list[torch.Tensor] = []
        self._first_node = 0  # number of the first node of a graph of the present rows
        self._unused = 0  # pieces that were read since the last loss
        self._losses = 0  # number of losses of the present piece
        self._ahead = 0  # pieces that were read before the first loss of the present piece
        self._times_ahead = 0  # number of times that a loss followed several pieces

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch of ``lab.epochs``."""
        self.epoch, self.is_done, self.counts_epochs = epoch, False, True

    def start_pass(self, order: RandomState, generators: Sequence[torch.Tensor]) -> int:
        """Start a pass over the training data, and return the number of its first batch."""
        if self.is_done and not self.counts_epochs:
            self.epoch += 1
        self.in_pass, self.is_done = True, False
        self.order, self.generators = order, list(generators)
        return self.batch

    def end_pass(self) -> None:
        """End the pass over the training data. The next pass starts with its first batch."""
        self.in_pass, self.is_done, self.batch = False, True, 0

    def mark_rows(self) -> None:
        """Mark that the loader yields rows to the user's code now, for :meth:`check_loss`."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            node = torch.zeros((), requires_grad=True).clone().grad_fn
        self._first_node = node._sequence_nr()  # type: ignore[union-attr]
        self._unused, self._losses = self._unused + 1, 0

    def check_loss(self, loss: torch.Tensor, is_mean: bool) -> None:
        """Raise MotleyError if a loss was not computed from the rows that were yielded last.

        Args:
            loss: the loss.
            is_mean: True if the loss is a mean that is weighted by the number of these rows.
        """
        self._losses += 1
        if self._losses == 1:
            self._ahead, self._unused = self._unused, 0
        elif self._losses == 2 and self._ahead > 1 and is_mean:
            self._times_ahead += 1  # once, it may follow batches that a resumed script skips
            if self._times_ahead == 2:
                raise MotleyError(
                    "several batches were read before backward(), so the rows of the last batch "
                    "would weight the losses of all: call backward() before you read the next "
                    'batch, or call backward(loss, reduction="sum") if each loss is divided by the '
                    "number of tokens of all ranks"
                )
        node: Any = loss.grad_fn
        while node is not None and node.name() in _FACTORS:
            node = next((each for each, _ in node.next_functions if each is not None), None)
        if node is not None and node._sequence_nr() < self._first_node:
            raise MotleyError(
                "the loss was computed before the loader yielded its last rows, so it belongs to "
                "earlier rows: call next() on the loader after lab.backward(), and read ahead "
                "with DataLoader(..., num_workers=2)"
            )

    def state_dict(self, order: RandomState, generators: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the position for a checkpoint.

        Args:
            order: random state from which the next order will be drawn.
            generators: present states of the user's own generators.
        """
        inside = self.in_pass and self.order is not None
        before = self.order if inside and self.order is not None else order
        return {
            "epoch": self.epoch + self.is_done, "step": self.step, "batch": self.batch,
            "order": before.state_dict(),
            "generators": list(self.generators if inside else generators),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> RandomState:
        """Load the position; return the random state from which the next order is drawn."""
        self.epoch, self.step, self.batch = state["epoch"], state["step"], state["batch"]
        return RandomState.from_state_dict(state["order"])


def list_generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    """Return the user's ``torch.Generator`` objects from which a loader draws its order."""
    samplers = (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    known = (loader.generator, *(getattr(each, "generator", None) for each in samplers))
    return list(dict.fromkeys(each for each in known if isinstance(each, torch.Generator)))

"""The position of a user's own loop: epoch, batch and step, and the random numbers of its order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.library.sample_order import RandomState

_FACTORS = ("MulBackward0", "DivBackward0")  # by which a script scales its loss


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
        order: random numbers from which the order of the present pass was drawn; on rank 0.
        generators: states of the user's own generators at that time; on rank 0.
    """

    def __init__(self) -> None:
        self.epoch = self.step = self.batch = 0
        self.in_pass = self.is_done = self.counts_epochs = False
        self.order: RandomState | None = None
        self.generators: list[torch.Tensor] = []
        self._first_node = 0  # number of the first node of a graph of the present rows
        self._unused = 0  # pieces that were read since the last loss
        self._losses = 0  # of the present piece
        self._ahead = 0  # pieces that were read before the first loss of the present piece
        self._times_ahead = 0  # number of times that a loss followed several pieces

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch of ``lab.epochs``."""
        self.epoch, self.is_done, self.counts_epochs = epoch, False, True

    def start_pass(self, order: RandomState, generators: Sequence[torch.Tensor]) -> int:
        """Start a pass over the training data, and return the batch to start with."""
        if self.is_done and not self.counts_epochs:
            self.epoch += 1
        self.in_pass, self.is_done = True, False
        self.order, self.generators = order, list(generators)
        return self.batch

    def end_pass(self) -> None:
        """End the pass. The next one starts with its first batch."""
        self.in_pass, self.is_done, self.batch = False, True, 0

    def mark_rows(self) -> None:
        """Note that the user's code gets rows now."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            node = torch.zeros((), requires_grad=True).clone().grad_fn
        self._first_node = node._sequence_nr()  # type: ignore[union-attr]
        self._unused, self._losses = self._unused + 1, 0

    def check_loss(self, loss: torch.Tensor, is_mean: bool) -> None:
        """Raise MotleyError if a loss is not one of the rows that the loader has yielded last.

        Args:
            loss: the loss.
            is_mean: True if it counts by the number of these rows.
        """
        self._losses += 1
        if self._losses == 1:
            self._ahead, self._unused = self._unused, 0
        elif self._losses == 2 and self._ahead > 1 and is_mean:
            self._times_ahead += 1  # once, it may follow batches that a resumed script skips
            if self._times_ahead == 2:
                raise MotleyError(
                    "several batches were read ahead, and each has a loss now, which would be "
                    "weighed by the rows of the last batch: call backward() before the next batch "
                    'is read, or with reduction="sum" for losses that are divided by the number '
                    "of tokens of all ranks"
                )
        node: Any = loss.grad_fn
        while node is not None and node.name() in _FACTORS:
            node = next((each for each, _ in node.next_functions if each is not None), None)
        if node is not None and node._sequence_nr() < self._first_node:
            raise MotleyError(
                "the loss was computed before the loader yielded its last rows, so it is a loss of "
                "other rows: call next() on the loader after lab.backward(), and read ahead with "
                "DataLoader(..., num_workers=2)"
            )

    def state_dict(self, order: RandomState, generators: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the position for a checkpoint.

        Args:
            order: random numbers from which the next order will be drawn.
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
        """Load the position; return the random numbers from which the next order is drawn."""
        self.epoch, self.step, self.batch = state["epoch"], state["step"], state["batch"]
        return RandomState.from_state_dict(state["order"])


def list_generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    """Return the generators of the user's own from which a loader draws its order."""
    samplers = (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    known = (loader.generator, *(getattr(each, "generator", None) for each in samplers))
    return list(dict.fromkeys(each for each in known if isinstance(each, torch.Generator)))

"""Samples and micro-batches of them, and what the loader needs of the code that makes a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from motley.errors import MotleyError

Tensors = dict[str, Tensor]  # by name; each has one row a sample


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        data: what the task made of its samples, by name; of images: ``images``, uint8
            [n, C, H, W], and ``labels``, int64 [n]. Of no samples: nothing.
        indices: of the samples in the dataset, n of them; n may be 0.
        weights: what each counts in the mean, [n], on the CPU; None: 1 each.
        unreadable: names of samples that could not be read.
    """

    data: Tensors
    indices: tuple[int, ...]
    weights: Tensor | None = None
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def weight(self) -> float:
        """Of all its samples together."""
        return float(len(self)) if self.weights is None else float(self.weights.sum())

    def tensors(self) -> list[Tensor]:
        """All of them, the weights last."""
        return [*self.data.values(), *([] if self.weights is None else [self.weights])]

    def to(self, device: torch.device) -> "Batch":
        """A copy on ``device``; the copy runs beside the host where the memory is pinned."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def __getitem__(self, part: slice) -> "Batch":
        """Some of its samples; unreadable ones stay with the first of them."""
        return replace(
            self._changed(lambda tensor: tensor[part]), indices=self.indices[part],
            weights=None if self.weights is None else self.weights[part],
            unreadable=() if part.start else self.unreadable,
        )  # fmt: skip

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory; DataLoader calls it."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, data={name: change(tensor) for name, tensor in self.data.items()})


class UnreadableSample(Exception):  # noqa: N818 - of the sample, not of the program
    """A sample cannot be read; the message says why."""


class Source(Protocol):
    """Samples that can be asked for by index."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: int) -> Any:
        """One, as it is kept; see :func:`read`."""


class Samples(Protocol):
    """What is asked for by the loader: a part of motley.tasks.task.Task, which says more."""

    @property
    def needs_workers(self) -> bool:
        """Reading a sample takes longer than asking another process to."""

    @property
    def weight(self) -> float:
        """The number that a usual sample counts in the mean."""

    def data(self, held_out: bool) -> Source:
        """Training samples, or held-out ones."""

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """What a model gets of an item of the source."""

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """One batch of samples; there is one at least."""

    def weights(self, batch: Tensors) -> Tensor | None:
        """What each sample counts in the mean, [n]; None: ``weight`` each."""

    def on(self, device: torch.device) -> "Samples":
        """The samples as a rank with this device reads them."""

    def complete(self, batch: Tensors) -> Tensors:
        """A batch on the rank's device, with what :meth:`collate` has left to it."""

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Time that training samples take, in proportion; None: all the same."""

    def name_of(self, source: Source, index: int) -> str:
        """How to call a sample in an error."""


def read(source: Source, index: int) -> Any:
    """``source[index]``; raises UnreadableSample, whatever the decoder raised.

    Pillow has no type of error of its own: of torn or hostile files its decoders raise OSError,
    SyntaxError, ValueError, DecompressionBombError, TypeError and, by format, what else their
    authors did not think of; others do as well. Lack of memory is none of the sample's.
    """
    try:
        return source[index]
    except (MemoryError, MotleyError):
        raise
    except Exception as error:
        raise UnreadableSample(str(error) or type(error).__name__) from error

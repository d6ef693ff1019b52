"""One micro-batch of samples."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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

"""One micro-batch of images."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        images: uint8 [n, C, H, W]. labels: int64 [n]. n may be 0.
        indices: of the samples in the dataset, n of them.
        unreadable: names of images that could not be read.
    """

    images: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    unreadable: tuple[str, ...] = ()

    def to(self, device: torch.device) -> "Batch":
        """A copy on ``device``; the copy runs beside the host where the memory is pinned."""
        images = self.images.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        return Batch(images, labels, self.indices, self.unreadable)

    def __getitem__(self, part: slice) -> "Batch":
        """Some of its samples; unreadable images stay with the first of them."""
        return Batch(
            self.images[part], self.labels[part], self.indices[part],
            () if part.start else self.unreadable,
        )  # fmt: skip

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory; DataLoader calls it."""
        return Batch(
            self.images.pin_memory(), self.labels.pin_memory(), self.indices, self.unreadable
        )

"""Training images that lie on the GPU, which shifts and mirrors them itself.

A rank that has one core, and shares it, cannot read as fast as its GPU computes. Images in memory
that are shifted and mirrored, and no more, do not need it to: the host draws three numbers for each
image, and the GPU copies the pixels. They equal the host's bit by bit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from motley.data.images import InMemory
from motley.data.source import Samples, Source, Tensors
from motley.data.transforms import ShiftAndFlip, Transform

_MOST = 2**28  # bytes of a GPU, with the margin that images are shifted into


def resident(
    samples: Samples, source: Source, transform: Transform, device: torch.device
) -> "ResidentImages | None":
    """Return what reads these training images from the device; None if it cannot have or change
    them."""
    if not isinstance(source, InMemory) or not isinstance(transform, ShiftAndFlip):
        return None
    count, channels, *sides = source.images.shape
    size = count * channels * math.prod(side + 2 * transform.padding for side in sides)
    if transform.between or size > _MOST:
        return None
    return ResidentImages(samples, source, transform, device)


class ResidentImages:
    """The samples of an image task whose training images lie on one GPU; see Samples.

    Args:
        samples: the task; it reads the held-out samples.
        source: the training images.
        shift: the transform of training images.
    """

    needs_workers = False

    def __init__(
        self, samples: Samples, source: InMemory, shift: ShiftAndFlip, device: torch.device
    ) -> None:
        self._samples, self._source, self._shift = samples, source, shift
        self.weight = samples.weight
        # With a margin of zeros, every shifted image is a part of its own.
        self._pool = functional.pad(source.images.to(device), [shift.padding] * 4)
        channels, height, width = source.images.shape[1:]
        self._channels, self._rows, self._columns = (
            torch.arange(count, device=device) for count in (channels, height, width)
        )
        if device.type == "cuda":  # a stream of their own copies batches
            torch.cuda.synchronize(device)

    def data(self, held_out: bool) -> Source:
        """See Samples; a training sample is the place of its image, and its label."""
        return self._samples.data(held_out=True) if held_out else self._source.places

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """See Samples; ``cut`` is place, shift down, shift to the right, and 1 if mirrored."""
        if not training:
            return self._samples.sample(item, training)
        place, label = item
        return {"cut": (place, *self._shift.draw()), "labels": label}

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """See Samples."""
        if "cut" not in samples[0]:
            return self._samples.collate(samples)
        return {name: torch.tensor([each[name] for each in samples]) for name in samples[0]}

    def complete(self, batch: Tensors) -> Tensors:
        """Return a batch on the device with ``images``, uint8 [n, C, H, W]."""
        if "cut" not in batch:
            return self._samples.complete(batch)
        cut = batch["cut"][:, :, None]
        place, down, right, mirrored = cut.unbind(1)
        padding, last = self._shift.padding, len(self._columns) - 1
        rows = self._rows + padding - down
        columns = torch.where(mirrored > 0, last - self._columns, self._columns) + padding - right
        images: Tensor = self._pool[
            place[:, :, None, None], self._channels[:, None, None], rows[:, None, :, None],
            columns[:, None, None],
        ]  # fmt: skip
        return {"images": images, "labels": batch["labels"]}

    def weights(self, batch: Tensors) -> Tensor | None:
        """See Samples."""
        return self._samples.weights(batch)

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """See Samples."""
        return self._samples.costs(indices)

    def name_of(self, source: Source, index: int) -> str:
        """See Samples."""
        return self._samples.name_of(source, index)

    def on(self, device: torch.device) -> Samples:
        """See Samples."""
        return self

"""The image task in other ways, to be timed beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import datasets as tv
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from motley.data.images import Images, InMemory
from motley.tasks.builtin.image import ImageTask

SMALL = 32  # pixels a side, as CIFAR's


@dataclass(frozen=True)
class Reference(ImageTask):
    """A folder by PIL, then torchvision's transforms, one after another; rows copied by torch."""

    def data(self, held_out: bool) -> Any:
        return tv.ImageFolder(Path(self.data_dir, "val" if held_out else "train"))

    @cached_property
    def _training(self) -> Any:
        kind = v2.InterpolationMode(self.look.interpolation)
        crop = v2.RandomResizedCrop(self.size, interpolation=kind, antialias=True)
        return v2.Compose([v2.ToImage(), crop, v2.RandomHorizontalFlip()])

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        images = torch.empty((len(samples), 3, self.size, self.size), dtype=torch.uint8)
        for row, sample in enumerate(samples):
            images[row] = sample["images"]
        return {"images": images, "labels": torch.tensor([each["labels"] for each in samples])}


@dataclass(frozen=True)
class ByDecodeJpeg(ImageTask):
    """A folder by torchvision's decoder; PIL looks at the header, as a bomb must be refused."""

    def data(self, held_out: bool) -> Any:
        return tv.ImageFolder(Path(self.data_dir, "val" if held_out else "train"), loader=_decoded)


def _decoded(path: str) -> torch.Tensor:
    with Path(path).open("rb") as file:
        Image.open(file)
        file.seek(0)
        content = torch.from_numpy(np.frombuffer(bytearray(file.read()), np.uint8))
    return decode_jpeg(content, mode=ImageReadMode.RGB)


@dataclass(frozen=True)
class NotResized(ImageTask):
    """Crops are drawn, and put together in their own sizes, filled up to the largest: what would be
    left to the host if the device resized and flipped them."""

    @cached_property
    def _training(self) -> Any:
        crop = v2.RandomResizedCrop(self.size)

        def of(image: torch.Tensor) -> torch.Tensor:
            box = crop.make_params([image])
            torch.rand(1)
            top, remaining = box["top"], box["left"]
            return image[:, top : top + box["height"], remaining : remaining + box["width"]]

        return of

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        crops = [each["images"].permute(1, 2, 0) for each in samples]
        height, width = (max(each.shape[side] for each in crops) for side in (0, 1))
        images = torch.zeros((len(crops), height, width, 3), dtype=torch.uint8)
        for row, crop in enumerate(crops):
            images[row, : crop.shape[0], : crop.shape[1]] = crop
        return {"images": images, "labels": torch.tensor([each["labels"] for each in samples])}


def small_task(count: int, on_host: bool) -> ImageTask:
    """Images as small as CIFAR's, in memory as those are; enlarged by the host, or left small."""
    dice = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, SMALL, SMALL), dtype=torch.uint8, generator=dice)
    source = InMemory(pixels, torch.arange(count) % 10)
    task = ImageTask(dataset="cifar10")
    task.__dict__["images"] = Images(source, source, 10, 3, (0.5,) * 3, (0.3,) * 3, SMALL)
    # What exchanges boxes is enlarged before.
    task.__dict__["look"] = replace(task.look, boxes=on_host)
    return task

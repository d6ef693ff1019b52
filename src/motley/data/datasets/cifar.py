"""CIFAR-10 and CIFAR-100: 50,000 training images and 10,000 held-out images of 32x32 pixels.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.datasets import Dataset

if TYPE_CHECKING:
    from motley.data.images import Images


def _open(kind: str, folder: Path, img_size: int, download: bool = False) -> "Images":
    import torch
    from torchvision import datasets as tv  # type: ignore[import-untyped]

    from motley.data.images import Images, InMemory

    train, test = (
        getattr(tv, kind)(folder, train=train, download=download) for train in (True, False)
    )

    def in_memory(part: Any) -> InMemory:
        pixels = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        return InMemory(pixels, torch.tensor(part.targets))

    return Images(
        in_memory(train), in_memory(test), classes=len(train.classes), channels=3,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), native_size=32,
        class_names=tuple(train.classes),
    )  # fmt: skip


def _download(kind: str, folder: Path) -> None:
    _open(kind, folder, 32, download=True)


DATASETS = tuple(
    Dataset(kind.lower(), "is downloaded", partial(_open, kind), partial(_download, kind))
    for kind in ("CIFAR10", "CIFAR100")
)

"""50,000 training images: copies of 64 random images in memory, without disk access or decoding.

An epoch in Motley's benchmarks has this number of images.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from motley.data.datasets import Dataset

if TYPE_CHECKING:
    from motley.data.images import Images


def _open(folder: Path, img_size: int) -> "Images":
    import torch

    from motley.data.images import Images, InMemory

    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(
        0, 256, (64, 3, img_size, img_size), dtype=torch.uint8, generator=generator
    )
    labels = torch.arange(64) % 10
    return Images(
        InMemory(pool, labels, 50_000), InMemory(pool, labels, 640), classes=1000, channels=3,
        mean=(0.5,) * 3, std=(0.29,) * 3, native_size=img_size,
    )  # fmt: skip


DATASETS = (Dataset("synthetic", "is for speed", _open, keeps=False),)

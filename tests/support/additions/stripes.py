"""A dataset: stripes that lie, stand, or lean, which are the classes."""

from pathlib import Path
from typing import Any

from motley.data.datasets import Dataset


def _open(folder: Path, img_size: int) -> Any:
    import torch

    from motley.data.images import Images, InMemory

    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    stripes = torch.stack([y, x, x + y]) // 2 % 2 * 200
    noise = torch.randint(0, 55, (256, 8, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(256) % 3
    images = (stripes[labels] + noise).to(torch.uint8)[:, None]
    return Images(
        InMemory(images[64:], labels[64:]), InMemory(images[:64], labels[:64]), classes=3,
        channels=1, mean=(0.5,), std=(0.4,), native_size=8, augment=False,
    )  # fmt: skip


DATASETS = (
    Dataset("stripes", "are computed", _open, model="vit_digits", needs_workers=False),
)  # fmt: skip

"""1,797 real 8x8 images of handwritten digits that ship with scikit-learn; 360 held out."""

from pathlib import Path
from typing import TYPE_CHECKING

from motley.data.dataset import Dataset

if TYPE_CHECKING:
    from motley.data.images import Images


def _open(folder: Path, img_size: int) -> "Images":
    import numpy as np
    import torch
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    from motley.data.images import Images, InMemory

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]
    parts = train_test_split(
        pixels, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return Images(
        InMemory(train_x, train_y), InMemory(test_x, test_y), classes=10, channels=1,
        mean=(0.305,), std=(0.377,), native_size=8, augment=False,
    )  # fmt: skip


DATASETS = (
    Dataset(
        "digits", "(default) ships with scikit-learn", _open,
        model="vit_digits", needs_workers=False,
    ),
)  # fmt: skip

"""1,797 real 8x8 images of handwritten digits that ship with scikit-learn; 360 held out."""

import contextlib
import os
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.dataset import Dataset

if TYPE_CHECKING:
    from motley.data.images import Images

_PARTS = ("train_x", "test_x", "train_y", "test_y")
_SIZES = (1437, 360, 1437, 360)


def _parts() -> dict[str, Any]:
    """As scikit-learn splits them. It takes a second or two to be imported, on each rank; so what
    it gave is kept on this machine, as numbers alone."""
    import numpy as np

    from motley.launch.process import cache_folder

    kept = cache_folder() / f"digits-{version('scikit-learn')}.npz"
    with contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        with np.load(kept, allow_pickle=False) as content:
            found = {name: content[name] for name in _PARTS}
        if tuple(map(len, found.values())) == _SIZES:
            return found
    found = dict(zip(_PARTS, _split(), strict=True))
    own = kept.with_name(f"{kept.stem}.{os.getpid()}.npz")
    with contextlib.suppress(OSError):  # of a full disk
        np.savez(own, allow_pickle=False, **found)
        own.replace(kept)
    return found


def _split() -> list[Any]:
    import numpy as np
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]
    parts: list[Any] = train_test_split(
        pixels, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    return parts


def _open(folder: Path, img_size: int) -> "Images":
    import torch

    from motley.data.images import Images, InMemory

    train_x, test_x, train_y, test_y = map(torch.from_numpy, _parts().values())
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

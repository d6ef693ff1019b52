"""Images in one folder per class, below ``train`` and ``val``, as torchvision reads them.

The held-out images may be below ``validation``, ``valid`` or ``test`` instead of ``val``.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from motley.data.datasets import HELD_OUT, TRAIN, Dataset
from motley.errors import MotleyError

if TYPE_CHECKING:
    from motley.data.images import Images


def _open(root: Path, img_size: int) -> "Images":
    from motley.data.images import ImageFolder, Images, account

    parts = []
    held_out = next((name for name in ("val", *HELD_OUT) if (root / name).is_dir()), "val")
    for name in (TRAIN, held_out):
        try:
            parts.append(ImageFolder(root / name))
        except OSError as error:
            raise MotleyError(
                f"--data-dir {root} needs the folders train/ and val/ (or validation/), each with "
                f"one folder per class; {error}"
            ) from None
    train, test = parts
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise MotleyError(
            f"--data-dir {root}: train/ and {held_out}/ have different classes: "
            f"{', '.join(odd[:5])}"
        )
    if not len(train) or not len(test):
        raise MotleyError(
            f"--data-dir {root}: {(held_out if len(train) else 'train')}/ has no images"
        )
    return Images(
        train, test, classes=len(train.classes), channels=3,
        mean=None, std=None, native_size=None, class_names=tuple(train.classes),
        account=account(train, test, held_out),
        name_of=lambda source, index: str(source.samples[index][0]),  # type: ignore[attr-defined]
    )  # fmt: skip


DATASETS = (
    Dataset("folder", "is one folder a class under --data-dir/train and --data-dir/val", _open),
)

"""Images with one folder per class, under ``train`` and ``val``, as torchvision reads them."""

from pathlib import Path
from typing import TYPE_CHECKING

from motley.data.datasets import Dataset
from motley.errors import MotleyError

if TYPE_CHECKING:
    from motley.data.images import Images


def _open(root: Path, img_size: int) -> "Images":
    from motley.data.images import ImageFolder, Images, account

    parts = []
    for name in ("train", "val"):
        try:
            parts.append(ImageFolder(root / name))
        except OSError as error:
            raise MotleyError(
                f"--data-dir {root} needs the folders train/ and val/ with one folder a class in "
                f"each; {error}"
            ) from None
    train, test = parts
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise MotleyError(
            f"--data-dir {root}: train/ and val/ differ in the classes {', '.join(odd[:5])}"
        )
    if not len(train) or not len(test):
        raise MotleyError(f"--data-dir {root}: no images in {'val' if len(train) else 'train'}/")
    return Images(
        train, test, classes=len(train.classes), channels=3,
        mean=None, std=None, native_size=None, class_names=tuple(train.classes),
        account=account(train, test),
        name_of=lambda source, index: str(source.samples[index][0]),  # type: ignore[attr-defined]
    )  # fmt: skip


DATASETS = (
    Dataset("folder", "is one folder a class under --data-dir/train and --data-dir/val", _open),
)

"""Datasets and transforms: where images come from, and what is done to each.

Images stay uint8 and are normalised on the device (motley.tasks.model): a quarter of the bytes
through worker processes and over the PCI bus.
"""

import fcntl
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets as tv  # type: ignore[import-untyped]
from torchvision.transforms import v2  # type: ignore[import-untyped]

from motley.config.options import Config
from motley.errors import MotleyError

Transform = Callable[[Any], Any]
NO_LABEL = -1

# What is too large to be an image is an error; PIL also warns of every photo of half that size.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class UnreadableImage(Exception):  # noqa: N818 - of the image, not of the program
    """An image cannot be decoded; the message says why."""


class Source(Protocol):
    """A set of images that can be asked for by index."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Image (PIL or uint8 tensor [C, H, W]) and label; see :func:`read`."""


def read(source: Source, index: int) -> tuple[Any, int]:
    """``source[index]``; raises UnreadableImage, whatever the decoder raised.

    Pillow has no type of error of its own: of torn or hostile files its decoders raise OSError,
    SyntaxError, ValueError, DecompressionBombError, TypeError and, by format, what else their
    authors did not think of. Lack of memory is none of the image's.
    """
    try:
        return source[index]
    except (MemoryError, MotleyError):
        raise
    except Exception as error:
        raise UnreadableImage(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Images:
    """Training and held-out images, and what a model must know of them.

    Attributes:
        mean, std: per channel, of pixels scaled to 0..1.
        native_size: pixels a side; None where images differ.
        augment: a shifted or mirrored image is still of its class. Not so for digits: one
            of 8 pixels is far to shift, and costs 2 points of accuracy.
        name_of: how to call training image ``index`` in an error.
    """

    train: Source
    test: Source
    classes: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    native_size: int | None
    augment: bool = True
    name_of: Callable[[Source, int], str] = field(default=lambda source, index: f"image {index}")


# -- the datasets


def load_images(config: Config, img_size: int) -> Images:
    """Open ``--dataset``; raise MotleyError where it is missing or damaged.

    Touches no network: see :func:`prepare`.

    Args:
        img_size: pixels a side that the model takes.
    """
    if config.dataset == "digits":
        return _digits()
    if config.dataset == "synthetic":
        return _synthetic(img_size)
    if config.dataset == "folder":
        return _folder(Path(config.data_dir))
    return _cifar(config, download=False)


def prepare(config: Config) -> None:
    """Download and unpack what is missing; call it on one rank a machine.

    Machines that share the folder wait for each other at a lock.
    """
    if not config.dataset.startswith("cifar"):
        return
    folder = Path(config.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{config.dataset}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _cifar(config, download=True)
        except Exception as error:
            raise MotleyError(
                f"{config.dataset} is not under {folder.resolve()} and could not be downloaded "
                f"({type(error).__name__}: {error}); put its .tar.gz there, or choose "
                "--dataset digits, which needs no download"
            ) from error


def _digits() -> Images:
    """1,797 real 8x8 images of handwritten digits that ship with scikit-learn; 360 held out."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]
    parts = train_test_split(
        pixels, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return Images(
        _Tensors(train_x, train_y), _Tensors(test_x, test_y), classes=10, channels=1,
        mean=(0.305,), std=(0.377,), native_size=8, augment=False,
    )  # fmt: skip


def _synthetic(img_size: int) -> Images:
    """50,000 training images (the lab's epoch) of 64 different ones: no disk, no decoding."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(
        0, 256, (64, 3, img_size, img_size), dtype=torch.uint8, generator=generator
    )
    labels = torch.arange(64) % 10
    return Images(
        _Tensors(pool, labels, 50_000), _Tensors(pool, labels, 640), classes=1000, channels=3,
        mean=(0.5,) * 3, std=(0.29,) * 3, native_size=img_size,
    )  # fmt: skip


def _cifar(config: Config, download: bool) -> Images:
    kind = {"cifar10": tv.CIFAR10, "cifar100": tv.CIFAR100}[config.dataset]
    train, test = (kind(config.data_dir, train=train, download=download) for train in (True, False))
    return Images(
        train, test, classes=len(train.classes), channels=3,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), native_size=32,
    )  # fmt: skip


def _folder(root: Path) -> Images:
    """One folder a class, under ``train`` and ``val``, as torchvision's ImageFolder reads it."""
    parts = []
    for name in ("train", "val"):
        try:
            # An empty class folder is allowed here and judged by the class lists below.
            parts.append(tv.ImageFolder(root / name, allow_empty=True))
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
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), native_size=None,
        name_of=lambda source, index: str(source.samples[index][0]),  # type: ignore[attr-defined]
    )  # fmt: skip


def of_files(images: Images, folder: Path) -> Images:
    """The same, but its held-out images are all those under a folder, which have no label."""
    if not folder.is_dir():
        raise MotleyError(f"--images {folder} is no folder")
    endings = tuple(tv.folder.IMG_EXTENSIONS)
    files = sorted(path for path in folder.rglob("*") if path.name.lower().endswith(endings))
    if not files:
        raise MotleyError(f"--images {folder}: no image is in it, such as {', '.join(endings[:4])}")
    return replace(
        images, test=_Files(files, "RGB" if images.channels == 3 else "L"), native_size=None,
        name_of=lambda source, index: str(files[index].relative_to(folder)),
    )  # fmt: skip


class _Files:
    """Images without labels."""

    def __init__(self, files: Sequence[Path], colours: str) -> None:
        self._files, self._colours = files, colours

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.open(self._files[index]).convert(self._colours), NO_LABEL


class _Tensors:
    """Images in memory, repeated up to ``length``."""

    def __init__(self, images: Tensor, labels: Tensor, length: int | None = None) -> None:
        self._images, self._labels = images, labels.tolist()
        self._length = length or len(images)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        at = index % len(self._labels)
        return self._images[at], self._labels[at]


# -- transforms


def training_transform(images: Images, img_size: int, augment: bool) -> Transform:
    """Random crop and flip to uint8 [C, img_size, img_size], from torch's global generator."""
    if not (augment and images.augment):
        return evaluation_transform(images, img_size)
    steps: list[Transform] = [v2.ToImage()]
    if images.native_size is None:
        steps.append(v2.RandomResizedCrop(img_size, antialias=True))
    else:
        steps.append(v2.RandomCrop(images.native_size, padding=max(1, images.native_size // 8)))
        if images.native_size != img_size:
            steps.append(v2.Resize((img_size, img_size), antialias=True))
    return v2.Compose([*steps, v2.RandomHorizontalFlip()])  # type: ignore[no-any-return]


def evaluation_transform(images: Images, img_size: int) -> Transform:
    """Resize and crop the middle, to uint8 [C, img_size, img_size]."""
    if images.native_size == img_size:
        return v2.ToImage()  # type: ignore[no-any-return]
    if images.native_size is not None:
        return v2.Compose([v2.ToImage(), v2.Resize((img_size, img_size), antialias=True)])  # type: ignore[no-any-return]
    return v2.Compose(  # type: ignore[no-any-return]
        [v2.ToImage(), v2.Resize(round(img_size * 8 / 7), antialias=True), v2.CenterCrop(img_size)]
    )

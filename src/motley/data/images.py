"""Access to images by index, and folders of images with one subfolder per class.

The module counts the files of a folder that it does not read as images.

Images stay uint8 and are normalised on the device (motley.tasks.builtin.image). Transfers from
loader processes and over the PCI bus then take a quarter of the bytes.
"""

import hashlib
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torchvision import datasets as tv  # type: ignore[import-untyped]

from motley.data.datasets import CLASS, VALUE
from motley.data.source import Source
from motley.errors import MotleyError
from motley.text import name_some

NO_LABEL = -1
_FORMATS = (
    "apng", "avif", "bmp", "dib", "gif", "j2k", "jfif", "jp2", "jpe", "jpeg", "jpg", "pbm", "pgm",
    "png", "pnm", "ppm", "tga", "tif", "tiff", "webp",
)  # fmt: skip
_FOREIGN = ("#recycle", "$recycle.bin", "@eadir", "__macosx", "desktop.ini", "thumbs.db")
_GREY_16 = ("PNG", "PPM")  # formats whose 16-bit pixels PIL returns as 32 bits

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip

# A file too large to be an image raises an error. PIL also warns about photos half that large.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def image_endings() -> tuple[str, ...]:
    """Return the file name endings, such as ``.png``, of the image formats that Pillow can read."""
    known = Image.registered_extensions()
    return tuple(f".{name}" for name in _FORMATS if known.get(f".{name}") in Image.OPEN)


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC).

    File systems differ in the form of names. Without this conversion, hosts could sort files
    differently.
    """
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class Images:
    """Training and held-out images, and the properties on which a model depends.

    Attributes:
        train: training images. An item is a pair of an image and its label. The image is a PIL
            image or a uint8 tensor [C, H, W].
        test: held-out images, with items as in ``train``.
        classes: number of classes.
        channels: number of channels.
        mean: mean of each channel, for pixels scaled to 0..1; None: use the model's usual mean.
        std: standard deviation of each channel, for pixels scaled to 0..1; None: use the model's
            usual value.
        native_size: side of all images in pixels; None: images differ in size.
        augment: True if a shifted or mirrored image keeps its class. False for digits: one pixel is
            a large shift in an image of 8 pixels, and costs 2 points of accuracy.
        name_of: function that returns the name of the training image with an index, for errors.
        identity: hash of all images; None if it is not known. A run continues only with the same
            hash.
        class_names: names of the classes by label; empty if they have none.
        account: one line with the number of files in a folder that were read, and the number of
            files that were not. Empty for other sources.
        kind: kind of the labels: one class, several labels (fp32 [classes], 0 or 1), or a number.
    """

    train: Source
    test: Source
    classes: int
    channels: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    native_size: int | None
    augment: bool = True
    name_of: Callable[[Source, int], str] = field(default=lambda source, index: f"image {index}")
    identity: str = ""
    class_names: tuple[str, ...] = ()
    account: str = ""
    kind: str = CLASS

    def fingerprint(self) -> str:
        """Return a text with the number of images, and a hash of their labels and known paths.

        No image is read. The hash is the same on all hosts, wherever the folder of the images is.
        """
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            if samples := getattr(part, "samples", None):  # torchvision's list of files
                root = f"{part.root}{os.sep}"  # type: ignore[attr-defined]
                names = (composed(path.removeprefix(root)) for path, _ in samples)
                digest.update("\0".join(names).encode())
            if (labels := getattr(part, "targets", None)) is not None:
                form = "<f8" if self.kind == VALUE else "<i8"
                digest.update(np.asarray(labels, dtype=form).tobytes())
        return (
            f"{len(self.train)} training and {len(self.test)} held-out images, list "
            f"{digest.hexdigest()[:12]}"
        )


class InMemory:
    """A source of images in memory. The images are repeated to make ``length`` samples.

    Attributes:
        images: uint8 [n, C, H, W].
        places: for each sample, the index of its image in ``images``, and its label.
    """

    def __init__(self, images: Tensor, labels: Tensor, length: int | None = None) -> None:
        self.images = images
        self.places = _Places(labels.tolist(), length or len(images))

    @property
    def targets(self) -> list[int]:
        """Label of each sample. The attribute has the name that torchvision uses."""
        return [self.places[index][1] for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        at, label = self.places[index]
        return self.images[at], label


@dataclass(frozen=True)
class _Places:
    """A sequence with the image index and the label of each sample of InMemory."""

    labels: Sequence[int]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        at = index % len(self.labels)
        return at, self.labels[at]


class _OfClasses:
    """The images of some classes, with new class numbers.

    Args:
        source: the images, with the attribute ``targets``, the label of each image.
        classes: old labels of the classes to use, in their new order.
    """

    def __init__(self, source: Source, classes: Sequence[int]) -> None:
        self._source = source
        self._new = {label: number for number, label in enumerate(classes)}
        self.chosen = [at for at, label in enumerate(source.targets) if label in self._new]  # type: ignore[attr-defined]

    @property
    def targets(self) -> list[int]:
        """Label of each sample. The attribute has the name that torchvision uses."""
        labels: list[int] = self._source.targets  # type: ignore[attr-defined]
        return [self._new[labels[at]] for at in self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self._source[self.chosen[index]]
        return image, self._new[label]


def select_classes(images: Images, classes: Sequence[int]) -> Images:
    """Return only the images of some classes. The new label of a class is its place in ``classes``.

    Raises:
        MotleyError: a class does not exist, or there are fewer than two.
    """
    unknown = [label for label in classes if label >= images.classes]
    if unknown or len(classes) < 2:
        raise MotleyError(
            f"--classes {','.join(map(str, classes))}: name two or more of 0 to "
            f"{images.classes - 1}"
        )
    train, test = (_OfClasses(source, classes) for source in (images.train, images.test))
    return replace(
        images, train=train, test=test, classes=len(classes),
        class_names=tuple(images.class_names[label] for label in classes if images.class_names),
        name_of=lambda source, index: images.name_of(images.train, train.chosen[index]),
    )  # fmt: skip


def is_foreign(name: str) -> bool:
    """Return True for a file name that an operating system, archiver or file server creates."""
    return name.startswith(".") or name.lower() in _FOREIGN


def list_images(paths: Sequence[Path]) -> list[Path]:
    """Return the image files among paths, and the sorted image files below folders among paths.

    Raises:
        MotleyError: a path does not exist, or a folder has no images.
    """
    endings, result = image_endings(), list[Path]()
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise MotleyError(
                    f"{path} does not exist; name image files, or folders that hold them"
                )
            result.append(path)
            continue
        found = (
            each for each in path.rglob("*")
            if each.name.lower().endswith(endings)
            and not any(map(is_foreign, each.relative_to(path).parts))
        )  # fmt: skip
        files = sorted(found, key=lambda each: tuple(map(composed, each.parts)))
        if not files:
            raise MotleyError(
                f"{path} has no image; images end with {', '.join(endings[:4])} or similar (name "
                "tables one by one)"
            )
        result += files
    return result


def with_files(images: Images, files: Sequence[Path], folder: Path | None = None) -> Images:
    """Return the images with these files as held-out images, without labels.

    Args:
        images: the images.
        files: the files.
        folder: a common parent folder of the files, which messages leave out of file names.
    """
    return replace(
        images, test=_Files(files, "RGB" if images.channels == 3 else "L"), native_size=None,
        name_of=lambda source, index: str(
            files[index].relative_to(folder) if folder else files[index]
        ),
    )  # fmt: skip


def open_held_out(images: Images, name: str, folder: Path) -> Source:
    """Return an additional held-out set from a folder with one subfolder per class.

    Subfolders of some classes may be missing. If all training images have one size, the images of
    the set are resized to this size.

    Args:
        images: the images that are trained on, with their classes.
        name: name of the set.
        folder: folder of the set.

    Raises:
        MotleyError: the folder cannot be read, has no images, or has other classes.
    """
    try:
        result = ImageFolder(folder)
    except OSError as error:
        raise MotleyError(
            f"--eval-data {name}={folder} needs one folder per class; {error.strerror or error}"
        ) from None
    known = images.class_names or tuple(map(str, range(images.classes)))
    if unknown := [each for each in result.classes if each not in known]:
        raise MotleyError(
            f"--eval-data {name}={folder} has the classes {name_some(unknown)}, which are not "
            f"classes of the training data: {name_some(known)}"
        )
    if not len(result):
        raise MotleyError(f"--eval-data {name}={folder} has no images; check the path")
    number = [known.index(each) for each in result.classes]
    result.samples = [(path, number[label]) for path, label in result.samples]
    result.targets = [label for _, label in result.samples]
    side, colours = images.native_size, "RGB" if images.channels == 3 else "L"

    def load(path: str) -> Any:
        with Path(path).open("rb") as file:
            image = decoded(Image.open(file), colours)
        if side is None:
            return image
        image = image.resize((side, side), Image.Resampling.BICUBIC)
        pixels = np.asarray(image).reshape(side, side, images.channels)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    result.loader = load
    return result


def decoded(image: Image.Image, colours: str = "RGB") -> Image.Image:
    """Decode an opened PIL image, convert it to a mode, and rotate it by its EXIF tag.

    Unlike PIL's convert(), the function does not copy an image that has the mode already, and does
    not clip 16-bit pixels at 255.

    Args:
        image: the opened image.
        colours: mode of PIL, such as RGB.

    Raises:
        ValueError: the range of the pixel values is not known.
    """
    image.load()
    turn = _find_rotation(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _GREY_16):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {('floats' if image.mode == 'F' else '32-bit integers')}, whose "
            "range the file does not record; convert it to 8 or 16 bits"
        )
    image = image if image.mode == colours else image.convert(colours)
    return image if turn is None else image.transpose(turn)


def _find_rotation(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes a loaded image upright, or None.

    Cameras store photos in the orientation of their sensor, and write the orientation to a tag. PIL
    rotates only a TIFF by itself.
    """
    try:
        return _TURNS.get(int(image.getexif().get(ExifTags.Base.Orientation, 1)))
    except Exception:  # damaged metadata does not make an image unreadable
        return None


def load_image(path: str) -> Image.Image:
    """Return the image of a file in RGB, as torchvision's ImageFolder reads it."""
    with Path(path).open("rb") as file:
        return decoded(Image.open(file))


class _Files:
    """A source of image files without labels."""

    def __init__(self, files: Sequence[Path], colours: str) -> None:
        self._files, self._colours = files, colours

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return decoded(Image.open(self._files[index]), self._colours), NO_LABEL


class ImageFolder(tv.ImageFolder):  # type: ignore[misc]
    """An ImageFolder of torchvision that skips files which other programs leave in a folder.

    The names of classes are in Unicode's composed form (NFC). Files are sorted by that form,
    because file systems differ in the form of names. A link to a parent folder is not followed.

    Attributes:
        left_out: number of files and folders that are not read, by kind. For example,
            ``{".gif": 8}`` means 8 GIF files.

    Raises:
        OSError: ``root`` is not a folder.
        MotleyError: two folders have the same name.
    """

    def __init__(self, root: Path) -> None:
        self.left_out: Counter[str] = Counter()
        self._folders: dict[str, str] = {}
        super().__init__(root, loader=load_image, allow_empty=True)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the sorted names of the classes, and the number of each class by its name."""
        for entry in os.scandir(directory):
            if is_foreign(entry.name):
                continue
            if not entry.is_dir():
                self._leave_out(entry.name, "in no class folder")
                continue
            name = composed(entry.name)
            if name in self._folders:
                raise MotleyError(
                    f"{directory} has two folders for the class {name}, whose names differ only "
                    "in their Unicode normal form; move the images into one of them"
                )
            self._folders[name] = entry.path
        if not self._folders:
            raise FileNotFoundError(f"{directory} has no class folder")
        classes = sorted(self._folders)
        return classes, {name: place for place, name in enumerate(classes)}

    def make_dataset(
        self, directory: str | Path, class_to_idx: dict[str, int], *_: Any, **__: Any
    ) -> list[tuple[str, int]]:
        """Return the path and the class number of each image."""
        endings, above = image_endings(), {os.path.realpath(directory)}
        return [
            (path, label) for name, label in sorted(class_to_idx.items())
            for path in self._files(self._folders[name], endings, above)
        ]  # fmt: skip

    def _files(self, folder: str, endings: tuple[str, ...], above: set[str]) -> list[str]:
        """Return the paths of the images below a folder, in torchvision's order."""
        result = []
        seen = set(above)
        walk = os.walk(folder, onerror=self._count_closed, followlinks=True)
        for here, inner, names in walk:
            real = os.path.realpath(here)
            if real in seen:
                self.left_out["link to a folder that is read already"] += 1
                inner.clear()
                continue
            seen.add(real)
            inner[:] = [name for name in inner if not is_foreign(name)]
            result.append((here, names))
        images = []
        for here, names in sorted(result, key=lambda each: composed(each[0])):
            for name in sorted(names, key=composed):
                if name.lower().endswith(endings) and not is_foreign(name):
                    images.append(f"{here}{os.sep}{name}")
                else:
                    self._leave_out(name)
        return images

    def _count_closed(self, error: OSError) -> None:
        self.left_out[f"folder ({error.strerror})"] += 1

    def _leave_out(self, name: str, why: str = "") -> None:
        if not is_foreign(name):
            kind = Path(name).suffix.lower() or "file without an ending"
            self.left_out[f"{kind} {why}".rstrip()] += 1


def account(train: ImageFolder, test: ImageFolder, held_out: str = "val") -> str:
    """Return one line with the numbers of images that were read, and of files that were not.

    An example is ``16 images of 2 classes, 8 held out; not read: 8 .svg, 1 folder (Permission
    denied)``.

    Args:
        train: the images to train on.
        test: the held-out images.
        held_out: name of the folder of the held-out images.
    """
    classes = len(train.classes)
    words = (
        f"{len(train):,} images of {classes} {'class' if classes == 1 else 'classes'}, "
        f"{len(test):,} held out"
    )
    if left_out := train.left_out + test.left_out:
        words += "; not read: " + ", ".join(
            f"{count:,} {kind}" for kind, count in left_out.most_common()
        )
    for name, part in (("train", train), (held_out, test)):
        labels = set(part.targets)
        empty = [each for label, each in enumerate(part.classes) if label not in labels]
        if empty:
            words += f"; no image in {name}/ of {', '.join(empty[:5])}"
    return words

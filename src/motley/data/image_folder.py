"""A folder of images with one folder a class, and an account of what is not read in it."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from torchvision import datasets as tv  # type: ignore[import-untyped]

from motley.data.images import composed, image_endings, is_foreign, load_image
from motley.errors import MotleyError


class ImageFolder(tv.ImageFolder):  # type: ignore[misc]
    """torchvision's ImageFolder without what other programs leave in a folder.

    The names of classes are in Unicode's composed form (NFC), and files are in its order, since
    file systems differ in it. A link that leads back to a folder above is not followed.

    Attributes:
        left_out: how many files and folders of each kind are not read; ``8 .gif`` is
            ``{".gif": 8}``.

    Raises:
        OSError: ``root`` is no folder.
        MotleyError: two folders have the same name.
    """

    def __init__(self, root: Path) -> None:
        self.left_out: Counter[str] = Counter()
        self._folders: dict[str, str] = {}
        super().__init__(root, loader=load_image, allow_empty=True)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """See DatasetFolder."""
        for entry in os.scandir(directory):
            if is_foreign(entry.name):
                continue
            if not entry.is_dir():
                self._leave_out(entry.name, "in no class folder")
                continue
            name = composed(entry.name)
            if name in self._folders:
                raise MotleyError(
                    f"{directory} has two folders for the class {name}, whose names differ in "
                    "Unicode's form alone; put their images into one"
                )
            self._folders[name] = entry.path
        if not self._folders:
            raise FileNotFoundError(f"there is no class folder in {directory}")
        classes = sorted(self._folders)
        return classes, {name: place for place, name in enumerate(classes)}

    def make_dataset(
        self, directory: str | Path, class_to_idx: dict[str, int], *_: Any, **__: Any
    ) -> list[tuple[str, int]]:
        """See DatasetFolder."""
        endings, above = image_endings(), {os.path.realpath(directory)}
        return [
            (path, label) for name, label in sorted(class_to_idx.items())
            for path in self._files(self._folders[name], endings, above)
        ]  # fmt: skip

    def _files(self, folder: str, endings: tuple[str, ...], above: set[str]) -> list[str]:
        """Return the images below a folder, in the order of torchvision's."""
        found = []
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
            found.append((here, names))
        images = []
        for here, names in sorted(found, key=lambda each: composed(each[0])):
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


def account(train: ImageFolder, test: ImageFolder) -> str:
    """Return one line of what was read, and what was not: ``16 images of 2 classes, 8 held out; not
    read: 8 .svg, 1 folder (Permission denied)``."""
    classes = len(train.classes)
    words = (
        f"{len(train):,} images of {classes} {'class' if classes == 1 else 'classes'}, "
        f"{len(test):,} held out"
    )
    if left_out := train.left_out + test.left_out:
        words += "; not read: " + ", ".join(
            f"{count:,} {kind}" for kind, count in left_out.most_common()
        )
    for name, part in (("train", train), ("val", test)):
        labels = set(part.targets)
        empty = [each for label, each in enumerate(part.classes) if label not in labels]
        if empty:
            words += f"; no image in {name}/ of {', '.join(empty[:5])}"
    return words

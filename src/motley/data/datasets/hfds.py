"""Images of Hugging Face's datasets library, as timm's ``hfds/`` reads them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.datasets import TRAIN, Dataset, Family, held_out_split
from motley.data.hf_datasets import get_place, hub_access, load_splits
from motley.errors import MotleyError

if TYPE_CHECKING:
    from motley.data.images import Images

_TIMM = (1, 0, 31)  # earlier versions lower names' case, and do not support datasets >= 4


class _Split:
    """The images of one split.

    Args:
        reader: timm's reader. timm's own data set class is not used, because it silently replaces
            an unreadable image by another image.
        name: name of the split.
        label: name of the column with the labels.
    """

    def __init__(self, reader: Any, name: str, label: str) -> None:
        self._reader, self.name = reader, name
        self.targets: list[Any] = list(reader.dataset[label][:])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        from motley.data.images import decoded

        file, label = self._reader[index]
        with file:
            return decoded(Image.open(file)), label


def _open(name: str, folder: Path, img_size: int) -> "Images":
    from motley.data.images import Images
    from motley.data.import_timm import timm

    option = f"--dataset hfds/{name}"
    with hub_access(option, allowed=False):
        splits = _load(name, folder)
        held_out = held_out_split(splits, option)
        features = splits[TRAIN].features
        image = _column(features, "Image", "image", option)
        label = _column(features, "ClassLabel", "label", option)
        train, test = (
            _Split(
                timm.data.create_dataset(
                    f"hfds/{get_place(name)}", str(folder), split, input_key=image, target_key=label
                ).reader, split, label,
            )
            for split in (TRAIN, held_out)
        )  # fmt: skip
    names = getattr(features[label], "names", None)
    classes = max(_classes(part, len(names) if names else None, option) for part in (train, test))
    return Images(
        train, test, classes=classes, channels=3, mean=None, std=None, native_size=None,
        class_names=tuple(names or ()),
        name_of=lambda source, index: f"image {index} of {source.name}",  # type: ignore[attr-defined]
    )  # fmt: skip


def _prepare(name: str, folder: Path) -> None:
    """Download the data set, or convert a folder's images into one file per split.

    One rank of each host calls this function.
    """
    _load(name, folder)


def _load(name: str, folder: Path) -> Mapping[str, Any]:
    """Return all splits by name.

    Raises:
        MotleyError: the data set cannot be loaded, or the installed timm is too old.
    """
    from motley.data.import_timm import timm

    option = f"--dataset hfds/{name}"
    if tuple(map(int, timm.__version__.split(".")[:3])) < _TIMM:
        wanted = ".".join(map(str, _TIMM))
        raise MotleyError(
            f"{option} needs timm {wanted}, and {timm.__version__} is installed; install it on all "
            f"hosts, as in: .venv/bin/pip install 'timm>={wanted}'"
        )
    return load_splits(
        name, option,
        "give after hfds/ a folder of images, a folder of parquet files, a folder written by "
        "DatasetDict.save_to_disk, or OWNER/NAME of a data set on the Hugging Face hub "
        f"(downloaded to --data-dir {folder})", folder,
    )  # fmt: skip


def _column(features: Mapping[str, Any], kind: str, usual: str, option: str) -> str:
    """Return the name of the column that timm would read, or else of the only column of its kind.

    Raises:
        MotleyError: timm's column is missing, and there is not exactly one column of the kind.
    """
    fit = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if usual in features:
        return usual
    if len(fit) != 1:
        raise MotleyError(
            f"{option} has {len(fit) or 'no'} columns of type {kind}, and none has the name "
            f"{usual}; its columns are {', '.join(features)}. Rename one"
        )
    return fit[0]


def _classes(part: _Split, known: int | None, option: str) -> int:
    """Return the number of classes, from their names or from the highest label of this split.

    Raises:
        MotleyError: a label is not the number of a class.
    """
    for index, label in enumerate(part.targets):
        if type(label) is not int or not 0 <= label < (known or label + 1):
            raise MotleyError(
                f"{option}: image {index} of {part.name} has the label {label!r}; give the number "
                f"of a class, from 0{(f' to {known - 1}' if known else '')}"
            )
    return known or 1 + max(part.targets)


def _make(name: str) -> Dataset:
    return Dataset(f"hfds/{name}", "", partial(_open, name), partial(_prepare, name))


DATASETS = (
    Family(
        "hfds/", "with a folder or a hub's OWNER/NAME is read by Hugging Face's datasets", _make
    ),
)

"""Shards of webdataset, named as in timm's ``wds/``, with access to images by index.

timm's reader reads shards from beginning to end, in a different order in each process. Motley reads
images in the global order of samples. Therefore motley.data.shards reads the shards.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.datasets import HELD_OUT, TRAIN, Dataset, Family, held_out_split
from motley.errors import MotleyError

if TYPE_CHECKING:
    from motley.data.images import Images
    from motley.data.shards import Shards

_INFO = ("_info.json", "info.json")


@dataclass(frozen=True)
class _Split:
    """The shards of one split.

    Attributes:
        paths: paths of the shards.
        count: number of samples; None if it is not known.
        label_key: key of the label in a sample's JSON; see Shards.
    """

    paths: tuple[Path, ...]
    count: int | None = None
    label_key: str = ""

    def open(self, name: str, folder: Path) -> "Shards":
        from motley.data.shards import Shards

        images = Shards(self.paths, self.label_key)
        # Writers differ in whether they count samples without a label under ``label_key``.
        wrong = self.count not in (None, len(images)) and not self.label_key
        if wrong or not len(images):
            counted = f" of the {self.count} that {_INFO[0]} records" if wrong else ""
            raise MotleyError(
                f"{folder}: {name} has {len(images) or 'no'} images{counted}, in "
                f"{len(self.paths)} shards; copy all shards"
            )
        return images


def _open(name: str, root: Path, img_size: int) -> "Images":
    from motley.data.images import Images

    # Timm accepts any name for the root folder.
    folder = root / name if (root / name).is_dir() else root
    info = _info(folder)
    splits = _read_sizes(folder, info) if "splits" in info else _by_name(folder)
    if not splits:
        raise MotleyError(
            f"--dataset wds/{name}: {folder} has no shard such as train-0000.tar, and no shard in "
            "a folder train/; name the folder of the shards with --data-dir"
        )
    held_out = held_out_split(splits, f"--dataset wds/{name}: {folder}")
    train, test = (splits[each].open(each, folder) for each in (TRAIN, held_out))
    highest = max(*train.targets, *test.targets)
    classes = info.get("num_classes", highest + 1)
    if not isinstance(classes, int) or classes <= highest:
        raise MotleyError(
            f"{folder}: {_INFO[0]} sets num_classes to {classes!r}, and an image has the label "
            f"{highest}; correct one of them"
        )
    return Images(
        train, test, classes=classes, channels=3, mean=None, std=None, native_size=None,
        name_of=lambda source, index: source.name_of(index),  # type: ignore[attr-defined]
    )  # fmt: skip


def _info(folder: Path) -> Mapping[str, Any]:
    """Return the content of timm's ``_info.json``, or an empty mapping if there is no such file.

    Raises:
        MotleyError: the file is damaged.
    """
    path = next((folder / name for name in _INFO if (folder / name).exists()), None)
    if path is None:
        return {}
    try:
        info = json.loads(path.read_bytes())
        if not isinstance(info, dict):
            raise ValueError(f"a {type(info).__name__} instead of names and values")
    except (OSError, ValueError, RecursionError) as error:
        raise MotleyError(f"{path} cannot be read ({error}); correct or remove it") from None
    return info


def _read_sizes(folder: Path, info: Mapping[str, Any]) -> dict[str, _Split]:
    try:
        return {
            name: _Split(
                tuple(folder / file for file in split["filenames"]),
                split.get("num_samples"), split.get("alt_label", ""),
            )
            for name, split in info["splits"].items()
        }  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise MotleyError(
            f"{folder / _INFO[0]} has no splits in timm's form ({error!r}); write "
            '{"splits": {"train": {"filenames": [...], "num_samples": N}, "validation": ...}}, or '
            "remove the file, and each shard belongs to the split in its name"
        ) from None


def _by_name(folder: Path) -> dict[str, _Split]:
    """Return the shards by the name of their split, which is a part of a shard's path.

    For example, ``flowers-train-0007.tar`` belongs to the split ``train``.
    """
    result: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.tar"), *folder.glob("*/*.tar")]):
        words = re.findall("[a-z]+", str(path.relative_to(folder)).lower())
        split = next((word for word in words if word in (TRAIN, *HELD_OUT)), None)
        if split:
            result.setdefault(split, []).append(path)
    return {split: _Split(tuple(paths)) for split, paths in result.items()}


def _make(name: str) -> Dataset:
    return Dataset(f"wds/{name}", "", partial(_open, name))


DATASETS = (
    Family("wds/", "with a folder of --data-dir, or nothing, is webdataset's .tar shards", _make),
)

"""Small data sets as others publish images: saved by Hugging Face's datasets, and tar shards."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from motley.data.datasets import find_dataset
from motley.data.images import Images


def picture(label: int, number: int) -> Image.Image:
    """Noise of one colour a label, which can be learnt."""
    pixels = np.random.default_rng(number).integers(0, 90, (12, 10, 3), np.uint8)
    pixels[..., label % 3] += 150
    return Image.fromarray(pixels)


def png(label: int, number: int) -> bytes:
    """The same as a file."""
    file = io.BytesIO()
    picture(label, number).save(file, "PNG")
    return file.getvalue()


def samples(count: int, first: int = 0, classes: int = 3) -> list[tuple[str, bytes]]:
    """Members of a shard: images and their labels, in turn."""
    found = []
    for number in range(first, first + count):
        label = number % classes
        found += [(f"{number:05}.png", png(label, number)), (f"{number:05}.cls", b"%d" % label)]
    return found


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A .tar of these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, train: int = 48, test: int = 12) -> Path:
    """Two shards to train on, and one held out."""
    for number, (first, count) in enumerate([(0, train // 2), (train // 2, train - train // 2)]):
        write_shard(folder / f"colours-train-{number:04}.tar", samples(count, first))
    write_shard(folder / "colours-val-0000.tar", samples(test, train))
    return folder


def save_folder(
    folder: Path, counts: Mapping[str, int], names: tuple[str, str] = ("image", "label"),
    labels: Any = ("red", "green", "blue"),
) -> Path:  # fmt: skip
    """What DatasetDict.save_to_disk writes.

    Args:
        counts: of images, by split. names: of the columns.
        labels: names of classes; None: they are numbers; else the labels of every split.
    """
    import datasets

    datasets.disable_progress_bars()
    given = labels if isinstance(labels, list) else None
    kind = datasets.ClassLabel(names=list(labels)) if isinstance(labels, tuple) else None
    features: dict[str, Any] = {names[0]: datasets.Image()}
    if kind is not None:
        features[names[1]] = kind
    elif given is None or not isinstance(given[0], str):
        features[names[1]] = datasets.Value("int64")
    else:
        features[names[1]] = datasets.Value("string")
    parts = {}
    for first, (split, count) in enumerate(counts.items()):
        numbers = range(1000 * first, 1000 * first + count)
        columns = {
            names[0]: [picture(number % 3, number) for number in numbers],
            names[1]: given or [number % 3 for number in numbers],
        }
        parts[split] = datasets.Dataset.from_dict(columns, datasets.Features(features))
    datasets.DatasetDict(parts).save_to_disk(folder)
    return folder


def opened(name: str, folder: Path) -> Images:
    """As a run does it, on one rank a machine and then on all."""
    dataset = find_dataset(name)
    dataset.prepare(folder)
    return dataset.open(folder, 224)


def check_images(images: Images, first_held_out: int, counts: tuple[int, int]) -> None:
    """The pixels and labels are those that were written, in their order."""
    assert (len(images.train), len(images.test)) == counts
    assert (images.classes, images.channels, images.native_size) == (3, 3, None)
    for source, first in ((images.train, 0), (images.test, first_held_out)):
        for index in (0, 1, len(source) - 1, 1):
            image, label = source[index]
            assert label == (first + index) % 3 == source.targets[index]  # type: ignore[attr-defined]
            told = picture(label, first + index)
            assert image.mode == "RGB" and np.array_equal(np.array(image), np.array(told))

"""Access by index to images in .tar shards of webdataset.

The position of each image is found once, from the tar's headers. Later the image is read from this
position. No member is unpacked, so a hostile name or link in a tar has no effect.
"""

import json
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from motley.data.images import decoded
from motley.errors import MotleyError

# Endings of images. If a sample has several images, the first ending in this list counts.
_IMAGES = ("jpg", "jpeg", "png", "webp")
_MOST_LABEL_BYTES = 1 << 20
_MOST_CLASSES = 1 << 24  # a larger number is not a class


class Shards:
    """Images of .tar files, in the order of the files and of the members of each file.

    A sample consists of the members whose paths are equal up to the first dot of the file's name:
    an image, and its label in ``.cls``, or in ``.json`` as ``label``. Members without an image form
    no sample. A file is opened for each image, so that forked processes share no file position.

    Args:
        paths: paths of the files.
        label_key: key of the label in ``.json``, in place of ``label``. Samples with a label below
            0 under this key are left out, as in timm.

    Raises:
        MotleyError: a file cannot be read, is cut short, or an image in it has no label.
    """

    def __init__(self, paths: Sequence[Path], label_key: str = "") -> None:
        self._paths = tuple(paths)
        places = [_places(path, label_key) for path in self._paths]
        # [images, 4]: offset of the header, offset of the image, bytes of the image, label.
        self._places = np.concatenate([np.empty((0, 4), np.int64), *places])
        self._shard = np.repeat(np.arange(len(places)), [len(each) for each in places])

    @property
    def targets(self) -> list[int]:
        """Label of each sample. The attribute has the name that torchvision uses."""
        result: list[int] = self._places[:, 3].tolist()
        return result

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        _, begin, size, label = self._places[index].tolist()
        with self._paths[self._shard[index]].open("rb") as file:
            file.seek(begin)
            content = file.read(size)
        return decoded(Image.open(BytesIO(content))), label

    def name_of(self, index: int) -> str:
        """Return the path of the shard and the name of the image in it."""
        path = self._paths[self._shard[index]]
        with path.open("rb") as file:
            file.seek(self._places[index, 0])
            with tarfile.open(fileobj=file, mode="r:") as tar:
                member = tar.next()
        return f"{path}: {member.name if member else ''!a}"


def _places(path: Path, label_key: str) -> NDArray[np.int64]:
    """Return the positions of all images in a shard, one row per image, int64 [images, 4].

    A row has the offset of the header, the offset of the content, the size in bytes and the label.
    """
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            samples = _samples(tar)
            # tarfile takes a damaged or missing header for the end of the tar.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"byte {tar.offset} is not the beginning of a member")
            result = []
            for key, parts in samples.items():
                image = next((parts[each] for each in _IMAGES if each in parts), None)
                if image is None:
                    continue
                label = _label(tar, parts, label_key, f"{path}: {key!a}")
                if label is not None:
                    result.append((image.offset, image.offset_data, image.size, label))
    except MotleyError:
        raise
    except Exception as error:  # tarfile raises many types of error for damaged headers
        raise MotleyError(
            f"{path} cannot be read: it is cut short, damaged, or not an uncompressed .tar file "
            f"({type(error).__name__}: {error}); copy it again"
        ) from None
    return np.array(result, np.int64).reshape(-1, 4)


def _samples(tar: tarfile.TarFile) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Return the tar members of each sample, by the sample's name and the member's ending.

    A later member replaces an earlier member of the same name.
    """
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in tar:
        if member.size < 0:  # tarfile would go back, and loop for ever
            raise tarfile.ReadError(f"{member.name!a} would have {member.size} bytes")
        folder, slash, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        if stem and member.isreg() and not member.issparse():
            samples.setdefault(folder + slash + stem, {})[ending.lower()] = member
    return samples


def _label(
    tar: tarfile.TarFile, parts: dict[str, tarfile.TarInfo], key: str, name: str
) -> int | None:
    """Return the label of a sample. None: ``key`` is given, and the label is below 0.

    Raises:
        MotleyError: there is no valid label.
    """
    kind = "json" if key or "cls" not in parts else "cls"
    try:
        member = parts[kind]
        file = tar.extractfile(member)
        if file is None or member.size > _MOST_LABEL_BYTES:
            raise ValueError(f"its .{kind} has {member.size} bytes")
        text = file.read()
        label = int(json.loads(text)[key or "label"] if kind == "json" else text)
        if key and label < 0:
            return None
        if not 0 <= label < _MOST_CLASSES:
            raise ValueError(f"{label} is not a class; classes are counted from 0")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        beside = "" if key else "a .cls with the number of its class, or "
        raise MotleyError(
            f"{name} has no label ({why}); put {beside}a .json with "
            f'{{"{key or "label"}": NUMBER}} beside it'
        ) from None
    return label

"""One file with all images of a data set, read through memory mapping.

    64 bytes    "MOTLEYPK", version, where the tail begins, its bytes, its SHA-256
    images      one after another: RGB pixels, row by row, or files as PIL reads them
    tail        bytes of the JSON that follows; the JSON; int64 [images, 5], a row an image

A row is where an image begins, its bytes, height, width and label; an image that could not be
read when it was packed has no bytes, and the JSON says why. The first 64 bytes are written last,
and a file gets its name when it is whole. Nothing in it is run or unpickled.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError

VERSION = 1
SUFFIX = ".packed"
PIXELS, JPEG = "pixels", "jpeg"
_MAGIC = b"MOTLEYPK"
_FIRST = struct.Struct("<8sQQQ32s")
_LENGTH = struct.Struct("<Q")
BEGIN = _FIRST.size
_COLUMNS = 5
_AGAIN = "pack it again with: bash setup/stage_cn.sh"


@dataclass(frozen=True)
class About:
    """What is packed.

    Attributes:
        kept: ``pixels`` or ``jpeg``. longest: pixels of the longest side; None: as they were.
        classes: their names, by label. train: images to train on; those after them are held out.
        unreadable: why an image has no bytes, by its number.
        source: the folder. files, folders: its images' fingerprint, and its folders' times in ns,
            by their paths in it.
        images_sha256: of all bytes of images.
    """

    kept: str
    longest: int | None
    classes: tuple[str, ...]
    train: int
    unreadable: Mapping[int, str]
    source: str
    files: str
    folders: Mapping[str, int]
    images_sha256: str


@dataclass(frozen=True)
class Packed:
    """An open file.

    Attributes:
        rows: int64 [images, 5], see above.
        content: uint8 [bytes], mapped; what is changed in it stays in this process.
        identity: SHA-256 of what is learnt from: the same wherever the images lay, and when.
    """

    path: Path
    about: About
    rows: NDArray[np.int64]
    content: NDArray[np.uint8]
    identity: str


def finish(file: IO[bytes], about: About, rows: NDArray[np.int64]) -> None:
    """Write the tail behind the images, then what the file begins with."""
    told = json.dumps(asdict(about)).encode()
    tail = _LENGTH.pack(len(told)) + told + rows.astype("<i8").tobytes()
    begin = file.seek(0, 2)
    file.write(tail)
    file.seek(0)
    digest = hashlib.sha256(tail).digest()
    file.write(_FIRST.pack(_MAGIC, VERSION, begin, len(tail), digest))


def is_packed(path: Path) -> bool:
    """Whether a file is such a one, of any version, whole or not; OSError if it is unreadable."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_packed(path: Path) -> Packed:
    """Open a file; its images are not read.

    Raises:
        MotleyError: it is none, of another version, cut short or damaged, as far as its tail tells.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin, tail = _tail(path, file, size)
        about, rows = _parse(tail)
        if not _fits(about, rows, begin):
            raise ValueError("its rows lie outside of it")
        content = np.asarray(np.memmap(path, np.uint8, mode="c", shape=(begin,)))
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MotleyError(f"{path} is damaged ({error}); {_AGAIN}") from None
    return Packed(path, about, rows, content, _identity(about, rows))


def _tail(path: Path, file: IO[bytes], size: int) -> tuple[int, bytes]:
    """Where it begins, and what it is."""
    first = file.read(BEGIN)
    if first[: len(_MAGIC)] != _MAGIC:
        raise MotleyError(f"{path} is no packed data set; {_AGAIN}")
    if len(first) < BEGIN:
        raise MotleyError(f"{path} is cut short, to {size} bytes; copy it anew, or {_AGAIN}")
    _, version, begin, length, digest = _FIRST.unpack(first)
    if version != VERSION:
        raise MotleyError(
            f"{path} is of version {version}, and this Motley reads version {VERSION}; {_AGAIN}"
        )
    if size != begin + length:
        short = "cut short" if size < begin + length else "longer than it was"
        raise MotleyError(
            f"{path} is {short}: {size:,} bytes of {begin + length:,}; copy it anew, or {_AGAIN}"
        )
    file.seek(begin)
    tail = file.read(length)
    if hashlib.sha256(tail).digest() != digest:
        raise ValueError("what it says of its images has another hash than it had")
    return begin, tail


def _parse(tail: bytes) -> tuple[About, NDArray[np.int64]]:
    (length,) = _LENGTH.unpack_from(tail)
    told = json.loads(tail[_LENGTH.size : _LENGTH.size + length])
    told = {each.name: told[each.name] for each in fields(About)}
    told["classes"] = tuple(told["classes"])
    told["unreadable"] = {int(number): str(why) for number, why in told["unreadable"].items()}
    if told["kept"] not in (PIXELS, JPEG):
        raise ValueError(f"it keeps images as {told['kept']!r}")
    rows = np.frombuffer(tail, "<i8", offset=_LENGTH.size + length).astype(np.int64)
    return About(**told), rows.reshape(-1, _COLUMNS)


def _fits(about: About, rows: NDArray[np.int64], end: int) -> bool:
    """Whether all rows are of images within the file."""
    begin, size, height, width, label = rows.T
    inside = (begin >= BEGIN) & (size >= 0) & (begin <= end) & (size <= end - begin)
    known = (label >= 0) & (label < len(about.classes)) & (height >= 0) & (width >= 0)
    whole = (size == 0) | (about.kept == JPEG) | (size == 3 * height * width)
    return bool((inside & known & whole).all()) and 0 < about.train < len(rows)


def _identity(about: About, rows: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(rows.astype("<i8").tobytes())
    digest.update(json.dumps([about.classes, about.train, about.images_sha256]).encode())
    return digest.hexdigest()

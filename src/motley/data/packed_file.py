"""One file with all images of a data set, packed once and read through memory mapping.

    64 bytes    "MOTLEYPK", version, offset of the tail, bytes of the tail, its SHA-256
    images      one after another: RGB pixels, row by row, or image files that PIL reads
    tail        bytes of the JSON that follows; the JSON; int64 [images, 5], one row per image

A row has the offset of an image, its size in bytes, height, width and label. An image that could
not be read when it was packed has 0 bytes, and the JSON has the reason. The first 64 bytes are
written last. The file has a temporary name until it is complete. No content of the file is executed
or unpickled.

PIL decodes the images. An image that is not shrunk has the same pixels as with ``--dataset
folder``, and gives the same samples.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from motley.data.datasets import find_dataset
from motley.errors import MotleyError
from motley.launch.process import die_with_parent

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
    """The description of a packed file's content.

    Attributes:
        kept: form of the images, ``pixels`` or ``jpeg``.
        longest: limit on the longer side of an image in pixels; None: no limit.
        classes: names of the classes, by label.
        train: number of training images, which come first. All later images are held out.
        unreadable: for each image that could not be read, the reason by the image's index.
        source: path of the folder that was packed.
        files: fingerprint of the paths, sizes and modification times of the image files.
        folders: modification times of the folders in ns, by their paths in ``source``.
        images_sha256: SHA-256 of the bytes of all images.
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
    """An open packed file.

    Attributes:
        path: path of the file.
        about: description of the content.
        rows: the row of each image, int64 [images, 5]; see the docstring of this module.
        content: uint8 [bytes], mapped copy-on-write, so that changes stay in this process.
        identity: SHA-256 of the images, labels and classes. The hash does not depend on the path or
            the modification times of the source.
    """

    path: Path
    about: About
    rows: NDArray[np.int64]
    content: NDArray[np.uint8]
    identity: str


def finish(file: IO[bytes], about: About, rows: NDArray[np.int64]) -> None:
    """Write the tail after the images, then the first 64 bytes of the file."""
    header = json.dumps(asdict(about)).encode()
    tail = _LENGTH.pack(len(header)) + header + rows.astype("<i8").tobytes()
    begin = file.seek(0, 2)
    file.write(tail)
    file.seek(0)
    digest = hashlib.sha256(tail).digest()
    file.write(_FIRST.pack(_MAGIC, VERSION, begin, len(tail), digest))


def is_packed(path: Path) -> bool:
    """Return True if a file is a packed file of any version, even an incomplete one.

    Raises:
        OSError: the file is unreadable.
    """
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_packed(path: Path) -> Packed:
    """Open a packed file, and read its tail. No image is read.

    Raises:
        MotleyError: the file is not a packed file, has another version, is truncated, or its tail
            is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin, tail = _tail(path, file, size)
        about, rows = _parse(tail)
        if not _fits(about, rows, begin):
            raise ValueError("its rows lie outside of the file")
        content = np.asarray(np.memmap(path, np.uint8, mode="c", shape=(begin,)))
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MotleyError(f"{path} is damaged ({error}); {_AGAIN}") from None
    return Packed(path, about, rows, content, _identity(about, rows))


def _tail(path: Path, file: IO[bytes], size: int) -> tuple[int, bytes]:
    """Return the offset and the content of the tail.

    Raises:
        MotleyError: the file is not a packed file, has another version, or has the wrong size.
        ValueError: the tail does not match its hash.
    """
    first = file.read(BEGIN)
    if first[: len(_MAGIC)] != _MAGIC:
        raise MotleyError(f"{path} is not a packed data set; {_AGAIN}")
    if len(first) < BEGIN:
        raise MotleyError(
            f"{path} is cut short: it has only {size} bytes. Copy it again, or {_AGAIN}"
        )
    _, version, begin, length, digest = _FIRST.unpack(first)
    if version != VERSION:
        raise MotleyError(
            f"{path} has version {version} of the file format, and this Motley reads version "
            f"{VERSION}; {_AGAIN}"
        )
    if size != begin + length:
        short = "cut short" if size < begin + length else "longer than recorded"
        raise MotleyError(
            f"{path} is {short}: it has {size:,} bytes, and should have {begin + length:,}. Copy "
            f"it again, or {_AGAIN}"
        )
    file.seek(begin)
    tail = file.read(length)
    if hashlib.sha256(tail).digest() != digest:
        raise ValueError("the hash of its description of the images has changed")
    return begin, tail


def _parse(tail: bytes) -> tuple[About, NDArray[np.int64]]:
    (length,) = _LENGTH.unpack_from(tail)
    header = json.loads(tail[_LENGTH.size : _LENGTH.size + length])
    header = {each.name: header[each.name] for each in fields(About)}
    header["classes"] = tuple(header["classes"])
    header["unreadable"] = {int(number): str(why) for number, why in header["unreadable"].items()}
    if header["kept"] not in (PIXELS, JPEG):
        raise ValueError(f"it stores images as {header['kept']!r}, which this Motley does not read")
    rows = np.frombuffer(tail, "<i8", offset=_LENGTH.size + length).astype(np.int64)
    return About(**header), rows.reshape(-1, _COLUMNS)


def _fits(about: About, rows: NDArray[np.int64], end: int) -> bool:
    """Return True if all rows describe images within the file."""
    begin, size, height, width, label = rows.T
    inside = (begin >= BEGIN) & (size >= 0) & (begin <= end) & (size <= end - begin)
    known = (label >= 0) & (label < len(about.classes)) & (height >= 0) & (width >= 0)
    whole = (size == 0) | (about.kept == JPEG) | (size == 3 * height * width)
    return bool((inside & known & whole).all()) and 0 < about.train < len(rows)


def _identity(about: About, rows: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(rows.astype("<i8").tobytes())
    digest.update(json.dumps([about.classes, about.train, about.images_sha256]).encode())
    return digest.hexdigest()


QUALITY = 95  # quality of JPEGs that are written
_TRIED = 64  # images from which the size of all JPEGs is estimated
_AT_ONCE = 32  # images per process and round; rounds limit the memory


@dataclass(frozen=True)
class Folder:
    """A folder of images, listed as ``--dataset folder`` lists it.

    Attributes:
        root: path of the folder.
        paths: paths of the training images, then of the held-out images.
        labels: label of each image.
        classes: names of the classes, by label.
        train: number of training images.
        files: fingerprint of all images' paths, sizes and modification times.
        folders: modification times of all folders with images, in ns, by their paths below
            ``root``.
    """

    root: Path
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    train: int
    files: str
    folders: dict[str, int]


@dataclass(frozen=True)
class Keep:
    """The form in which images are stored.

    Attributes:
        kind: ``pixels`` or ``jpeg``.
        longest: limit on the longer side of an image in pixels; None: no limit.
    """

    kind: str = PIXELS
    longest: int | None = None


@dataclass(frozen=True)
class _Image:
    content: bytes
    height: int = 0
    width: int = 0
    why: str = ""  # reason why the image cannot be read


def list_folder(root: Path) -> Folder:
    """Return the images of a folder.

    Raises:
        MotleyError: the folder is not valid for ``--dataset folder``.
    """
    images = find_dataset("folder").open(root, 0)
    samples = [*images.train.samples, *images.test.samples]  # type: ignore[attr-defined]
    paths = tuple(Path(path) for path, _ in samples)
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        entry = (str(path.relative_to(root)), status.st_size, status.st_mtime_ns)
        digest.update(repr(entry).encode(errors="surrogateescape"))
    above = {root / path.relative_to(root).parts[0] for path in paths}
    above |= {each for part in tuple(above) for each in part.iterdir() if each.is_dir()}
    folders = sorted(above | {path.parent for path in paths})
    return Folder(
        root, paths, tuple(label for _, label in samples),
        tuple(images.train.classes), len(images.train), digest.hexdigest(),  # type: ignore[attr-defined]
        {str(each.relative_to(root)): each.stat().st_mtime_ns for each in folders},
    )  # fmt: skip


def has_changed(about: About) -> bool:
    """Return True if the source folder exists on this host, and its images have changed.

    Files are compared only if the modification time of a folder has changed. An image that was
    overwritten in place is therefore not detected.
    """
    root = Path(about.source)
    try:
        if not (root / "train").is_dir():
            return False  # this host does not see the folder
        if all((root / each).stat().st_mtime_ns == at for each, at in about.folders.items()):
            return False
        return list_folder(root).files != about.files
    except PermissionError:
        return False
    except (OSError, MotleyError):
        return True  # files or folders are gone


def shrunk(size: tuple[int, int], longest: int | None) -> tuple[int, int]:
    """Return width and height, reduced so that the longer side is at most ``longest``.

    The ratio of width and height stays the same, up to rounding. Each is at least 1.
    """
    most = max(size)
    if longest is None or most <= longest:
        return size
    width, height = (max(1, (2 * side * longest + most) // (2 * most)) for side in size)
    return width, height


def count_bytes(folder: Folder, keep: Keep) -> int:
    """Return the number of bytes that all images of a folder take when packed.

    For pixels, the number is exact, except for unreadable images. For JPEGs, the number is an
    estimate from some of the images.
    """
    if keep.kind == PIXELS:
        return sum(_pixel_bytes(path, keep.longest) for path in folder.paths)
    tried = folder.paths[:: max(1, len(folder.paths) // _TRIED)]
    return (
        sum(len(_read_reduced(path, keep).content) for path in tried)
        * len(folder.paths)
        // len(tried)
    )


def _pixel_bytes(path: Path, longest: int | None) -> int:
    try:
        with Image.open(path) as image:
            width, height = shrunk(image.size, longest)
    except Exception:  # see motley.data.source.read; an unreadable image takes no bytes
        return 0
    return 3 * width * height


def _read_reduced(path: Path, keep: Keep) -> _Image:
    """Return one image of a folder in the form in which the packed file stores it."""
    # This imports torch, which -h of stage_cn.sh does not need.
    from motley.data.images import load_image

    try:
        image = load_image(str(path))
    except MemoryError:
        raise
    except Exception as error:  # errors have any type; see motley.data.source.read
        return _Image(b"", why=str(error) or type(error).__name__)
    size = shrunk(image.size, keep.longest)
    small = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    if keep.kind == PIXELS:
        return _Image(small.tobytes(), small.height, small.width)
    if small is image:
        return _Image(path.read_bytes(), small.height, small.width)
    written = BytesIO()
    small.save(written, "JPEG", quality=QUALITY, subsampling=0)
    return _Image(written.getvalue(), small.height, small.width)


def pack(
    folder: Folder, keep: Keep, path: Path, processes: int, tell: Callable[[int], None]
) -> tuple[str, ...]:
    """Pack images into a new file. The file has a temporary name until it is complete.

    Args:
        folder: the images.
        keep: form in which images are stored.
        path: path of the file.
        processes: number of processes that read images.
        tell: function that is called with the number of bytes written so far.

    Returns:
        The names of images that could not be read, each with the reason.

    Raises:
        MotleyError: the disk is full, or another process packs into the same file.
    """
    part = path.with_name(f".{path.name}.making")
    try:
        part.touch()
        with part.open("r+b") as file:
            _take(file, part)
            try:
                unreadable = _write(file, folder, keep, processes, tell)
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise MotleyError(
            f"{path} cannot be written: {error.strerror}; free some space, or choose another "
            "folder with --to"
        ) from None
    return tuple(unreadable.values())


def _take(file: IO[bytes], part: Path) -> None:
    """Lock a file, and truncate the file if it has content that a killed process left behind.

    Raises:
        MotleyError: another process has locked the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MotleyError(f"another process is writing {part}; wait until it ends") from None
    file.truncate(0)


def _write(
    file: IO[bytes], folder: Folder, keep: Keep, processes: int, tell: Callable[[int], None]
) -> dict[int, str]:
    """Write all images and their rows. Return the reason for each missing image, by number."""
    rows = np.zeros((len(folder.paths), 5), np.int64)
    unreadable: dict[int, str] = {}
    digest, at = hashlib.sha256(), BEGIN
    file.write(bytes(BEGIN))
    for number, image in enumerate(_read_all_reduced(folder.paths, keep, processes)):
        size = len(image.content)
        rows[number] = at, size, image.height, image.width, folder.labels[number]
        file.write(image.content)
        digest.update(image.content)
        at += size
        if not size:
            unreadable[number] = f"{folder.paths[number]} ({image.why})"
        tell(at)
    about = About(
        keep.kind, keep.longest, folder.classes, folder.train, unreadable,
        str(folder.root), folder.files, folder.folders, digest.hexdigest(),
    )  # fmt: skip
    finish(file, about, rows)
    file.flush()
    os.fsync(file.fileno())
    return unreadable


def _read_all_reduced(paths: Sequence[Path], keep: Keep, processes: int) -> Iterator[_Image]:
    one, remaining = partial(_read_reduced, keep=keep), iter(paths)
    with multiprocessing.get_context("fork").Pool(processes, _start_worker) as pool:
        while some := list(islice(remaining, processes * _AT_ONCE)):
            yield from pool.imap(one, some)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interrupted parent ends its processes
    die_with_parent()

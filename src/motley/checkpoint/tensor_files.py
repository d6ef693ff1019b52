"""Files of tensors in the format of safetensors.

A file holds whole tensors, or one rank's part of a checkpoint whose tensors are not gathered.
Files are hashed while they are written.

    part_00000.safetensors      of rank 0: names as in a checkpoint of whole tensors, model.<name>
                                and optimizer.<name>.<slot>. Each tensor is cut along its first
                                dimension; the next part has the next rows. A tensor that is not
                                cut is in this part alone.
    part_00000.json             size of the part, SHA-256 of its header and of each of its tensors.
                                manifest.json has the SHA-256 of this file.

Any rank can therefore read any rows, and readers use only bytes whose hash they have compared.
Files are written in pieces of 256 KiB. While CPU ranks train, the kernel takes eight times as long
to copy 4 MiB at once to its cache (Linux 6.18, ext4). Hashing a file after it is written would
require reading the file again.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from motley.errors import MotleyError

_PIECE = 1 << 18  # bytes
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def at_once(pieces: Iterator[None]) -> None:
    """Do all work of an iterator without a pause.

    Args:
        pieces: iterator that does a small piece of work each time an item is requested.
    """
    deque(pieces, maxlen=0)


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    each: dict[str, str] | None = None,
    run: Callable[[Iterator[None]], None] = at_once,
) -> dict[str, Any]:
    """Write tensors to a new file in the format of safetensors.

    Args:
        file: path of the file.
        tensors: tensors by name, on the CPU. Tensors that share memory are each written.
        each: dictionary to which the SHA-256 of each tensor is added, by name; None: hash the file
            as a whole.
        run: function that consumes an iterator. The iterator writes one piece of the file each time
            an item is requested.

    Returns:
        ``bytes`` and ``sha256`` of the content. If ``each`` is given, the hash covers only the
        header and its length.

    Raises:
        OSError: the file cannot be written, for instance because the disk is full.
        TypeError: the format does not support the dtype of a tensor.
    """
    digests, size = defaultdict[str | None, Any](hashlib.sha256), 0

    def pieces(out: BinaryIO) -> Iterator[None]:
        nonlocal size
        for name, piece in _content(tensors):
            out.write(piece)
            digests[None if each is None else name].update(piece)
            size += len(piece)
            yield

    with file.open("xb") as out:
        run(pieces(out))
    if each is not None:
        each.update({name: digests[name].hexdigest() for name in tensors})
    return {"bytes": size, "sha256": digests[None].hexdigest()}


def _content(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str | None, bytes | memoryview]]:
    """Yield None with the bytes of the header, and then the name and bytes of each tensor.

    The header's bytes begin with its length. Tensors with the widest dtypes come first, which
    aligns each tensor to the size of its elements.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} has the type {tensor.dtype}, which a checkpoint cannot hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape],
                        "data_offsets": [begin, end]}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield None, len(text).to_bytes(8, "little")
    yield None, text
    for name, tensor in ordered:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        content = flat.numpy().data
        for start in range(0, len(content), _PIECE):
            yield name, content[start : start + _PIECE]


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_INDEX = re.compile(r"part_[0-9]{5}\.json")
_FAILED = "failed_"  # a file of this name and a rank has the error of that rank
_LOOK_S = 0.05  # seconds between checks for the parts of other ranks
_SILENT_S = 300.0  # limit of the time without a written byte
_MOST_HEADER = 1 << 28  # bytes


def part_names(rank: int) -> tuple[str, str]:
    """Return the names of a rank's two files: the file of tensors, and the index of hashes."""
    return f"part_{rank:05d}.safetensors", f"part_{rank:05d}.json"


def is_index(name: str) -> bool:
    """Return True if a file name in a manifest is the name of a part's index."""
    return _INDEX.fullmatch(name) is not None


def write_part(
    folder: Path,
    rank: int,
    tensors: Mapping[str, Tensor],
    run: Callable[[Iterator[None]], None] = at_once,
) -> None:
    """Write a rank's file of tensors, and then the index of hashes, atomically.

    Args:
        folder: folder of the checkpoint.
        rank: number of the rank.
        tensors: the rank's rows by name, on the CPU.
        run: as in :func:`write_tensors`.
    """
    file, final = (folder / name for name in part_names(rank))
    hashes: dict[str, str] = {}
    written = write_tensors(file, tensors, hashes, run)
    sync(file)
    new = final.with_suffix(f".{os.getpid()}")
    index = {"bytes": written["bytes"], "header": written["sha256"], "tensors": hashes}
    new.write_text(json.dumps(index) + "\n")
    sync(new)
    new.replace(final)


@contextlib.contextmanager
def telling(folder: Path, rank: int) -> Iterator[None]:
    """Write an error of a ``with`` block to a file that rank 0 reads, and re-raise the error."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            (folder / f"{_FAILED}{rank}").write_text(str(error))
        raise


def wait_for_parts(folder: Path, ranks: int) -> None:
    """Wait until all ranks have written their parts.

    Raises:
        MotleyError: a rank could not write its part, or no part grew for five minutes.
    """
    sizes, since = 0, time.monotonic()
    while True:
        there = {path.name: path for path in folder.iterdir()}
        if failed := sorted(name for name in there if name.startswith(_FAILED)):
            raise MotleyError(there[failed[0]].read_text())
        if all(part_names(rank)[1] in there for rank in range(ranks)):
            return
        result = sum(path.stat().st_size for path in there.values() if path.exists())
        if result != sizes:
            sizes, since = result, time.monotonic()
        if time.monotonic() - since > _SILENT_S or not threading.main_thread().is_alive():
            late = [rank for rank in range(ranks) if part_names(rank)[1] not in there]
            raise MotleyError(
                f"the checkpoint in {folder} is incomplete: ranks {', '.join(map(str, late))} "
                "have not written their parts. Check that their hosts reach this disk, and "
                "continue with --resume"
            )
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one tensor in a part file of a checkpoint.

    Attributes:
        file: path of the file.
        dtype: dtype of the rows.
        shape: shape of the rows.
        begin: offset of the first byte in the file.
        sha256: hash of the bytes.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    sha256: str

    def read(self) -> Tensor:
        """Return all rows of the piece.

        Raises:
            ValueError: the hash of the rows differs from the saved hash.
        """
        size = math.prod(self.shape) * self.dtype.itemsize
        content = bytearray(size)
        with self.file.open("rb") as source:
            source.seek(self.begin)
            result = source.readinto(content)
        if result != size or hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError("the content of a tensor has changed since it was written")
        if not size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype).reshape(self.shape)


class Parts:
    """All tensors of a checkpoint that is saved in parts.

    Args:
        folder: folder of the checkpoint.
        indexes: content of the parts' index files, in order.
        reading: function that returns a context manager, given a file. The context manager adds
            the file's name to errors.
    """

    def __init__(
        self, folder: Path, indexes: list[dict[str, Any]], reading: Callable[[Path], Any]
    ) -> None:
        self._reading = reading
        self._pieces: dict[str, list[Piece]] = {}
        for rank, index in enumerate(indexes):
            file = folder / part_names(rank)[0]
            with reading(file):
                if file.stat().st_size != index["bytes"]:
                    raise ValueError(f"it has {file.stat().st_size} bytes, not {index['bytes']}")
                for name, piece in _pieces(file, index):
                    self._pieces.setdefault(name, []).append(piece)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors, by name."""
        return {
            name: pieces[0].shape
            if len(pieces) == 1
            else (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
            for name, pieces in self._pieces.items()
        }

    def digest(self, part: str) -> str:
        """Return a SHA-256 over the hashes of the tensors whose names have a prefix.

        Args:
            part: the prefix, such as ``model``.
        """
        result = hashlib.sha256()
        for name, pieces in sorted(self._pieces.items()):
            if name.partition(".")[0] == part:
                result.update(f"{name} {' '.join(piece.sha256 for piece in pieces)}\n".encode())
        return result.hexdigest()

    def check(self) -> int:
        """Compare the hashes of all pieces, and return the total size of all tensors in bytes."""
        return sum(self._read(piece).nbytes for some in self._pieces.values() for piece in some)

    def load(self, name: str) -> Tensor:
        """Return a whole tensor, concatenated from its pieces."""
        pieces = self._pieces[name]
        return self._read(pieces[0]) if len(pieces) == 1 else torch.cat([*map(self._read, pieces)])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop - 1`` of a tensor, in new memory."""
        result, first = [], 0
        for piece in self._pieces[name]:
            end = first + piece.shape[0]
            if first < stop and start < end:
                result.append(self._read(piece)[max(0, start - first) : stop - first])
            first = end
        if result:
            return torch.cat(result)
        piece = self._pieces[name][0]
        return torch.empty((0, *piece.shape[1:]), dtype=piece.dtype)

    def _read(self, piece: Piece) -> Tensor:
        with self._reading(piece.file):
            return piece.read()
        raise AssertionError("reading raises what it meets")


def _pieces(file: Path, index: Mapping[str, Any]) -> Iterator[tuple[str, Piece]]:
    """Yield the name of each tensor in a part file, and the location of its rows in the file.

    Args:
        file: the file of tensors.
        index: content of the part's index file.

    Raises:
        ValueError: the hash of the file's header differs from the index.
    """
    with file.open("rb") as source:
        first = source.read(8)
        length = int.from_bytes(first, "little")
        content = source.read(length) if length <= _MOST_HEADER else b""
    if hashlib.sha256(first + content).hexdigest() != index["header"]:
        raise ValueError("its header has changed since it was written")
    hashes = index["tensors"]
    for name, about in json.loads(content).items():
        begin = 8 + length + int(about["data_offsets"][0])
        shape = tuple(int(each) for each in about["shape"])
        yield name, Piece(file, DTYPES[about["dtype"]], shape, begin, hashes[name])

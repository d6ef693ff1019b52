"""Writes tensors in the format of safetensors, and hashes them on their way to the disk.

In pieces of 256 KiB: the kernel takes eight times as long to copy 4 MiB at once to its cache (Linux
6.18, ext4), and a file that is hashed later is read once more. CPU ranks train meanwhile.
"""

import hashlib
import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

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
    """Do them all."""
    deque(pieces, maxlen=0)


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    each: dict[str, str] | None = None,
    run: Callable[[Iterator[None]], None] = at_once,
) -> dict[str, Any]:
    """Write a new file that safetensors reads.

    Args:
        tensors: on the CPU; such as share memory are each written.
        each: gets the SHA-256 of each tensor, by name.
        run: does it, piece by piece.

    Returns:
        ``bytes`` and ``sha256`` of what was to be written; where ``each`` is given, the hash is of
        all that is before the first tensor.

    Raises:
        OSError: the disk is full, say. TypeError: of a type that the format does not know.
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
    """The length of the header, the header, and the tensors by name, the widest numbers first, so
    that each lies where a number of its kind may."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is of a type that no checkpoint holds, {tensor.dtype}")
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
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A file of one JSON object, which is replaced in one piece, also where a disk or a process's
descriptors are used up."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.records.lines import JsonDict, finite

_LEAST_ROOM = 65_536  # bytes; the words of a fault are 10,000 characters at most


class Reserve:
    """The next version of a file, as zeros: room on the disk, and an open descriptor.

    Args:
        path: of the file. content: of its version of now.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path = path.with_name(f".{path.name}.reserve")
        self._file = self._path.open("wb", buffering=0)
        self._file.write(bytes(_LEAST_ROOM + 2 * len(_text(content))))
        os.fsync(self._file.fileno())

    def become(self, path: Path, content: bytes) -> None:
        """Take the file's place; once."""
        os.pwrite(self._file.fileno(), content, 0)
        self._file.truncate(len(content))
        self._path.replace(path)
        self._file.close()

    def give_back(self) -> None:
        """Remove it."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def write_json(path: Path, content: Mapping[str, Any], reserve: Reserve | None = None) -> None:
    """Replace a file in one piece.

    Args:
        reserve: of this file, taken where there is no other room.
    """
    text = _text(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        if reserve is None:
            raise
        reserve.become(path, text.encode())


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(finite(content), indent=1, default=str) + "\n"


def read_json(path: Path) -> JsonDict:
    """Read :func:`write_json`'s file; FileNotFoundError, or MotleyError if it is damaged."""
    try:
        content = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MotleyError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise MotleyError(f"{path} is damaged: it is a {type(content).__name__}, not an object")
    return content

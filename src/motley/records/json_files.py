"""Readers and writers of JSON files, with one record per line or with one object per file.

A crash may cut the last line of a file short. The next writer of the file starts a new line, and
readers skip damaged lines. A crash, a full disk or a power cut therefore costs only the line that
was being written.

Files with one object are replaced atomically. They stay complete even if no disk space or file
descriptor is left.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from motley.errors import MotleyError

JsonDict = dict[str, Any]
_NO_ROOM = "free some space, or choose another folder with --logs DIR"
_NO_FILES = "raise the limit with ulimit -n, or find what keeps so many files open"


def open_to_append(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file for appending, and start a new line if the last line is incomplete.

    The file is line-buffered: each line reaches the file at once.

    Args:
        path: path of the file.
        newline: as for :func:`open`.
    """
    file = path.open("a", newline=newline, buffering=1, encoding="utf-8")
    with path.open("rb") as before:
        if file.tell():
            before.seek(-1, 2)
            if before.read() != b"\n":
                file.write("\n")
    return file


def make_gone_error(path: Path) -> MotleyError:
    """Return the error for a missing file to which a running program writes."""
    return MotleyError(
        f"{path} was removed, moved or replaced during the run. If the run's folder was moved, "
        "move it back and continue with --resume auto. Otherwise start a new run"
    )


def unwritable(path: Path, error: OSError) -> MotleyError:
    """Return the error for a file that cannot be written to."""
    if isinstance(error, FileNotFoundError):
        return make_gone_error(path)
    room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = fix_for(error, _NO_ROOM if room else "check the disk of the run's folder")
    return MotleyError(
        f"cannot write {path}: {error.strerror}; {fix}, then continue with --resume auto"
    )


def fix_for(error: Exception, others: str) -> str:
    """Return advice to the user for a failed write. ``others`` is the advice for most errors.

    If too many files are open, the advice is about this limit instead.
    """
    return _NO_FILES if "too many open files" in str(error).lower() else others


def to_json(value: Any) -> str:
    """Return one line of strict JSON. NaN and infinities become null."""
    return json.dumps(finite(value), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities, at any depth, for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class JsonLines:
    """A writer that appends JSON objects to a file, one per line.

    Every line reaches the file when it is written.

    Raises:
        MotleyError: the disk is full, or the file was removed, moved or replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_to_append(path)
        except OSError as error:
            raise unwritable(path, error) from None

    def write(self, record: Any) -> None:
        """Append a mapping or a dataclass instance (of flat fields).

        Raises:
            MotleyError: the disk is full, or the file was removed, moved or replaced.
        """
        if not isinstance(record, Mapping):
            record = {field.name: getattr(record, field.name) for field in fields(record)}
        try:
            self._file.write(to_json(record) + "\n")
            there = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except OSError as error:
            raise unwritable(self._path, error) from None
        if not there:
            raise make_gone_error(self._path)

    def close(self) -> None:
        """Close the file. Lines that could not be written are lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_json_lines(path: Path, torn: Callable[[int], None] | None = None) -> Iterator[JsonDict]:
    """Yield the objects in a file. Skip and report lines that are not JSON.

    Args:
        path: path of the file.
        torn: function that is called with the number (from 1) of each line that is not JSON. None:
            print a message.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                if torn is None:
                    print(f"motley: {path}, line {number} is cut short, and is left out")
                else:
                    torn(number)
                continue
            if isinstance(record, dict):
                yield record


def read_last_lines(path: Path, most: int = 65_536) -> list[JsonDict]:
    """Return the objects in the last ``most`` bytes of a file; empty if the file is missing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        cut = file.seek(0, 2) > most
        file.seek(-most if cut else 0, 2 if cut else 0)
        result = list[JsonDict]()
        for line in file.read().split(b"\n")[cut:]:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                result += [record] if isinstance(record, dict) else []
        return result
    return []


def keep_lines(path: Path, steps: int) -> None:
    """Remove records from a file: all from step ``steps`` on, and all without a step."""
    lines = [
        to_json(record)
        for record in read_json_lines(path)
        if isinstance(record.get("step"), int) and record["step"] < steps
    ]
    if path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines))
        temporary.replace(path)


_LEAST_ROOM = 65_536  # bytes; the text of a fault has 10,000 characters at most


class Reserve:
    """Disk space and an open file descriptor, reserved for the next version of a file.

    The file can then be replaced even if the disk is full or no descriptor is left.

    Args:
        path: path of the file.
        content: content of the present version, whose size is the number of reserved bytes.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path = path.with_name(f".{path.name}.reserve")
        self._file = self._path.open("wb", buffering=0)
        self._file.write(bytes(_LEAST_ROOM + 2 * len(_text(content))))
        os.fsync(self._file.fileno())

    def become(self, path: Path, content: bytes) -> None:
        """Write ``content`` into the reserved space, and make it the file at ``path``.

        This method may be called only once.
        """
        os.pwrite(self._file.fileno(), content, 0)
        self._file.truncate(len(content))
        self._path.replace(path)
        self._file.close()

    def give_back(self) -> None:
        """Remove the reserved space."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def write_json(path: Path, content: Mapping[str, Any], reserve: Reserve | None = None) -> None:
    """Replace a file atomically.

    Args:
        path: path of the file.
        content: content of the file.
        reserve: reserved space for this file, used if the disk has no other free space.
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
    """Return the object in a file of :func:`write_json`.

    Raises:
        FileNotFoundError: the file does not exist.
        MotleyError: the file is damaged or unreadable.
    """
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

"""Records of a line each, in files that a crash may cut short anywhere.

Whoever goes on writing begins a line of its own, and whoever reads leaves out what is torn: so
a crash, a full disk or a power cut costs the line that it hit, and none of those after it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

JsonDict = dict[str, Any]


def open_to_append(path: Path, newline: str | None = None) -> TextIO:
    """Open a file of lines, which reach it when written, and begin a new one if the last is torn.

    Args:
        newline: as for :func:`open`.
    """
    file = path.open("a", newline=newline, buffering=1, encoding="utf-8")
    with path.open("rb") as before:
        if file.tell():
            before.seek(-1, 2)
            if before.read() != b"\n":
                file.write("\n")
    return file


def to_json(value: Any) -> str:
    """One line of strict JSON; NaN and infinities become null (strict JSON has none)."""
    return json.dumps(finite(value), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """The same, for strict JSON: None for NaN and infinities, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class JsonLines:
    """Appends JSON objects to a file, a line each; every line reaches the file when written."""

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def write(self, record: Any) -> None:
        """Append a mapping or a dataclass instance (of flat fields)."""
        if not isinstance(record, Mapping):
            record = {field.name: getattr(record, field.name) for field in fields(record)}
        self._file.write(to_json(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_json_lines(path: Path) -> Iterator[JsonDict]:
    """Read the objects of a file; lines that are none are left out, and named."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                print(f"motley: {path}, line {number} is cut short; left out")
                continue
            if isinstance(record, dict):
                yield record

"""How tools write a GPU log: separators, names of columns, numbers, times and encodings.

Besides our own files: the lab's old ones, those that a spreadsheet has saved (``;`` between
fields, decimal commas, a byte-order mark), and the CSV of ``nvidia-smi --query-gpu``.
"""

import codecs
import csv
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from motley.errors import MotleyError

TIME = "Timestamp"  # the column that every log has
_SEPARATORS = (",", ";", "\t")
_MARK = "\ufeff"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# nvidia-smi's names of columns, without their units.
_NVIDIA_SMI = {
    "timestamp": TIME, "index": "GPU_ID", "name": "GPU_Name", "gpu_name": "GPU_Name",
    "uuid": "GPU_UUID", "gpu_uuid": "GPU_UUID", "utilization.gpu": "GPU_Load",
    "memory.used": "GPU_Used_Mem_MB", "memory.free": "GPU_Free_Mem_MB",
    "memory.total": "GPU_Total_Mem_MB", "temperature.gpu": "GPU_Temp_C", "power.draw": "Power_W",
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:e[+-]?\d+)?)\s*(%|MiB|MB|W|C)?", re.I)
_CLOCK_SET = datetime(2000, 1, 1)


def encoding_of(path: Path) -> str:
    """Return the encoding of a log, by its byte-order mark."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in _UTF_16 else "utf-8-sig"


class Header:
    """The first line of a log.

    Args:
        line: that line. path: of the log, for the error.

    Attributes:
        names: of the columns. columns: the same, as our own logs have them.

    Raises:
        MotleyError: it is not that of a GPU log.
    """

    def __init__(self, line: str, path: Path) -> None:
        for self._separator in _SEPARATORS:
            self.names = self.fields(line.lstrip(_MARK))
            self.columns = [_our_name(name) for name in self.names]
            if TIME in self.columns:
                break
        else:
            raise MotleyError(_why_no_log(line, path))
        self._percent = [ours for name, ours in zip(self.names, self.columns, strict=True)
                         if name.endswith("[%]")]  # fmt: skip

    def fields(self, line: str) -> list[str]:
        """Return the fields of one line alone: a quote that a crash left open must not reach into
        the next row."""
        try:
            return next(csv.reader([line], delimiter=self._separator, skipinitialspace=True), [])
        except csv.Error:
            return []

    def row(self, fields: Sequence[str]) -> dict[str, str]:
        """Return the fields of a row by column; a column in percent has them in percent."""
        row = dict(zip(self.columns, fields, strict=True))
        for name in self._percent:
            if row[name].strip()[-1:].isdigit():
                row[name] += "%"
        return row


def _our_name(name: str) -> str:
    plain = name.partition("[")[0].strip()
    return _NVIDIA_SMI.get(plain, plain)


def _why_no_log(line: str, path: Path) -> str:
    if "\0" in line:
        return f"{path} is not in UTF-8 (UTF-16, it seems): save it as UTF-8"
    shown = " ".join(line.split())[:60]
    return (
        f"{path} is not a GPU log: it has no column {TIME}, its first line is '{shown}'; give it "
        f"one line of names, with {TIME} or nvidia-smi's timestamp among them, separated by a "
        "comma, a semicolon or a tab"
    )


def read_number(text: str | None) -> float | None:
    """Return a number: ``88.0%``, ``88 %`` and ``88,0%`` are 0.88, ``4000 MiB`` is 4000. None where
    a tool says that it does not know (empty, ``[N/A]``, ``nan``)."""
    try:
        value = float(text or "")
    except ValueError:
        found = _NUMBER.fullmatch((text or "").strip())
        if not found:
            return None
        value = float(found[1].replace(",", "."))
        return value / 100 if found[2] == "%" else value
    return value if math.isfinite(value) else None


def read_time(text: str | None) -> float | None:
    """Return seconds since 1970 of a number, or of a date and time: ``2024-11-21 03:12:44.120``,
    which is local, ``2024-11-21T03:12:44+02:00``, ``2024/11/21 03:12:44``. None of anything else.
    """
    value = read_number(text)
    if value is not None:
        return value
    try:
        return datetime.fromisoformat((text or "").strip().replace("/", "-")).timestamp()
    except (ValueError, OverflowError):
        return None


def is_clock_set(seconds: float) -> bool:
    """Return False for a moment that only a clock shows that was never set, as 1970."""
    return seconds > _CLOCK_SET.timestamp()

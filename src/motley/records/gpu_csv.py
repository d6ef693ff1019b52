"""The GPU log, ``gpu.<host>.csv``: its columns, its writer, and its reader.

The reader accepts Motley's logs and those of other tools. Other logs are the laboratory's old
``metrics.csv``, with only the first eleven columns, and the CSV of ``nvidia-smi --query-gpu``. A
spreadsheet may have saved the log with ``;`` between fields, decimal commas and a byte-order mark.
"""

import codecs
import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.records.json_files import open_to_append

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


def detect_encoding(path: Path) -> str:
    """Return the encoding of a log, from its byte-order mark."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in _UTF_16 else "utf-8-sig"


class Header:
    """The first line of a log, which names the columns.

    Args:
        line: the first line.
        path: path of the log, for the error.

    Attributes:
        names: names of the columns.
        columns: for each column, its name in Motley's logs.

    Raises:
        MotleyError: the line is not the first line of a GPU log.
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
        """Return the fields of one line.

        Lines are parsed one by one. A quote that a crash left open therefore ends with its line.
        """
        try:
            return next(csv.reader([line], delimiter=self._separator, skipinitialspace=True), [])
        except csv.Error:
            return []

    def row(self, fields: Sequence[str]) -> dict[str, str]:
        """Return the fields of a row by the names of the columns in Motley's logs.

        A ``%`` is added to fields of columns in percent.
        """
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
        return f"{path} is not UTF-8 text, but perhaps UTF-16; save it as UTF-8"
    shown = " ".join(line.split())[:60]
    return (
        f"{path} is not a GPU log: it has no column {TIME}, and its first line is '{shown}'. Its "
        f"first line has to name the columns, one of them {TIME} or nvidia-smi's timestamp, "
        "separated by a comma, a semicolon or a tab"
    )


def read_number(text: str | None) -> float | None:
    """Return the number in a field, or None.

    ``88.0%``, ``88 %`` and ``88,0%`` are 0.88, and ``4000 MiB`` is 4000. Tools write an empty text,
    ``[N/A]`` or ``nan`` for an unknown value, which becomes None.
    """
    try:
        value = float(text or "")
    except ValueError:
        result = _NUMBER.fullmatch((text or "").strip())
        if not result:
            return None
        value = float(result[1].replace(",", "."))
        return value / 100 if result[2] == "%" else value
    return value if math.isfinite(value) else None


def read_time(text: str | None) -> float | None:
    """Return the time in a field, in seconds since 1970; None if the field has no time.

    A time is a number of seconds, or a date such as ``2024-11-21 03:12:44.120`` (local time),
    ``2024-11-21T03:12:44+02:00`` or ``2024/11/21 03:12:44``.
    """
    value = read_number(text)
    if value is not None:
        return value
    try:
        return datetime.fromisoformat((text or "").strip().replace("/", "-")).timestamp()
    except (ValueError, OverflowError):
        return None


def is_clock_set(seconds: float) -> bool:
    """Return False for a time, such as one in 1970, of a machine whose clock was never set."""
    return seconds > _CLOCK_SET.timestamp()


csv.field_size_limit(2**30)  # accept fields above csv's limit of 128 KiB

# The lab's eleven columns come first, in the lab's order and spelling. The lab's old plots can
# therefore read Motley's files, and Motley's plots can read the lab's files.
LAB_GPU_COLUMNS = (
    "Timestamp", "Rank", "Epoch", "Computation_Time", "GPU_ID", "GPU_Name", "GPU_Load",
    "GPU_Free_Mem_MB", "GPU_Used_Mem_MB", "GPU_Total_Mem_MB", "GPU_Temp_C",
)  # fmt: skip
OUR_GPU_COLUMNS = (
    "Host", "GPU_UUID", "Power_W", "Others_Mem_MB", "Others", "Step", "Monotonic_s",
    "CPU_Name", "CPU_Load", "RAM_Used_MB", "RAM_Total_MB", "SHM_Used_MB", "SHM_Total_MB",
)  # fmt: skip

_CUT_SHORT = "cut short"
_FIXES = {
    _CUT_SHORT: "",
    "more": "; write numbers with a point, not with a decimal comma",
    "time": "; write it as 2024-03-01 10:00:00",
    "clock": "",
}


class GpuLog:
    """A writer that appends rows to a GPU log.

    The header has the eleven columns of the laboratory's old logs, then Motley's own columns. An
    example of a row:

    ``2026-11-21 03:12:44.120,0,2,0.143,0,NVIDIA H200,0.98,143000,771,143771,41.0,a,
    GPU-8c..,312.5,0,,57,8123.44,AMD EPYC,0.12,9211,131072,12,65536``

    If another version of Motley has begun the log, new rows have the columns of that version.
    """

    def __init__(self, path: Path) -> None:
        begun = _columns(path)
        if not begun:
            path.unlink(missing_ok=True)
        self._file = open_to_append(path, newline="")
        self._writer = csv.DictWriter(
            self._file, begun or LAB_GPU_COLUMNS + OUR_GPU_COLUMNS, restval="",
            extrasaction="ignore" if begun else "raise",
        )  # fmt: skip
        if not begun:
            self._writer.writeheader()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. A field without a value, or with the value None, is empty."""
        self._writer.writerow({key: "" if value is None else value for key, value in row.items()})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _columns(path: Path) -> list[str]:
    """Return the columns of an existing log; empty if the first line is missing or incomplete."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return next(csv.reader([first]), []) if first.endswith("\n") else []


def find_gpu_logs(paths: list[Path]) -> list[Path]:
    """Return every GPU log at or under ``paths``, sorted.

    GPU logs are the files gpu.<host>.csv of Motley, and the laboratory's old metrics.csv.
    """
    result: set[Path] = set()
    for path in paths:
        if path.is_file():
            result.add(path)
        result |= {file for file in path.rglob("*.csv") if _is_gpu_log(file)}
    return sorted(result)


def _is_gpu_log(path: Path) -> bool:
    return path.name == "metrics.csv" or _is_ours(path)


def _is_ours(path: Path) -> bool:
    return path.name.startswith("gpu.")


@dataclass(frozen=True)
class GpuSample:
    """One row of a GPU log. None stands for a value that the log does not have.

    Attributes:
        time: seconds since 1970.
        host: name of the host.
        gpu: number of the GPU on the host; None for a CPU.
        name: name of the GPU or the CPU.
        load: load of the GPU, 0 to 1. On a host without a GPU: load of the CPU.
        memory_used_mib: used memory of the GPU, or of the host, in MiB.
        memory_total_mib: total memory of the GPU, or of the host, in MiB.
        temperature_c: degrees Celsius.
        power_w: watts.
        others_memory_mib: GPU memory of other users, in MiB.
        epoch: epoch of the run at that time.
        step: step of the run at that time.
        uuid: UUID of the GPU; None in the laboratory's old logs.
        others: names of other users.
        rank: rank that computes on the device. On a host without a GPU: the host's first rank.
    """

    time: float
    host: str
    gpu: str | None
    name: str
    load: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None
    temperature_c: float | None
    power_w: float | None
    others_memory_mib: float | None
    epoch: int | None
    step: int | None
    uuid: str | None = None
    others: str = ""
    rank: int | None = None


class GpuRows:
    """A reader of a GPU log, line by line; see :mod:`motley.records.gpu_csv`.

    The first line of a log names the columns.

    Args:
        path: path of the log, for errors. If the log has no column for the host, the file name
            ``gpu.HOST.csv`` gives the host.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: Header | None = None
        self._host = path.name.removeprefix("gpu.").removesuffix(".csv") if _is_ours(path) else ""
        self._line = self._rows = 0
        # The number of rows without a sample, and the first reason, by cause.
        self._causes: dict[str, tuple[int, str]] = {}

    @property
    def columns(self) -> list[str]:
        """Names of the columns; empty before the first line."""
        return self._header.columns if self._header else []

    def read(self, line: str) -> GpuSample | None:
        """Return the sample in a line; None if the line has no sample.

        The result is None for the first line and its repetitions, for a row that a crash cut short,
        and for a row that is no sample. :meth:`left_out` reports the last two kinds.

        Raises:
            MotleyError: the first line is not that of a GPU log.
        """
        self._line += 1
        if self._header is None:
            self._header = Header(line, self._path)
            return None
        fields = self._header.fields(line)
        if not line.strip("\0\r\n \t") or fields[:1] == self._header.names[:1]:
            return None
        self._rows += 1
        if len(fields) != len(self.columns):
            more = len(fields) > len(self.columns)
            result = f"{len(fields)} fields where the first line names {len(self.columns)}"
            self._leave_out("more" if more else _CUT_SHORT, result)
            return None
        row = self._header.row(fields)
        when = read_time(row[TIME])
        if when is None:
            self._leave_out("time", f"the time is '{row[TIME][:40]}'")
            return None
        if not is_clock_set(when) and read_number(row[TIME]) is None:
            self._leave_out("clock", f"the clock was not set yet, at '{row[TIME]}'")
            return None
        return _sample(row, when, self._host)

    def _leave_out(self, cause: str, found: str) -> None:
        count, first = self._causes.get(cause, (0, f"{found} in line {self._line}{_FIXES[cause]}"))
        self._causes[cause] = count + 1, first

    def left_out(self, none_read: bool) -> str:
        """Return a sentence with the number of rows that are no samples, and the first reasons.

        The sentence is empty if all rows are samples, apart from rows that were cut short.

        Args:
            none_read: True if no row was a sample. Rows that were cut short are then reported too.
        """
        causes = {cause: each for cause, each in self._causes.items()
                if none_read or cause != _CUT_SHORT}  # fmt: skip
        if not causes:
            return ""
        count = "none" if none_read else str(sum(number for number, _ in causes.values()))
        word = "can be read" if none_read else "are left out"
        why = "; ".join(first for _, first in causes.values())
        return f"{self._path}: {count} of its {self._rows} rows {word}: {why}"


def read_gpu_log(path: Path, warn: Callable[[str], object] = lambda text: None) -> list[GpuSample]:
    """Return all samples in a GPU log; see :class:`GpuRows`.

    Args:
        path: path of the log.
        warn: function that is called with a sentence on the skipped rows and the reason.

    Raises:
        MotleyError: the file is no GPU log, or no row of it can be read.
    """
    rows = GpuRows(path)
    with path.open(encoding=detect_encoding(path), errors="replace") as file:
        samples = [sample for line in file if (sample := rows.read(line)) is not None]
    if not rows.columns:
        raise MotleyError(
            f"{path} is empty: either it is not a GPU log, or its logger has just started"
        )
    if message := rows.left_out(none_read=not samples):
        if not samples:
            raise MotleyError(message)
        warn(message)
    return samples


def read_hosts(path: Path) -> set[str]:
    """Return the hosts in a GPU log.

    A log ``gpu.HOST.csv`` has one host. All rows of any other log are read.
    """
    rows = GpuRows(path)
    with path.open(encoding=detect_encoding(path), errors="replace") as file:
        if _is_ours(path):
            samples = filter(None, map(rows.read, file))
            return {sample.host for sample in islice(samples, 1)}
        header = Header(file.readline(), path)
        names = [name for name in header.columns if name in ("Host", "Rank")]
        places = [header.columns.index(name) for name in names]
        result = {tuple(fields[place] for place in places) for line in file
                 if len(fields := header.fields(line)) == len(header.columns)
                 and fields[0] != header.names[0]}  # fmt: skip
        lines = (dict(zip(names, each, strict=True)) for each in result)
        return {_get_host(row, "") for row in lines}


def _get_host(row: Mapping[str, str], usual: str) -> str:
    return row.get("Host") or usual or f"rank {row.get('Rank') or '?'}"


def _sample(row: Mapping[str, str], when: float, host: str) -> GpuSample:
    gpu = row.get("GPU_ID") or None
    on_cpu = gpu is None
    load = read_number(row.get("CPU_Load" if on_cpu else "GPU_Load"))
    return GpuSample(
        time=when,
        host=_get_host(row, host),
        gpu=gpu,
        name=(row.get("CPU_Name") if on_cpu else row.get("GPU_Name")) or "",
        load=None if load is None or load < 0 else load,  # -1 stands for an unknown load
        memory_used_mib=read_number(row.get("RAM_Used_MB" if on_cpu else "GPU_Used_Mem_MB")),
        memory_total_mib=read_number(row.get("RAM_Total_MB" if on_cpu else "GPU_Total_Mem_MB")),
        temperature_c=read_number(row.get("GPU_Temp_C")),
        power_w=read_number(row.get("Power_W")),
        others_memory_mib=read_number(row.get("Others_Mem_MB")),
        epoch=_integer(row.get("Epoch")),
        step=_integer(row.get("Step")),
        uuid=row.get("GPU_UUID") or None,
        others=row.get("Others") or "",
        rank=_integer(row.get("Rank")),
    )


def device_name(name: str) -> str:
    """Return a device's name without words such as the maker's name: ``RTX 3070``."""
    return re.sub(r"NVIDIA GeForce |\((R|TM)\)| CPU\b| @.*| [0-9]+-Core Processor", "", name)[:40]


def _integer(text: str | None) -> int | None:
    value = read_number(text)
    return None if value is None else int(value)

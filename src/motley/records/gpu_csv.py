"""The GPU log, ``gpu.<host>.csv``: its columns, its writer, and a reader that also takes
the lab's own old files (``metrics.csv``, the first eleven columns alone)."""

import csv
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.records.lines import open_to_append

csv.field_size_limit(2**30)  # a field of more than 128 KiB is one too; lines are read whole anyway

# The lab's own eleven columns first, in its own order and spelling, so that its old
# plots read our files and ours read its.
LAB_GPU_COLUMNS = (
    "Timestamp", "Rank", "Epoch", "Computation_Time", "GPU_ID", "GPU_Name", "GPU_Load",
    "GPU_Free_Mem_MB", "GPU_Used_Mem_MB", "GPU_Total_Mem_MB", "GPU_Temp_C",
)  # fmt: skip
OUR_GPU_COLUMNS = (
    "Host", "GPU_UUID", "Power_W", "Others_Mem_MB", "Others", "Step", "Monotonic_s",
    "CPU_Name", "CPU_Load", "RAM_Used_MB", "RAM_Total_MB", "SHM_Used_MB", "SHM_Total_MB",
)  # fmt: skip


class GpuLog:
    """Appends rows to a GPU log; the header is the lab's eleven columns, then ours:

    ``2026-11-21 03:12:44.120,0,2,0.143,0,NVIDIA H200,0.98,143000,771,143771,41.0,a,
    GPU-8c..,312.5,0,,57,8123.44,AMD EPYC,0.12,9211,131072,12,65536``

    A log that another version began keeps its columns.
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
        """Append a row; a missing or None value is left empty."""
        self._writer.writerow({key: "" if value is None else value for key, value in row.items()})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _columns(path: Path) -> list[str]:
    """Those of a log that is there; none before a first line that is whole: nothing is lost."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return _fields(first) if first.endswith("\n") else []


def find_gpu_logs(paths: list[Path]) -> list[Path]:
    """Every GPU log at or under ``paths``: ours (gpu.<host>.csv) and the lab's (metrics.csv)."""
    found: set[Path] = set()
    for path in paths:
        if path.is_file():
            found.add(path)
        found |= {file for file in path.rglob("*.csv") if _is_gpu_log(file)}
    return sorted(found)


def _is_gpu_log(path: Path) -> bool:
    return path.name == "metrics.csv" or path.name.startswith("gpu.")


@dataclass(frozen=True)
class GpuSample:
    """One row of a GPU log, ours or the lab's; None where the file has no value.

    Attributes:
        time: seconds since the epoch.
        uuid: of the GPU; None in the lab's files.
        load: 0 to 1; of the GPU, or of the CPU on a host without one.
        memory_used_mib, memory_total_mib: of the GPU, or the host's RAM.
        others_memory_mib: GPU memory that other users hold. others: their names.
        rank: that computes there; the first of a host without a GPU.
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
    """Reads a GPU log line by line, ours or the lab's eleven-column one (load written like
    ``88.0%``); the first line names the columns.

    Args:
        path: of the log, for the error.

    Attributes:
        columns: their names; empty before the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.columns: list[str] = []

    def read(self, line: str) -> GpuSample | None:
        """A row's sample; None for the first line, and for a row that a crash cut short or that is
        none.

        Raises:
            MotleyError: the first line is no GPU log's.
        """
        row = _fields(line)
        if not self.columns:
            if LAB_GPU_COLUMNS[0] not in row:
                raise _no_gpu_log(self._path)
            self.columns = row
            return None
        if len(row) != len(self.columns):
            return None  # cut short, or another row was appended to what was
        return _sample(dict(zip(self.columns, row, strict=True)))


def _no_gpu_log(path: Path) -> MotleyError:
    """What is said of a file that is none."""
    return MotleyError(f"{path} is not a GPU log: it has no column {LAB_GPU_COLUMNS[0]}")


def read_gpu_log(path: Path) -> list[GpuSample]:
    """All samples of a GPU log; see :class:`GpuRows`."""
    rows = GpuRows(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        samples = [sample for line in file if (sample := rows.read(line)) is not None]
    if not rows.columns:
        raise _no_gpu_log(path)
    return samples


def _fields(line: str) -> list[str]:
    """Of one line alone: a quote that a crash left open must not reach into the next row."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _sample(row: Mapping[str, str]) -> GpuSample | None:
    when = _timestamp(row.get("Timestamp"))
    if when is None:
        return None
    gpu = row.get("GPU_ID") or None
    host = row.get("Host") or ""
    on_cpu = gpu is None
    rank = row.get("Rank") or "?"
    return GpuSample(
        time=when,
        host=host or f"rank {rank}",
        gpu=gpu,
        name=(row.get("CPU_Name") if on_cpu else row.get("GPU_Name")) or "",
        load=_number(row.get("CPU_Load" if on_cpu else "GPU_Load")),
        memory_used_mib=_number(row.get("RAM_Used_MB" if on_cpu else "GPU_Used_Mem_MB")),
        memory_total_mib=_number(row.get("RAM_Total_MB" if on_cpu else "GPU_Total_Mem_MB")),
        temperature_c=_number(row.get("GPU_Temp_C")),
        power_w=_number(row.get("Power_W")),
        others_memory_mib=_number(row.get("Others_Mem_MB")),
        epoch=_integer(row.get("Epoch")),
        step=_integer(row.get("Step")),
        uuid=row.get("GPU_UUID") or None,
        others=row.get("Others") or "",
        rank=_integer(row.get("Rank")),
    )


def device_name(name: str) -> str:
    """A device's name without what every such name has, for example ``RTX 3070``."""
    return re.sub(r"NVIDIA GeForce |\((R|TM)\)| CPU\b| @.*| [0-9]+-Core Processor", "", name)[:40]


def _number(text: str | None) -> float | None:
    """A number; ``88.0%`` is 0.88; None when empty or not a number."""
    try:
        percent = (text or "").strip().endswith("%")
        value = float((text or "").strip().rstrip("%"))
    except ValueError:
        return None
    if not math.isfinite(value):  # GPUtil writes nan for what a GPU does not tell
        return None
    return value / 100 if percent else value


def _integer(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else int(value)


def _timestamp(text: str | None) -> float | None:
    """Seconds since the epoch, of a number or of a local ``2024-11-21 03:12:44[.120]``."""
    value = _number(text)
    if value is not None:
        return value
    for form in ("%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f"):
        try:
            seconds = time.mktime(
                time.strptime((text or "").partition(".")[0], form.removesuffix(".%f"))
            )
        except ValueError:
            continue
        fraction = (text or "").partition(".")[2]
        return seconds + (float(f"0.{fraction}") if fraction.isdigit() else 0.0)
    return None

"""The lab's old logs: one ``metrics.csv`` a run, in folders named by GPUs and configuration."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import command
import numpy as np

from motley.errors import MotleyError
from motley.records.gpu_csv import GpuSample, read_gpu_log

_GPUS = re.compile(r"(\d+)[_ -]?GPUs?", re.IGNORECASE)


@dataclass(frozen=True)
class OldRun:
    """One run of the old format.

    Attributes:
        gpus: as its folder says. configuration: the folder's own name, as ``p1_b16_e10``.
        epoch_s: an epoch, the median over them.
    """

    gpus: int
    configuration: str
    epoch_s: float


def old_runs(paths: list[Path]) -> list[OldRun]:
    """Every ``metrics.csv`` below a folder named like ``5_GPUs``; one that cannot be read, or has
    no whole epoch, is named and left out."""
    found = []
    for log in sorted(file for path in paths for file in path.rglob("metrics.csv")):
        gpus = next((int(m[1]) for part in log.parts[::-1] if (m := _GPUS.fullmatch(part))), None)
        if gpus is None:
            continue
        try:
            seconds = epoch_seconds(read_gpu_log(log))
        except (MotleyError, OSError, ValueError) as error:
            command.warn(f"{error}; left out")
            continue
        if not seconds:
            command.warn(f"{log} holds no two epochs, so nobody can tell how long one took")
            continue
        found.append(OldRun(gpus, log.parent.name, seconds))
    return found


def epoch_seconds(samples: list[GpuSample]) -> float | None:
    """How long an epoch took, by the median; a row of the old logs is written where one ends."""
    ends: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.epoch is not None:
            ends[sample.epoch].append(sample.time)
    last = [max(times) for _, times in sorted(ends.items())]
    return float(np.median(np.diff(last))) if len(last) > 1 else None

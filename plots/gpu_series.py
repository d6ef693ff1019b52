"""The GPU logs of one folder as lines to draw: one a GPU, or a host without one."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import command
import numpy as np
import style

from motley.errors import MotleyError
from motley.records.costs import without_pauses
from motley.records.gpu_csv import GpuSample, device_name, read_gpu_log

DASHES = ("-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))  # GPUs of a host; "--" is totals
_LARGE_MIB = 10.0  # a log whose reading takes seconds
MANY = 150  # samples; noisy values are smoothed past that


@dataclass(frozen=True)
class Series:
    """One GPU, or the CPU of a host without one: its samples in order of time.

    Attributes:
        seconds: since the first sample of all, without the pauses.
        paused: such seconds at which all logs paused, as those of a resumed run do.
    """

    host: str
    gpu: str
    look: dict[str, Any]
    seconds: style.Array
    samples: tuple[GpuSample, ...]
    paused: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """For example ``ecetesla0: GPU 0 (Tesla P4)``."""
        name = next((device_name(sample.name) for sample in self.samples if sample.name), "")
        device = f"GPU {self.gpu}" if self.gpu else "CPU"
        return f"{self.host}: {device}" + (f" ({name})" if name else "")

    @property
    def window(self) -> int:
        """Samples over which noisy values are smoothed; 1 for a short log."""
        return len(self.samples) // 60 | 1 if len(self.samples) > MANY else 1

    def values(self, field: str, factor: float = 1.0) -> style.Array:
        """A field of all samples times ``factor``; NaN where unknown."""
        numbers = [getattr(sample, field) for sample in self.samples]
        return np.array([np.nan if n is None else n * factor for n in numbers], dtype=float)


def read_folder(logs: list[Path]) -> list[GpuSample]:
    """The samples of all logs of a folder, in order of time; a bad log is named and left out."""
    samples = []
    for log in logs:
        try:
            if (mib := log.stat().st_size / 2**20) > _LARGE_MIB:
                command.say(f"reading {log} ({mib:,.0f} MiB)")
            found = read_gpu_log(log, command.warn)
            if not found:
                command.warn(f"{log} holds no sample; left out")
            samples += found
        except (MotleyError, OSError, ValueError) as error:
            command.warn(f"{error}; left out")
    return sorted(samples, key=lambda sample: sample.time)


def to_series(samples: list[GpuSample], colours: dict[str, str]) -> list[Series]:
    """Return one series a GPU, or a host without one, on one clock. It starts with the first sample
    and stands still while no machine wrote a sample: a resumed run has paused then."""
    groups: dict[tuple[str, str], list[GpuSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.host, sample.gpu or ""].append(sample)
    usual = max(map(usual_interval, groups.values()), default=0.0)
    paused = find_pauses(samples, usual)
    marks = tuple(without_pauses(at, paused) - samples[0].time - usual / 2 for at, _ in paused)
    with_gpu = {host for host, gpu in groups if gpu}
    series = []
    for host, color in colours.items():
        dashes = itertools.cycle(DASHES)
        for gpu in sorted((gpu for name, gpu in groups if name == host), key=style.natural):
            if gpu or host not in with_gpu:  # a GPU that did not answer once is no CPU host
                group = tuple(groups[host, gpu])
                seconds = np.array([
                    without_pauses(sample.time, paused) - samples[0].time for sample in group
                ])  # fmt: skip
                look = {"color": color, "linestyle": next(dashes)}
                series.append(Series(host, gpu, look, seconds, group, marks))
    return series


def find_pauses(samples: Sequence[GpuSample], usual: float) -> list[tuple[float, float]]:
    """Return when samples began again after a pause of all machines, seconds since 1970, and how
    many seconds are left out for it.

    Args:
        samples: all, in order of time. usual: seconds between two of a device.
    """
    least = least_pause(usual)
    return [
        (after.time, after.time - before.time - usual)
        for before, after in pairwise(samples) if after.time - before.time > least
    ]  # fmt: skip


def usual_interval(samples: Sequence[GpuSample]) -> float:
    """Return the median of the seconds between two samples of a device; 0 of a single one."""
    steps = [after.time - before.time for before, after in pairwise(samples)]
    return float(np.median(steps)) if steps else 0.0


def least_pause(usual: float) -> float:
    """Return the seconds without a sample that are a pause, where ``usual`` seconds are usual."""
    return max(10 * usual, 30.0)


def epoch_starts(series: list[Series]) -> list[float]:
    """Seconds at which each epoch was first seen; the lab's old rows (no step) *end* an epoch."""
    starts: dict[int, float] = {}
    for one in series:
        for second, sample in zip(one.seconds, one.samples, strict=True):
            if sample.epoch is not None and sample.step is not None:
                starts[sample.epoch] = min(second, starts.get(sample.epoch, second))
    return sorted(starts.values())

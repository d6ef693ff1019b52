"""Totals of a run from its records: samples per second, growth of memory, and energy. Pure.

The rate is a mean over the steps, since a median hides long ones.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from motley.records.gpu_csv import find_gpu_logs, read_gpu_log
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.records.training import RankGroups


def mean_rate(
    steps: Sequence[JsonDict], of: str = "n_global", starts: Sequence[float] = ()
) -> float | None:
    """What was done a second, from the end of the first of some steps to the end of the last.

    All that lies between them counts: evaluations, checkpoints, stalls, the small last batch of an
    epoch. So it is what a user waits for, where the median is what the hardware does.

    Args:
        steps: of one rank, in order. of: the field that is added up.
        starts: when a job began, seconds since the epoch; the pause that one of them ended, in
            which nothing ran, is left out.

    Returns:
        None of fewer than two steps.
    """
    amount = seconds = 0.0
    for before, step in pairwise(steps):
        if not any(before["time"] < at < step["time"] for at in starts):
            amount += step[of]
            seconds += step["time"] - before["time"]
    return amount / seconds if seconds > 0 else None


def pauses(steps: Sequence[JsonDict], starts: Sequence[float]) -> list[tuple[float, float]]:
    """When a job went on from a checkpoint, seconds since the epoch, and for how many seconds
    nothing had run before; ascending.

    Args:
        steps: of one rank, in order. starts: when a job went on.
    """
    found = []
    for before, step in pairwise(steps):
        if began := [at for at in starts if before["time"] < at < step["time"]]:
            own = step["n_global"] / step["samples_per_s"] if step["samples_per_s"] else 0.0
            found.append((max(began), max(0.0, step["time"] - before["time"] - own)))
    return found


def without_pauses(moment: float, paused: Sequence[tuple[float, float]]) -> float:
    """A moment on a clock that stood still in pauses; see :func:`pauses`."""
    return moment - sum(seconds for at, seconds in paused if at <= moment)


def lead(steps: Mapping[int, Sequence[JsonDict]]) -> Sequence[JsonDict]:
    """Step records of the rank that has the most; none if there are none."""
    return max(steps.values(), key=len, default=())


_WARM = 1 / 3  # of a run's steps come before those that count
_LEAK_MIB, _LEAK_PART = 8.0, 0.01  # what memory may grow by in a run, whichever is more

Steps = Mapping[int, Sequence[JsonDict]]  # records by rank


def warm(lines: Sequence[JsonDict]) -> Sequence[JsonDict]:
    """Without the steps in which a run warms up."""
    return lines[math.ceil(len(lines) * _WARM) :]


def leak(steps: Steps) -> float | None:
    """MiB that a rank's memory grows by in a step, where it does so to the end; the worst rank.

    A line is fitted to each half of what follows the warm-up: a buffer that grows once is no leak.
    """
    worst = 0.0
    for lines in steps.values():
        later = [line["mem_peak_mib"] for line in warm(lines)]
        half = len(later) // 2
        if half < 3 or None in later:
            continue
        slopes = [
            statistics.linear_regression(range(len(part)), part).slope
            for part in (later[:half], later[half:], later)
        ]
        grown = slopes[2] * len(later)
        if min(slopes) > 0 and grown > max(_LEAK_MIB, _LEAK_PART * later[0]):
            worst = max(worst, slopes[2])
    return worst or None


def joules(folder: RunFolder, steps: Steps) -> float | None:
    """Return the energy of the GPUs that trained, in joules for a sample, while the steps that
    count ran; None where one of them did not say. A lost rank counts until its last step."""
    lines = lead(steps)
    groups = RankGroups(folder.read_run()).groups
    ends = [*(group["step"] for group in groups[1:]), math.inf][: len(groups)]
    spans = list[tuple[set[tuple[str, str]], Sequence[JsonDict]]]()
    for group, end in zip(groups, ends, strict=True):
        taken = [line for line in lines if group["step"] <= line["step"] < end]
        workers = group["ranks"]
        if taken and not all(worker.get("uuid") for worker in workers):
            return None
        if taken:
            spans.append(({(each["host"], each["uuid"]) for each in workers}, taken))
    if not spans:
        return None
    watts: dict[tuple[str, str], list[float]] = {gpu: [] for gpus, _ in spans for gpu in gpus}
    windows = [(gpus, taken[0]["time"] - _took(taken[:1]), taken[-1]["time"])
               for gpus, taken in spans]  # fmt: skip
    for log in find_gpu_logs([folder.path]):
        for sample in read_gpu_log(log):
            gpu = sample.host, sample.uuid or ""
            trains = any(
                gpu in gpus and start <= sample.time <= end for gpus, start, end in windows
            )
            if trains and sample.power_w is not None:
                watts[gpu].append(sample.power_w)
    if not all(watts.values()):
        return None
    mean_watts = {gpu: statistics.fmean(told) for gpu, told in watts.items()}
    energy = sum(_took(taken) * sum(mean_watts[gpu] for gpu in gpus) for gpus, taken in spans)
    return float(energy / sum(line["n_global"] for line in lines))


def _took(lines: Sequence[JsonDict]) -> float:
    """Return the seconds of some steps."""
    return float(sum(line["n_global"] / line["samples_per_s"] for line in lines))

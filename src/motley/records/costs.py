"""What a run took of its machines: memory that grows, and energy. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence

from motley.records.gpu_csv import find_gpu_logs, read_gpu_log
from motley.records.lines import JsonDict
from motley.records.rates import lead
from motley.records.run_folder import RunFolder

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
    """Of the GPUs that trained, for a sample, while the steps that count ran; None where one of
    them did not say."""
    lines = lead(steps)
    workers = folder.read_run().get("ranks") or ()
    if not lines or not workers or any(not worker.get("uuid") for worker in workers):
        return None
    first_s = lines[0]["n_global"] / lines[0]["samples_per_s"]
    start, end = lines[0]["time"] - first_s, lines[-1]["time"]
    watts: dict[tuple[str, str], list[float]] = {
        (worker["host"], worker["uuid"]): [] for worker in workers
    }
    for log in find_gpu_logs([folder.path]):
        for sample in read_gpu_log(log):
            own = watts.get((sample.host, sample.uuid or ""))
            if own is not None and start <= sample.time <= end and sample.power_w is not None:
                own.append(sample.power_w)
    if not all(watts.values()):
        return None
    seconds = sum(line["n_global"] / line["samples_per_s"] for line in lines)
    samples = sum(line["n_global"] for line in lines)
    return float(sum(map(statistics.fmean, watts.values())) * seconds / samples)

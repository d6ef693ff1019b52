"""The records of one training run as columns, one per field, and totals of the run.

The totals are samples per second, growth of memory, and energy. The rate is a mean over the steps,
because a median hides long steps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.records.gpu_csv import find_gpu_logs, read_gpu_log
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord, RankGroups


def mean_rate(
    steps: Sequence[JsonDict], of: str = "n_global", starts: Sequence[float] = ()
) -> float | None:
    """Return the mean rate per second, from the end of the first step to the end of the last.

    All time between these two moments counts: evaluations, checkpoints, stalls, and the small last
    batch of an epoch. This is the rate that a user experiences. A median over steps shows the rate
    of the hardware.

    Args:
        steps: steps of one rank, in order.
        of: name of the field whose sum is divided by the time, such as ``n_global`` for samples.
        starts: times at which a job began, in seconds since 1970. The pause before each of these
            times does not count.

    Returns:
        None for fewer than two steps.
    """
    amount = seconds = 0.0
    for before, step in pairwise(steps):
        if not any(before["time"] < at < step["time"] for at in starts):
            amount += step[of]
            seconds += step["time"] - before["time"]
    return amount / seconds if seconds > 0 else None


def pauses(steps: Sequence[JsonDict], starts: Sequence[float]) -> list[tuple[float, float]]:
    """Return the pauses of a run between two jobs, each as a pair of seconds.

    The first number of a pair is the time since 1970 at which a job continued from a checkpoint.
    The second number is the duration of the pause before this time. Pairs are in ascending order.

    Args:
        steps: steps of one rank, in order.
        starts: times at which a job continued, in seconds since 1970.
    """
    result = []
    for before, step in pairwise(steps):
        if began := [at for at in starts if before["time"] < at < step["time"]]:
            own = step["n_global"] / step["samples_per_s"] if step["samples_per_s"] else 0.0
            result.append((max(began), max(0.0, step["time"] - before["time"] - own)))
    return result


def without_pauses(moment: float, paused: Sequence[tuple[float, float]]) -> float:
    """Return a time minus all pauses that came before this time; see :func:`pauses`."""
    return moment - sum(seconds for at, seconds in paused if at <= moment)


def lead(steps: Mapping[int, Sequence[JsonDict]]) -> Sequence[JsonDict]:
    """Return the step records of the rank that has the most records; empty without records."""
    return max(steps.values(), key=len, default=())


_WARM = 1 / 3  # fraction of a run's steps that is warm-up
_LEAK_HALF = 10  # steps of each half; allocators still grow in shorter runs
_LEAK_MIB, _LEAK_PART = 8.0, 0.01  # growth in a run that is no leak: the larger of the two

Steps = Mapping[int, Sequence[JsonDict]]  # records by rank


def warm(lines: Sequence[JsonDict]) -> Sequence[JsonDict]:
    """Return the records of a run without its first steps, the warm-up."""
    return lines[math.ceil(len(lines) * _WARM) :]


def leak(steps: Steps) -> float | None:
    """Return the memory growth per step in MiB on the worst rank, or None without a leak.

    There is a leak if the memory grows until the end of the run. A line is fitted to each half of
    the steps after the warm-up, because a buffer that grows once is no leak.
    """
    worst = 0.0
    for lines in steps.values():
        later = [line["mem_peak_mib"] for line in warm(lines)]
        half = len(later) // 2
        if half < _LEAK_HALF or None in later:
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
    """Return the energy of the GPUs that trained, in joules per sample.

    Only the energy between the first and the last step counts. The GPU of a lost rank counts until
    the rank's last step. None: the energy of a GPU is unknown.
    """
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
    mean_watts = {gpu: statistics.fmean(received) for gpu, received in watts.items()}
    energy = sum(_took(taken) * sum(mean_watts[gpu] for gpu in gpus) for gpus, taken in spans)
    return float(energy / sum(line["n_global"] for line in lines))


def _took(lines: Sequence[JsonDict]) -> float:
    """Return the total seconds of some steps."""
    return float(sum(line["n_global"] / line["samples_per_s"] for line in lines))


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    """The records of one training run, as arrays.

    Attributes:
        path: folder of the run.
        run: content of run.json.
        steps: step records by rank.
        lead: step records of the rank that has the most records.
        epochs: evaluations.
        starts: times at which a job continued from a checkpoint, seconds since 1970.
    """

    path: Path
    run: JsonDict
    steps: dict[int, list[JsonDict]]
    lead: Sequence[JsonDict]
    epochs: list[JsonDict]
    starts: Sequence[float] = ()

    def values(self, field: str) -> Array:
        """Return a field of every step, shape [steps]; NaN where unknown."""
        return column(self.lead, field)

    def taken(self) -> Array:
        """Return the number of steps taken by the end of each step, from 1; shape [steps]."""
        return self.values("step") + 1

    @property
    def unit(self) -> str:
        """Unit in which a rate counts, such as images or tokens."""
        return str((self.run.get("task") or {}).get("unit", "samples"))

    def running_s(self) -> Array:
        """Return the seconds from the end of the first step to the end of each step, shape [steps].

        Pauses between jobs do not count.
        """
        paused = pauses(self.lead, self.starts)
        ends = [without_pauses(line["time"], paused) for line in self.lead]
        return np.array(ends) - ends[0]

    def counted(self) -> Array:
        """Return the global batch of every step, in :attr:`unit`; shape [steps]."""
        weights, samples = self.values("weight"), self.values("n_global")
        return np.where(np.isnan(weights), samples, weights)  # older runs have no weights

    def rates(self) -> Array:
        """Return the rate of all ranks together in every step, in :attr:`unit` per second.

        The shape is [steps].

        NaN for a smaller last batch of an epoch. A step has a fixed cost, so the rate of a small
        batch does not show the speed of the hosts.
        """
        samples = self.values("n_global")
        result = self.values("samples_per_s") * self.counted() / samples
        return np.where(np.diff(samples, prepend=0) < 0, np.nan, result)

    def mean_rate(self) -> float:
        """Return the mean rate over wall time, in :attr:`unit` per second; NaN if it is unknown.

        See :func:`motley.records.costs.mean_rate`.
        """
        of = "weight" if all(line.get("weight") is not None for line in self.lead) else "n_global"
        mean = mean_rate(self.lead, of, self.starts)
        return np.nan if mean is None else mean

    @property
    def headline(self) -> str:
        """Name of the main metric of an evaluation; empty if the loss is the only metric."""
        names = EpochRecord.read_metrics(self.epochs[-1]) if self.epochs else {}
        return next((name for name in names if name != "loss"), "")

    def last_launch(self) -> "Training | None":
        """Return the records of the last launch: the ranks that run.json lists, and their steps.

        The result is None if these ranks have taken no step. For an old run without such a list,
        all steps count as one launch.
        """
        first = self._first_step()
        if first is None:
            return None
        result = {rank: [line for line in lines if line["step"] >= first]
                 for rank, lines in self.steps.items()}  # fmt: skip
        steps = {rank: lines for rank, lines in result.items() if lines}
        if not steps:
            return None
        return replace(self, steps=steps, lead=lead(steps))

    def _first_step(self) -> int | None:
        """Return the first step of the current ranks; None if they have taken no step."""
        if isinstance(self.run.get("groups"), list):
            return max((group["step"] for group in self.groups.groups), default=0)
        began = self.run.get("grouped", self.run.get("started"))
        if not isinstance(began, int | float):
            return 0
        # The lowest rank with records counts first, because the first rank's clock set the time.
        after = (line["step"] for _, lines in sorted(self.steps.items()) for line in lines
                 if line["time"] > began)  # fmt: skip
        return next(after, None)

    @cached_property
    def groups(self) -> RankGroups:
        """Groups of ranks that trained one after another; see motley.records.training."""
        return RankGroups(self.run)

    def worker(self, rank: int) -> JsonDict:
        """Return the entry of a rank in run.json (host, device, precision), even of a lost rank.

        The entry is empty if run.json has none.
        """
        return self.groups.worker(rank)


def column(records: Sequence[JsonDict], field: str) -> Array:
    """Return a field of every record, shape [records]; NaN where unknown."""
    values = [record.get(field) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def mean(values: Array) -> float:
    """Return the mean of all values that are not NaN; NaN without such values."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else np.nan


def median(values: Array) -> float:
    """Return the median of all values that are not NaN; NaN without such values."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def read_training(folder: RunFolder, last: bool = False) -> Training:
    """Return the records of one run.

    Args:
        folder: folder of the run.
        last: True: read only the last few hundred steps.

    Raises:
        MotleyError: the run has no step.
    """
    run = folder.read_run()
    result = folder.read_last_steps() if last else folder.read_steps()
    steps = {rank: records for rank, records in result.items() if records}
    if not steps:
        raise MotleyError(f"{folder.path} is left out: it holds no training step")
    events = folder.read_events()
    starts = [event["time"] for event in events if event.get("event") == "resume"]
    return Training(folder.path, run, steps, lead(steps), folder.read_epochs(), starts)

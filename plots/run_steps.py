"""The records of one training run, ready to draw."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import style

from motley.errors import MotleyError
from motley.records.gpu_csv import device_name
from motley.records.lines import JsonDict
from motley.records.rates import lead, mean_rate
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord

UNFINISHED = ("failed", "running", "stopped")


@dataclass(frozen=True)
class Training:
    """The records of one run.

    Attributes:
        run: run.json.
        steps: step records by rank; ``lead``: those of the rank that has the most.
        epochs: evaluations.
        starts: when a job went on from a checkpoint, seconds since the epoch.
    """

    path: Path
    run: JsonDict
    steps: dict[int, list[JsonDict]]
    lead: Sequence[JsonDict]
    epochs: list[JsonDict]
    starts: Sequence[float] = ()

    def values(self, field: str) -> style.Array:
        """A field of every step; NaN where unknown."""
        return column(self.lead, field)

    @property
    def unit(self) -> str:
        """What a rate counts: images, tokens."""
        return str((self.run.get("task") or {}).get("unit", "samples"))

    def rates(self) -> style.Array:
        """Of all ranks together, in :attr:`unit` a second, of every step."""
        weights = self.values("weight") / self.values("n_global")  # older runs tell none
        return self.values("samples_per_s") * np.where(np.isnan(weights), 1.0, weights)

    def mean_rate(self) -> float:
        """By the clock, see :func:`motley.records.rates.mean_rate`, in :attr:`unit` a second; NaN
        where unknown."""
        of = "weight" if all(line.get("weight") is not None for line in self.lead) else "n_global"
        mean = mean_rate(self.lead, of, self.starts)
        return np.nan if mean is None else mean

    @property
    def headline(self) -> str:
        """The metric that an evaluation is judged by; empty if there is none besides the loss."""
        names = EpochRecord.metrics_of(self.epochs[-1]) if self.epochs else {}
        return next((name for name in names if name != "loss"), "")

    def worker(self, rank: int) -> JsonDict:
        """What run.json says of a rank (host, device, precision); empty if nothing."""
        workers = [worker for worker in self.run.get("ranks") or [] if worker.get("rank") == rank]
        return workers[0] if workers else {}


def column(records: Sequence[JsonDict], field: str) -> style.Array:
    """A field of every record; NaN where unknown."""
    values = [record.get(field) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def mean(values: style.Array) -> float:
    """Of what is known, or NaN."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else np.nan


def median(values: style.Array) -> float:
    """Of the known values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def read_training(folder: RunFolder) -> Training:
    """Read one run; raise MotleyError if there is nothing to draw."""
    run = folder.read_run()
    steps = {rank: records for rank, records in folder.read_steps().items() if records}
    if not steps:
        raise MotleyError(f"{folder.path} holds no training step; left out")
    events = folder.read_events()
    starts = [event["time"] for event in events if event.get("event") == "resume"]
    return Training(folder.path, run, steps, lead(steps), folder.read_epochs(), starts)


def title(training: Training) -> str:
    """Run, model, data, ranks, result; ``failed``, ``running`` or ``stopped`` where that is so."""
    run = training.run
    result, status = run.get("result") or {}, run.get("status")
    name = training.path.resolve().name + (f" ({status})" if status in UNFINISHED else "")
    what = str((run.get("task") or {}).get("title", ""))
    ranks = len(run.get("ranks") or training.steps)
    facts = [what, f"{ranks} rank{'s' if ranks != 1 else ''}"]
    if result.get(training.headline) is not None:
        facts.append(f"final {style.metric(training.headline, result[training.headline])}")
    return f"{name}: {', '.join(filter(None, facts))}"


def seat_label(training: Training, rank: int) -> str:
    """``rank 0 - a``, and below it device, precision and samples a step."""
    worker, samples = training.worker(rank), median(column(training.steps[rank], "n_local"))
    first = f"rank {rank} - {worker['host']}" if worker.get("host") else f"rank {rank}"
    facts = [
        device_name(str(worker.get("device") or "")),
        str(worker.get("precision") or ""),
    ]
    facts.append("" if np.isnan(samples) else f"{samples:.0f} samples")
    return f"{first}\n{', '.join(filter(None, facts))}"


@dataclass(frozen=True)
class Other:
    """One of the three that the first rank's lines tell of all others; see
    :func:`motley.records.training.others_ready`.

    Attributes:
        label: which of how many, and below it the rank that it most often was.
        ready_s, wait_s: medians over steps, seconds.
    """

    label: str
    ready_s: float
    wait_s: float


def others(training: Training) -> list[Other]:
    """Who was ready first, in the middle and last; none where each rank writes its own steps."""
    told = [line for line in training.lead if line.get("others_ready")]
    ranks = len(training.run.get("ranks") or ()) - 1
    found = []
    for name, word in (("least", "first"), ("middle", "middle"), ("largest", "last")):
        those = [line["others_ready"][name] for line in told]
        last = [max(line["t_data"] + line["t_compute"], line["others_ready"]["largest"]["ready_s"])
                for line in told]  # fmt: skip
        if not those:
            continue
        ((rank, times),) = Counter(each["rank"] for each in those).most_common(1)
        host = training.worker(rank).get("host")
        who = f"rank {rank}" + (f" - {host}" if host else "")
        waits = [end - each["ready_s"] for end, each in zip(last, those, strict=True)]
        found.append(Other(
            f"{word} of {ranks} others\nmost often {who} ({times / len(those):.0%})",
            median(column(those, "ready_s")), median(np.array(waits)),
        ))  # fmt: skip
    return found

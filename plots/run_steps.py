"""The records of one training run, ready to draw."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import style

from motley.errors import MotleyError
from motley.records.lines import JsonDict
from motley.records.run_folder import EpochRecord, RunFolder

UNFINISHED = ("failed", "running", "stopped")


@dataclass(frozen=True)
class Training:
    """The records of one run.

    Attributes:
        run: run.json.
        steps: step records by rank; ``lead``: those of the rank that has the most.
        epochs: evaluations.
    """

    path: Path
    run: JsonDict
    steps: dict[int, list[JsonDict]]
    lead: list[JsonDict]
    epochs: list[JsonDict]

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

    @property
    def headline(self) -> str:
        """The metric that an evaluation is judged by; empty if there is none besides the loss."""
        names = EpochRecord.metrics_of(self.epochs[-1]) if self.epochs else {}
        return next((name for name in names if name != "loss"), "")

    def worker(self, rank: int) -> JsonDict:
        """What run.json says of a rank (host, device, precision); empty if nothing."""
        workers = [worker for worker in self.run.get("ranks") or [] if worker.get("rank") == rank]
        return workers[0] if workers else {}


def column(records: list[JsonDict], field: str) -> style.Array:
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
    return Training(folder.path, run, steps, max(steps.values(), key=len), folder.read_epochs())


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
        style.device_name(str(worker.get("device") or "")),
        str(worker.get("precision") or ""),
    ]
    facts.append("" if np.isnan(samples) else f"{samples:.0f} samples")
    return f"{first}\n{', '.join(filter(None, facts))}"

"""The records of one training run as columns, one a field. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.records.costs import lead, mean_rate, pauses, without_pauses
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord, RankGroups

Array = NDArray[np.float64]


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

    def values(self, field: str) -> Array:
        """A field of every step; NaN where unknown."""
        return column(self.lead, field)

    def taken(self) -> Array:
        """How many steps are taken with each one: as people count, from 1."""
        return self.values("step") + 1

    @property
    def unit(self) -> str:
        """What a rate counts: images, tokens."""
        return str((self.run.get("task") or {}).get("unit", "samples"))

    def running_s(self) -> Array:
        """Seconds since the end of the first step, at the end of each, of time in which it ran."""
        paused = pauses(self.lead, self.starts)
        ends = [without_pauses(line["time"], paused) for line in self.lead]
        return np.array(ends) - ends[0]

    def counted(self) -> Array:
        """The global batch of every step, in :attr:`unit`."""
        weights, samples = self.values("weight"), self.values("n_global")
        return np.where(np.isnan(weights), samples, weights)  # older runs tell none

    def rates(self) -> Array:
        """Of all ranks together, in :attr:`unit` a second, of every step; NaN of an epoch's last
        batch that is smaller: a step costs something whatever its batch, so it says nothing of the
        machines."""
        samples = self.values("n_global")
        found = self.values("samples_per_s") * self.counted() / samples
        return np.where(np.diff(samples, prepend=0) < 0, np.nan, found)

    def mean_rate(self) -> float:
        """By the clock, see :func:`motley.records.training.mean_rate`, in :attr:`unit` a second;
        NaN where unknown."""
        of = "weight" if all(line.get("weight") is not None for line in self.lead) else "n_global"
        mean = mean_rate(self.lead, of, self.starts)
        return np.nan if mean is None else mean

    @property
    def headline(self) -> str:
        """The metric that an evaluation is judged by; empty if there is none besides the loss."""
        names = EpochRecord.metrics_of(self.epochs[-1]) if self.epochs else {}
        return next((name for name in names if name != "loss"), "")

    def last_launch(self) -> "Training | None":
        """Return the steps of the ranks that run.json tells as training now; None where they have
        taken none. An old run that does not tell has all."""
        first = self._first_step()
        if first is None:
            return None
        found = {rank: [line for line in lines if line["step"] >= first]
                 for rank, lines in self.steps.items()}  # fmt: skip
        steps = {rank: lines for rank, lines in found.items() if lines}
        if not steps:
            return None
        return replace(self, steps=steps, lead=lead(steps))

    def _first_step(self) -> int | None:
        """Return the first step of the ranks of now; None where they have taken none."""
        if isinstance(self.run.get("groups"), list):
            return max((group["step"] for group in self.groups.groups), default=0)
        began = self.run.get("grouped", self.run.get("started"))
        if not isinstance(began, int | float):
            return 0
        # By the clock of the lowest rank that is there: the first one's wrote run.json.
        after = (line["step"] for _, lines in sorted(self.steps.items()) for line in lines
                 if line["time"] > began)  # fmt: skip
        return next(after, None)

    @cached_property
    def groups(self) -> RankGroups:
        """Groups of ranks that trained one after another."""
        return RankGroups(self.run)

    def worker(self, rank: int) -> JsonDict:
        """Return what run.json says of a rank (host, device, precision), also of one that was lost;
        empty if nothing."""
        return self.groups.worker(rank)


def column(records: Sequence[JsonDict], field: str) -> Array:
    """A field of every record; NaN where unknown."""
    values = [record.get(field) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def mean(values: Array) -> float:
    """Of what is known, or NaN."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else np.nan


def median(values: Array) -> float:
    """Of the known values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def read_training(folder: RunFolder, last: bool = False) -> Training:
    """Read one run; raise MotleyError if it has no step.

    Args:
        last: only the last some hundred steps.
    """
    run = folder.read_run()
    found = folder.read_last_steps() if last else folder.read_steps()
    steps = {rank: records for rank, records in found.items() if records}
    if not steps:
        raise MotleyError(f"{folder.path} holds no training step; left out")
    events = folder.read_events()
    starts = [event["time"] for event in events if event.get("event") == "resume"]
    return Training(folder.path, run, steps, lead(steps), folder.read_epochs(), starts)

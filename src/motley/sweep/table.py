"""The table of a matrix, one row per cell, from the records of its runs.

The table is written as text (results.md) and for spreadsheets (results.csv).
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from motley.records.costs import Steps, joules, lead, leak, mean_rate, warm
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord
from motley.sweep.matrix import REFERENCE, Cell
from motley.sweep.results import DONE, BaselineFolder, Outcome
from motley.text import format_rate

_PARTS = ("data", "compute", "wait", "comm", "opt", "host")


@dataclass(frozen=True)
class Row:
    """The measurements of a cell, as a line of results.csv. None: unknown.

    Attributes:
        name: name of the cell.
        strategy: see :class:`~motley.sweep.matrix.Cell`.
        precision: see Cell.
        checkpointing: see Cell.
        options: options of the cell, as one text.
        model: title of the task, with the trained model.
        unit: unit in which rates are counted, such as images.
        weight: number of these units in one sample.
        machines: number of launched machines.
        hosts: names of the hosts that trained.
        batch: global batch size.
        micro_batch: largest micro-batch of each rank.
        repeats: number of runs that have ended.
        outcome: ``done``, or the kind of the first failure.
        samples_per_s: median of the repeats' median rates.
        mean_samples_per_s: median of the repeats' mean rates by the clock, see :func:`mean_rate`,
            without warm-up steps.
        spread: difference of the highest and lowest rate, divided by the median; None for a single
            repeat.
        limit_samples_per_s: sum of the rates that each machine would reach alone in this cell's
            precision.
        fraction_of_limit: rate divided by the limit. The limit is the largest
            ``limit_samples_per_s`` of all cells that have the same machines and batch, and train
            without --compile.
        efficiency: rate divided by ``limit_samples_per_s`` of this cell.
        epoch_s: seconds of an epoch's training at this rate.
        memory_mib: largest memory of a rank in MiB, by host.
        leak_mib: growth of memory per step in MiB; None: no growth.
        joules: energy of the GPUs per sample, in joules.
        loss: loss of the last step.
        score: main metric of the last evaluation; median of the repeats.
        score_name: name of this metric in the records.
        score_spread: difference of the highest and lowest score; None for a single repeat.
        loss_difference: difference of the loss from the loss of the fp32 reference, divided by the
            reference's loss.
        data_s: seconds of a step in which a rank waits for data, mean over ranks.
        compute_s: seconds of a step in which a rank computes, mean over ranks.
        wait_s: seconds of a step in which a rank waits for the slowest rank, mean over ranks.
        comm_s: seconds of a step in which ranks communicate, mean over ranks.
        opt_s: seconds of a step in the optimizer, mean over ranks.
        host_s: seconds of a step in the loop's own Python, mean over ranks.
        error: description of the failure; empty without a failure.
        when: epoch, step and phase of the failure, in words; see Outcome.
    """

    name: str
    strategy: str
    precision: str
    checkpointing: str
    options: str
    model: str
    unit: str
    weight: float
    machines: int
    hosts: str
    batch: int
    micro_batch: str
    repeats: int
    outcome: str
    samples_per_s: float | None = None
    mean_samples_per_s: float | None = None
    spread: float | None = None
    limit_samples_per_s: float | None = None
    fraction_of_limit: float | None = None
    efficiency: float | None = None
    epoch_s: float | None = None
    memory_mib: str = ""
    leak_mib: float | None = None
    joules: float | None = None
    loss: float | None = None
    score: float | None = None
    score_name: str = ""
    score_spread: float | None = None
    loss_difference: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    wait_s: float | None = None
    comm_s: float | None = None
    opt_s: float | None = None
    host_s: float | None = None
    error: str = ""
    when: str = ""

    @property
    def limit(self) -> float | None:
        """Limit in samples/s from which ``fraction_of_limit`` was computed; None: unknown."""
        if not self.samples_per_s or not self.fraction_of_limit:
            return None
        return self.samples_per_s / self.fraction_of_limit

    @property
    def rate(self) -> str:
        """Median rate in the task's unit, such as ``1,204 images/s``; empty if unknown."""
        return self._words(self.samples_per_s)

    @property
    def mean_rate(self) -> str:
        """Mean rate over wall time as text, in the form of :attr:`rate`."""
        return self._words(self.mean_samples_per_s)

    def _words(self, samples_per_s: float | None) -> str:
        return f"{format_rate(self.weight * samples_per_s)} {self.unit}/s" if samples_per_s else ""

    @property
    def score_text(self) -> str:
        """The score with its name and spread: ``top1 0.912, spread 0.01``; empty if unknown."""
        if self.score is None:
            return ""
        spread = "" if self.score_spread is None else f", spread {self.score_spread:.2g}"
        return f"{self.score_name} {self.score:.4g}{spread}"

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled.

        The rate may then exceed the limit, which is computed without --compile.
        """
        return "--compile" in self.options.split()


def read_rows(folder: BaselineFolder) -> list[Row]:
    """Return the rows of all cells of which a run has ended. The references come first."""
    cells = folder.matrix_cells()
    result = {cell: folder.repeats(cell) for cell in cells}
    references = {
        cell.samples: (runs[0][0].read_run(), _loss(runs[0][0].read_steps()))
        for cell, runs in result.items()
        if cell.name.startswith(REFERENCE) and runs and runs[0][1].kind == DONE
    }  # fmt: skip
    rows = [
        _row(cell, runs, references.get(cell.samples)) for cell, runs in result.items() if runs
    ]  # fmt: skip
    limits: dict[tuple[int, int, str], float] = {}
    for row in rows:
        if row.limit_samples_per_s:
            key = (row.machines, row.batch, row.model)
            limits[key] = max(limits.get(key, 0.0), row.limit_samples_per_s)
    return [_with_limit(row, limits.get((row.machines, row.batch, row.model))) for row in rows]


def _with_limit(row: Row, limit: float | None) -> Row:
    if limit is None or row.samples_per_s is None:
        return row
    return replace(row, fraction_of_limit=row.samples_per_s / limit)


def _row(
    cell: Cell, runs: Sequence[tuple[RunFolder, Outcome]], reference: "_Reference | None"
) -> Row:
    done = [folder for folder, outcome in runs if outcome.kind == DONE]
    failed = [outcome for _, outcome in runs if outcome.kind != DONE]
    about = (done or [folder for folder, _ in runs])[0].read_run()
    plan: Mapping[str, Any] = about.get("plan") or {}
    task: Mapping[str, Any] = about.get("task") or {}
    facts: dict[str, Any] = {
        "name": cell.name, "strategy": cell.strategy, "precision": cell.precision,
        "checkpointing": cell.checkpointing, "options": " ".join(cell.options),
        "model": str(task.get("title", "")), "unit": str(task.get("unit", "samples")),
        "weight": float(task.get("weight", 1.0)),
        "machines": cell.hosts, "batch": cell.batch, "repeats": len(runs),
        "hosts": " ".join(dict.fromkeys(worker["host"] for worker in about.get("ranks") or ())),
        "micro_batch": " ".join(str(max(sizes)) for sizes in plan.get("micro_batches") or ()),
        "outcome": failed[0].kind if failed else DONE,
        "error": failed[0].error if failed else "", "when": failed[0].when if failed else "",
    }  # fmt: skip
    taken = [folder.read_steps() for folder in done]
    every = [_counted(steps) for steps in taken]
    if not (rates := [rate for rate in map(_rate, every) if rate]):
        return Row(**facts)
    middle = statistics.median(rates)
    means = [mean for steps in taken if (mean := mean_rate(warm(lead(steps))))]
    forecast: Mapping[str, Any] = plan.get("forecast") or {}
    limit = cell.batch / forecast["limit_s"] if forecast.get("limit_s") else None
    samples = (about.get("result") or {}).get("epoch_samples")
    loss = _loss(taken[0])
    whole = len(every[0]) == len(about.get("ranks") or ())  # False if disks are not shared
    facts |= {f"{part}_s": _part(every[0], part) if whole else None for part in _PARTS}
    return Row(
        **facts, samples_per_s=middle,
        mean_samples_per_s=statistics.median(means) if means else None,
        spread=(max(rates) - min(rates)) / middle if len(rates) > 1 else None,
        limit_samples_per_s=limit, efficiency=middle / limit if limit else None,
        epoch_s=samples / middle if samples else None,
        memory_mib=_memory(about, every[0]), leak_mib=leak(taken[0]),
        joules=joules(done[0], every[0]), loss=loss, **_get_score(done),
        loss_difference=_difference(about, loss, reference),
    )  # fmt: skip


def _get_score(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the fields of a row on the scores of some runs. Empty: a run has no evaluation."""
    last = [
        EpochRecord.read_metrics(evaluations[-1])
        for run in runs if (evaluations := run.read_epochs())
    ]  # fmt: skip
    if len(last) < len(runs) or not (name := next(iter(last[0] if last else ()), "")):
        return {}
    values = [each[name] for each in last]
    spread = max(values) - min(values) if len(values) > 1 else None
    return {"score": statistics.median(values), "score_name": name, "score_spread": spread}


# Options that have to be equal, besides the task, for losses equal to those of the fp32 run.
_SAME = (
    "model", "img_size", "dataset", "data_fraction", "augment", "epochs", "batch_size", "opt", "lr",
    "opt_kwargs", "momentum", "weight_decay", "weight_decay_end", "warmup_epochs", "warmup_steps",
    "warmup_lr", "lr_noise", "lr_noise_pct", "min_lr", "lr_cycle_limit", "lr_cycle_mul",
    "lr_cycle_decay", "clip_grad", "clip_mode", "smoothing", "drop", "drop_path", "labels",
    "target", "class_weights", "balanced_sampling", "bce_loss", "seed",
)  # fmt: skip


_Reference = tuple[JsonDict, float | None]  # run.json, and the last loss


def _difference(about: JsonDict, loss: float | None, reference: _Reference | None) -> float | None:
    """Return the relative difference of the last loss from the last loss of the fp32 reference.

    The result is None if the two trainings differ in an option that affects the loss, or for local
    SGD, which reports a mean of earlier losses.
    """
    if reference is None or loss is None:
        return None
    own, (other, expected) = about["config"], reference
    titles = {(each.get("task") or {}).get("title") for each in (about, other)}
    other = other.get("config", {})
    local = str((about.get("plan") or {}).get("wire")).startswith("local")
    if (
        local
        or not expected
        or len(titles) > 1
        or any(own.get(key) != other.get(key) for key in _SAME)
    ):
        return None
    return loss / expected - 1


def _counted(steps: Steps) -> dict[int, list[JsonDict]]:
    """Return the steps that count, without warm-up steps and smaller last batches of epochs."""
    result = {}
    for rank, lines in steps.items():
        later = warm(lines)
        most = max((line["n_global"] for line in later), default=0)
        result[rank] = [line for line in later if line["n_global"] == most]
    return result


def _rate(steps: Steps) -> float | None:
    """Return the samples/s of all ranks: by the median step, or for Local SGD by the mean step."""
    lines = lead(steps)
    if not lines:
        return None
    seconds = [line["n_global"] / line["samples_per_s"] for line in lines]
    has_losses = all(line["loss"] is not None for line in lines)
    middle = statistics.median(seconds) if has_losses else statistics.fmean(seconds)
    return float(lines[0]["n_global"] / middle)


def _part(steps: Steps, part: str) -> float | None:
    """Return the mean seconds of a part of a step, over all steps and ranks.

    None: the records of a rank lack this part.
    """
    values = [line[f"t_{part}"] for lines in steps.values() for line in lines]
    return statistics.fmean(values) if values and None not in values else None


def _loss(steps: Steps) -> float | None:
    losses = [line["loss"] for lines in steps.values() for line in lines[-1:]]
    return next((loss for loss in losses if loss is not None), None)


def _memory(about: JsonDict, steps: Steps) -> str:
    """Return the largest memory of a rank on each host, such as ``a 812, b 640``."""
    hosts = {worker["rank"]: worker["host"] for worker in about.get("ranks") or ()}
    most: dict[str, float] = {}
    for rank, lines in steps.items():
        for line in lines:
            if line.get("mem_peak_mib") is not None:
                host = hosts.get(rank, f"rank {rank}")
                most[host] = max(most.get(host, 0.0), line["mem_peak_mib"])
    return ", ".join(f"{host} {mib:.0f}" for host, mib in most.items())


_SHOWN = (
    ("cell", "name"), ("hosts", "machines"), ("precision", "precision"), ("batch", "batch"),
    ("micro-batch", "micro_batch"),
    ("median rate", "rate"), ("mean rate", "mean_rate"), ("spread", "spread"),
    ("of limit", "fraction_of_limit"),
    ("efficiency", "efficiency"), ("epoch s", "epoch_s"), ("memory MiB", "memory_mib"),
    ("J/sample", "joules"), ("last evaluation", "score_text"),
    ("loss vs fp32", "loss_difference"), ("outcome", "outcome"),
)  # fmt: skip
_FORMS = {
    "spread": "{:.1%}", "fraction_of_limit": "{:.3f}",
    "efficiency": "{:.3f}", "epoch_s": "{:,.1f}", "joules": "{:.3g}", "loss_difference": "{:+.1e}",
}  # fmt: skip


def shown(row: Row) -> list[str]:
    """Return a row's cells as text, in the order of :data:`HEAD`."""
    values = [getattr(row, name) for _, name in _SHOWN]
    return [
        "" if value is None else _FORMS.get(name, "{}").format(value)
        for (_, name), value in zip(_SHOWN, values, strict=True)
    ]  # fmt: skip


HEAD = [title for title, _ in _SHOWN]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, followed by notes on failures, memory growth and so on."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in shown(row)) + " |"
              for row in rows]  # fmt: skip
    notes = [
        f"- **{row.name}**: {row.outcome}" + (f" ({row.when})" if row.when else "")
        + f": {row.error}" for row in rows if row.outcome != DONE
    ] + [
        f"- **{row.name}**: memory grows by {row.leak_mib:.3g} MiB per step, until the end of "
        "the run"
        for row in rows if row.leak_mib
    ] + [
        f"- **{row.name}**: faster than the limit, which is that of the model without --compile"
        for row in rows if row.is_compiled and (row.fraction_of_limit or 0) > 1
    ]  # fmt: skip
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def write_rows(folder: BaselineFolder, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write results.csv and results.md into the folder, and return their paths."""
    table, text = folder.path / "results.csv", folder.path / "results.md"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: "" if v is None else v for k, v in asdict(row).items()})
    text.write_text(f"{markdown(rows)}\n{folder.configuration()}")
    return table, text

"""One page of all that was run: what, on what, what won and why, with the pictures inside.

    python plots/report.py logs/                       # logs/report.html
    python plots/report.py baselines/strategies logs/ --out report
    python plots/report.py baselines/

Opens from disk, needs no network; its tables can be sorted. Exit code: 0, or 2 if there is
nothing to show.
"""

import base64
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import command
import numpy as np
import style
from gpu_series import read_folder, to_series
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from plot_baselines import draw_folder as draw_matrix
from plot_gpu import draw_folder as draw_machines
from plot_runs import draw_runs, losses_of
from plot_timeline import draw_timeline
from plot_training import draw_run
from report_words import verdict
from run_steps import read_or_say, title
from traces import words
from verdict import add_co2

from motley.errors import MotleyError
from motley.live.training import Training, median
from motley.live.verdict import run_verdict
from motley.records.gpu_csv import find_gpu_logs
from motley.records.run_folder import RunFolder, find_runs
from motley.records.trace import read_trace, summarise
from motley.sweep.outcome import DONE
from motley.sweep.results import BaselineFolder
from motley.sweep.rows import Row, read_rows
from motley.sweep.table import HEAD, shown
from motley.text import rate_in_words, step_in_words

_DPI = 110


@dataclass(frozen=True)
class Picture:
    """An embedded PNG. alt: what it shows, in words."""

    data: str
    alt: str


@dataclass(frozen=True)
class Details:
    """One run, folded away.

    Attributes:
        title: its summary line. verdict: sentences. profiled: what its traces say, in lines.
    """

    title: str
    verdict: list[str]
    pictures: list[Picture]
    profiled: list[str]


@dataclass(frozen=True)
class Section:
    """One matrix, or all runs that belong to none.

    Attributes:
        verdict: sentences. facts: what was run, on what. head, rows: of the table.
        failed: name, how and where, error.
    """

    name: str
    verdict: list[str]
    facts: list[str]
    head: list[str]
    rows: list[list[str]]
    failed: list[tuple[str, str, str]]
    pictures: list[Picture]
    runs: list[Details]


def picture(alt: str, draw: Callable[[], Figure]) -> list[Picture]:
    """The picture, or none, and a word, where it cannot be drawn."""
    try:
        buffer = io.BytesIO()
        draw().savefig(buffer, format="png", dpi=_DPI)
    except (MotleyError, OSError, ValueError, KeyError, TypeError) as error:
        command.warn(f"{alt}: {error}")
        return []
    return [Picture(base64.b64encode(buffer.getvalue()).decode(), alt)]


def details(
    run: RunFolder, training: Training | None, colours: dict[str, str], co2: float, name: str = ""
) -> Details:
    """A run's pictures, and what was profiled."""
    pictures: list[Picture] = []
    said: list[str] = []
    if training is None:
        summary = f"{run.path.name}: no training step"
    else:
        summary, said = title(training), run_verdict(training, co2).sentences()
        pictures += picture(
            f"training of {run.path.name}: loss and rate, and how each rank spends a step",
            lambda: draw_run(training, colours),
        )
        pictures += picture(
            f"what each rank of {run.path.name} did around the step that took longest",
            lambda: draw_timeline(training),
        )
    if logs := find_gpu_logs([run.path]):
        pictures += picture(
            f"load, memory, temperature and power of the machines of {run.path.name}",
            lambda: draw_machines(run.path.name, to_series(read_folder(logs), colours)),
        )
    profiled: list[str] = []
    for path in run.traces():
        try:
            profiled += words(summarise(read_trace(path)))
        except MotleyError as error:
            command.warn(error)
    return Details(name or summary, said, pictures, profiled)


def of_matrix(folder: BaselineFolder, colours: dict[str, str], co2: float) -> Section:
    """The section of one matrix."""
    rows = read_rows(folder)
    firsts = {cell.name: folder.attempt(cell, 0) for cell in folder.matrix_cells()}
    runs = {name: run for name, run in firsts.items() if run.read_run()}
    name = folder.path.resolve().name
    return Section(
        name, verdict(rows),
        [line.removeprefix("- ") for line in folder.configuration().splitlines() if line],
        HEAD, [shown(row) for row in rows],
        [(row.name, ", ".join(filter(None, (row.outcome, row.when))), row.error)
         for row in rows if row.outcome != DONE],
        picture(f"ways to train, {name}", lambda: draw_matrix(folder)),
        [details(run, read_or_say(run), colours, co2, f"{cell}: {_rate(rows, cell)}")
         for cell, run in runs.items()],
    )  # fmt: skip


def _rate(rows: list[Row], name: str) -> str:
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        return "not ended"
    return row.rate or row.outcome


def rates(training: Training) -> tuple[str, str, str]:
    """The median of its steps and the mean by the clock, in words, and what it is judged by."""
    middle, mean = (
        "" if np.isnan(rate) else f"{rate_in_words(rate)} {training.unit}/s"
        for rate in (median(training.rates()), training.mean_rate())
    )
    return middle, mean, training.headline


def of_runs(runs: list[RunFolder], colours: dict[str, str], co2: float) -> Section:
    """The section of runs that belong to no matrix."""
    head = ["run", "status", "task", "ranks", "batch", "wire", "median rate", "mean rate",
            "result"]  # fmt: skip
    rows, failed = [], []
    trainings = [read_or_say(run) for run in runs]
    for run, training in zip(runs, trainings, strict=True):
        try:
            about = run.read_run()
        except MotleyError as error:
            command.warn(error)
            rows.append([run.path.name, "run.json is damaged", *[""] * (len(head) - 2)])
            continue
        config, result = about.get("config") or {}, about.get("result") or {}
        failure = about.get("failure") or {}
        middle, mean, headline = rates(training) if training else ("", "", "")
        best = result.get(headline)
        rows.append([
            run.path.name, str(about.get("status", "")),
            str((about.get("task") or {}).get("title", "")), str(len(about.get("ranks") or [])),
            str(config.get("batch_size") or ""), str((about.get("plan") or {}).get("wire") or ""),
            middle, mean, "" if best is None else style.metric(headline, best),
        ])  # fmt: skip
        if failure and about.get("status") != "stopped":
            where = f"rank {failure.get('rank')} on {failure.get('host')}"
            if failure.get("step") is not None:
                where += f", {step_in_words(failure['step'])}"
            failed.append((run.path.name, where, str(failure.get("error") or "")))
    finished = sum(row[1] == "finished" for row in rows)
    each = [details(*pair, colours, co2) for pair in zip(runs, trainings, strict=True)]
    said = [f"{finished} of {len(rows)} runs finished."]
    if len(each) == 1:  # then the page is about it
        (alone,) = each
        said, pictures = alone.verdict or said, alone.pictures[:1]
        each = [replace(alone, verdict=[], pictures=alone.pictures[1:])]
        return Section(runs[0].path.resolve().name, said, [], head, rows, failed, pictures, each)
    together = picture(
        "loss of each run against samples and against time",
        lambda: draw_runs(losses_of(filter(None, trainings))),
    )
    return Section("runs", said, [], head, rows, failed, together, each)


def draw(paths: list[Path], out: Path | None, co2: float) -> int:
    """Write the page; return the exit code."""
    colours = style.colours_under(paths)
    matrices = [file.parent for path in paths for file in sorted(path.rglob("matrix.json"))]
    alone = [run for run in find_runs(paths)
             if not any(folder in run.path.parents for folder in matrices)]  # fmt: skip
    sections = []
    for folder in matrices:
        try:
            sections.append(of_matrix(BaselineFolder(folder), colours, co2))
        except MotleyError as error:
            command.warn(error)
    if alone:
        sections.append(of_runs(alone, colours, co2))
    if not sections:
        raise command.nothing("run", paths)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("report.html.jinja").render(
        sections=sections, made=time.strftime("%Y-%m-%d %H:%M"), paths=[str(p) for p in paths]
    )
    file = (out or paths[0]) / "report.html"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MotleyError(
            f"cannot write {file}: {error.strerror}; choose another place with --out DIR"
        ) from None
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(command.run_script(__doc__ or "", draw, add_co2))

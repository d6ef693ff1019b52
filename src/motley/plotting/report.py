"""Write a page on all runs: settings, machines, pictures, and the fastest way to train.

    python plots/report.py logs/                       # logs/report.html
    python plots/report.py baselines/strategies logs/ --out report
    python plots/report.py baselines/

A browser opens the page from the disk, without a network. A reader can sort the tables of the page.
The exit code is 0, or 2 if there is nothing to show.
"""

import base64
import contextlib
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from motley.errors import MotleyError
from motley.live.verdict import run_verdict
from motley.live.words import plain
from motley.plotting import command, style
from motley.plotting.plot_baselines import LOST, lost
from motley.plotting.plot_baselines import draw_folder as draw_matrix
from motley.plotting.plot_gpu import machine_panels, read_folder, to_series
from motley.plotting.plot_runs import read_losses, runs_panels
from motley.plotting.plot_timeline import draw_timeline
from motley.plotting.plot_training import run_panels
from motley.plotting.run_diff import describe_run, format_value
from motley.plotting.run_steps import read_or_say, title
from motley.plotting.run_verdict import add_co2
from motley.plotting.traces import describe_trace
from motley.records.classes import ClassResult, read_classes, read_worst
from motley.records.costs import Training, median
from motley.records.gpu_csv import find_gpu_logs
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder, find_runs
from motley.records.trace import read_trace, summarise
from motley.sweep.matrix import REFERENCE
from motley.sweep.results import DONE, BaselineFolder
from motley.sweep.table import HEAD, Row, read_rows, shown
from motley.text import format_rate, format_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WRONG = 0.01  # relative difference of a wrong loss; 30 steps in 16 bits differ by a tenth of that
_TIE = 0.02  # relative difference of equal rates
_CLASSES = 10  # classes that are shown of a run


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return sentences on the results of a matrix, the most important first.

    The fp32 reference runs are not compared with the other runs.
    """
    measured = [row for row in rows if row.samples_per_s and not row.name.startswith(REFERENCE)]
    sane = [row for row in measured if not is_wrong(row)]
    sentences = []
    if sane:
        ranked = sorted(sane, key=lambda row: -(row.samples_per_s or 0))
        sentences.append(_winner(ranked))
        if why := _where_it_went(ranked[0]):
            sentences.append(why)
        sentences += _frugal(ranked)
    for row in measured:
        if is_wrong(row):
            sentences.append(
                f"The last loss of {row.name} differs by {row.loss_difference:+.1%} from that of "
                "the fp32 run on the same samples. Find the reason before you rely on the speed."
            )
    if sane and not any(map(is_wrong, measured)):
        known = [abs(row.loss_difference) for row in sane if row.loss_difference is not None]
        if known:
            sentences.append(
                "All last losses agree with that of the fp32 run, with a relative difference of at "
                f"most {max(known):.0e}."
            )
    if leaky := [row for row in measured if row.leak_mib]:
        words = ", ".join(f"{row.name} ({row.leak_mib:.3g} MiB a step)" for row in leaky)
        sentences.append(f"Memory grows until the end of the run: {words}.")
    failed = [row for row in rows if row.outcome != DONE]
    if failed:
        words = ", ".join(f"{row.name} ({row.outcome})" for row in failed)
        sentences.append(f"{len(failed)} of {len(rows)} cells did not finish: {words}.")
    return sentences or ["No run is finished yet."]


def is_wrong(row: Row) -> bool:
    """Return True if the cell's loss differs too much from that of its fp32 reference."""
    return row.loss_difference is not None and abs(row.loss_difference) > _WRONG


def _winner(ranked: Sequence[Row]) -> str:
    best = ranked[0]
    words = f"{best.name} is the fastest: {best.rate}"
    if best.fraction_of_limit:
        words += f", {best.fraction_of_limit:.0%} of the limit"
        if best.is_compiled:
            words += " without --compile"
    if len(ranked) > 1:
        ratio = (best.samples_per_s or 0) / (ranked[1].samples_per_s or 1)
        words += f"; {ranked[1].name} comes next, " + (
            "as fast within the noise" if ratio < 1 + max(_TIE, best.spread or 0)
            else f"{ratio:.2f} times slower"
        )  # fmt: skip
    return f"{words}."


def _where_it_went(row: Row) -> str:
    """Return a sentence on the causes of lost time in the fastest cell.

    The sentence is empty if the cell loses at most 1 % of its time.
    """
    parts = {
        name: part for name, part in lost(row).items() if part > 0.01 * (row.samples_per_s or 0)
    }
    if not parts or not row.samples_per_s:
        return ""
    whole = row.samples_per_s + sum(lost(row).values())
    shares = sorted(parts, key=lambda name: -parts[name])
    words = ", ".join(f"{LOST[name].label} {parts[name] / whole:.0%}" for name in shares)
    return f"Time that it loses against the limit: {words}."


def _frugal(ranked: Sequence[Row]) -> list[str]:
    """Return sentences on the cells that need the least memory and the least energy.

    The fastest cell gets no sentence.
    """
    sentences = []
    by_memory = [(memory, row) for row in ranked if (memory := most_memory(row)) is not None]
    if len(by_memory) > 1:
        memory, row = min(by_memory, key=lambda pair: pair[0])
        best = most_memory(ranked[0])
        if row is not ranked[0] and best is not None and memory < 0.95 * best:
            sentences.append(
                f"{row.name} needs the least memory: {memory:,.0f} MiB on the host that uses "
                f"most, where {ranked[0].name} needs {best:,.0f} MiB. Its speed is {row.rate}."
            )
    with_joules = [row for row in ranked if row.joules]
    if len(with_joules) > 1:
        row = min(with_joules, key=lambda each: each.joules or 0)
        if row is not ranked[0]:
            sentences.append(f"{row.name} needs the least energy: {row.joules:.3g} J a sample.")
    return sentences


def most_memory(row: Row) -> float | None:
    """Return the largest memory of a rank on any host, in MiB; None if unknown."""
    values = [float(part.rsplit(" ", 1)[1]) for part in row.memory_mib.split(", ") if part]
    return max(values, default=None)


Facts = list[tuple[str, str, str]]
_DPI, _DPI_WIDE = 150, 110
_TROUBLES = (MotleyError, OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Picture:
    """A PNG that is embedded in the page.

    Attributes:
        data: the PNG in base64.
        alt: description of the picture.
        is_wide: True if the picture needs the whole width of the page.
    """

    data: str
    alt: str
    is_wide: bool = False


@dataclass(frozen=True)
class WorstSample:
    """A held-out sample with a large loss.

    Attributes:
        name: name of the sample, such as the name of its file.
        label: label of the sample; empty if unknown.
        predicted: predicted label; empty if unknown.
        is_right: True if the prediction is the label.
        loss: loss of the sample.
        picture: image of the sample as a ``data:`` URL; empty if the sample has no image.
    """

    name: str
    label: str
    predicted: str
    is_right: bool
    loss: str
    picture: str


def list_worst(run: RunFolder) -> list[WorstSample]:
    """Return the held-out samples with the largest loss in a run's last evaluation."""

    def text(value: object, chance: object) -> str:
        words = f"{value:.4g}" if isinstance(value, float) else plain(value)
        return f"{words} ({chance:.0%})" if isinstance(chance, int | float) else words

    samples = read_worst(run)
    if not any("label" in each or "picture" in each for each in samples):
        return []  # a loss alone says little, as that of a long text
    return [
        WorstSample(
            "/".join(plain(each.get("name")).split("/")[-2:]),
            text(each.get("label"), each.get("label_probability")),
            text(each.get("predicted"), each.get("probability")),
            isinstance(each.get("label"), str | int) and each["label"] == each.get("predicted"),
            text(each.get("loss"), None),
            f"data:{each['picture_type']};base64,{each['picture']}" if "picture" in each else "",
        )
        for each in samples
    ]


@dataclass(frozen=True)
class Details:
    """The content of a page's section on one run, which a reader can unfold.

    Attributes:
        name: name of the run, to which the table links.
        title: line that summarises the run.
        verdict: sentences on the speed of the run.
        pictures: pictures of the run.
        profiled: lines that summarise traces of the run.
        classes: the classes with the lowest held-out accuracy.
        worst: held-out samples with the largest loss.
    """

    name: str
    title: str
    verdict: list[str]
    pictures: list[Picture]
    profiled: list[str]
    classes: list[ClassResult]
    worst: list[WorstSample]


@dataclass(frozen=True)
class Section:
    """The content of a page's section on one matrix, or on all runs outside of a matrix.

    Attributes:
        name: heading of the section.
        verdict: sentences on the results.
        facts: sentences on the workload and the machines.
        head: titles of the table's columns.
        rows: rows of the table.
        status: index of the column that states how a run ended.
        failed: name, place and error of each failed run.
        pictures: pictures of all runs together.
        runs: details of each run.
        compared: name and facts of each run. On the page, a reader chooses two runs to compare.
            Empty for a single run. A fact is a section, a name and a value.
    """

    name: str
    verdict: list[str]
    facts: list[str]
    head: list[str]
    rows: list[list[str]]
    status: int
    failed: list[tuple[str, str, str]]
    pictures: list[Picture]
    runs: list[Details]
    compared: list[tuple[str, Facts]]


def compare(names: Sequence[str], runs: Sequence[RunFolder]) -> list[tuple[str, Facts]]:
    """Return the name and the facts of each run, for the comparison of two runs on the page.

    A run with a damaged run.json is left out. The result is empty if fewer than two runs remain.
    """
    result = []
    for name, run in zip(names, runs, strict=True):
        with contextlib.suppress(MotleyError):
            known = describe_run(run).items()
            facts = [(part, each, format_value(value)) for part, own in known
                     for each, value in own.items()]  # fmt: skip
            result.append((name, facts))
    return result if len(result) > 1 else []


def picture(alt: str, draw: "Callable[[], Figure]", is_wide: bool = False) -> list[Picture]:
    """Return a list with one picture. If the picture cannot be drawn, warn and return no picture.

    Args:
        alt: description of the picture.
        draw: function that draws the picture.
        is_wide: True if the picture needs the whole width of the page.
    """
    try:
        return [_embedded(alt, draw(), is_wide)]
    except _TROUBLES as error:
        command.warn(f"{alt}: {error}")
        return []


def panels(alt: str, figures: "Callable[[], Iterable[tuple[str, Figure]]]") -> list[Picture]:
    """Return pictures of one panel each. Print a warning for each picture that cannot be drawn.

    Args:
        alt: name of the run; empty: the pictures are of all runs.
        figures: function that yields each figure with a description.
    """
    result = []
    try:
        for words, figure in figures():
            result.append(_embedded(f"{alt}: {words}" if alt else words, figure))
    except _TROUBLES as error:
        command.warn(f"{alt or 'runs'}: {error}")
    return result


def _embedded(alt: str, figure: "Figure", is_wide: bool = False) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI_WIDE if is_wide else _DPI)
    return Picture(base64.b64encode(buffer.getvalue()).decode(), alt, is_wide)


def details(
    run: RunFolder,
    name: str,
    training: Training | None,
    colours: dict[str, str],
    co2: float,
    summary: str = "",
) -> Details:
    """Return the page's section on one run.

    Args:
        run: folder of the run.
        name: name of the run.
        training: records of the run; None: no step was recorded.
        colours: colour of each host.
        co2: grams of CO2 per kWh.
        summary: line that summarises the run; empty: make the line from the records.
    """
    pictures: list[Picture] = []
    sentences: list[str] = []
    if training is None:
        summary = summary or f"{name}: no training step"
    else:
        summary = summary or title(training)
        sentences = run_verdict(training, co2).sentences()
        for words, draw_panel in run_panels(training, colours):
            pictures += picture(f"{run.path.name}: {words}", draw_panel)
        pictures += picture(
            f"{run.path.name}: what each rank did around the step that took longest",
            lambda: draw_timeline(training, width=style.PANEL_WIDTH),
        )
    if logs := find_gpu_logs([run.path]):
        pictures += panels(
            run.path.name,
            lambda: machine_panels(run.path.name, to_series(read_folder(logs), colours)),
        )
    profiled: list[str] = []
    for path in run.traces():
        try:
            profiled += describe_trace(summarise(read_trace(path)))
        except MotleyError as error:
            command.warn(error)
    classes = [
        replace(each, name=plain(each.name), mistaken_for=plain(each.mistaken_for))
        for each in read_classes(run)[:_CLASSES]
    ]
    return Details(name, summary, sentences, pictures, profiled, classes, list_worst(run))


def make_matrix_section(folder: BaselineFolder, colours: dict[str, str], co2: float) -> Section:
    """Return the page's section on one matrix of runs."""
    rows = read_rows(folder)
    firsts = {cell.name: folder.attempt(cell, 0) for cell in folder.matrix_cells()}
    runs = {name: run for name, run in firsts.items() if run.read_run()}
    name = folder.path.resolve().name
    return Section(
        name, verdict(rows),
        [line.removeprefix("- ") for line in folder.configuration().splitlines() if line],
        HEAD, [shown(row) for row in rows], len(HEAD) - 1,
        [(row.name, ", ".join(filter(None, (row.outcome, row.when))), row.error)
         for row in rows if row.outcome != DONE],
        picture(f"ways to train, {name}", lambda: draw_matrix(folder), is_wide=True),
        [details(run, cell, read_or_say(run), colours, co2, f"{cell}: {_rate(rows, cell)}")
         for cell, run in runs.items()],
        compare(list(runs), list(runs.values())),
    )  # fmt: skip


def _rate(rows: list[Row], name: str) -> str:
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        return "not ended"
    return row.rate or row.outcome


def rates(training: Training) -> tuple[str, str, str]:
    """Return the median rate of the steps, the mean rate over wall time, and the main metric.

    All three results are texts.
    """
    middle, mean = (
        "" if np.isnan(rate) else f"{format_rate(rate)} {training.unit}/s"
        for rate in (median(training.rates()), training.mean_rate())
    )
    return middle, mean, training.headline


def started(run: RunFolder) -> float:
    """Return the time at which a run was started, in seconds since 1970.

    If run.json is damaged, return the modification time of the file.
    """
    with contextlib.suppress(MotleyError):
        at = run.read_run().get("started")
        if isinstance(at, int | float):
            return float(at)
    return run.run_file.stat().st_mtime


def distinct_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of the runs' folders. Add the parent folder if two names are equal."""
    paths = [run.path.resolve() for run in runs]
    count = Counter(path.name for path in paths)
    return [path.name if count[path.name] == 1 else "/".join(path.parts[-2:]) for path in paths]


def describe_ranks(run: RunFolder, about: JsonDict) -> str:
    """Return the numbers of ranks that train and that were lost, such as ``2 (1 lost)``."""
    ranks, began = len(about.get("ranks") or []), about.get("started") or 0
    lost = [event for event in run.read_events() if event.get("event") == "lost"]
    count = sum(event["time"] > began for event in lost if about.get("grouped"))
    return f"{ranks} ({count} lost)" if count else str(ranks)


def make_runs_section(runs: list[RunFolder], colours: dict[str, str], co2: float) -> Section:
    """Return the section of the runs outside of a matrix, the newest first."""
    head = ["run", "status", "started", "result", "median rate", "mean rate", "ranks", "batch",
            "wire", "task"]  # fmt: skip
    rows, failed = [], []
    runs = sorted(runs, key=started, reverse=True)
    names = distinct_names(runs)
    trainings = [read_or_say(run) for run in runs]
    for run, name, training in zip(runs, names, trainings, strict=True):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(started(run)))
        try:
            about = run.read_run()
        except MotleyError as error:
            command.warn(error)
            rows.append([name, "run.json is damaged", when, *[""] * (len(head) - 3)])
            failed.append((name, "its records cannot be read", str(error)))
            continue
        config, result = about.get("config") or {}, about.get("result") or {}
        failure = about.get("failure") or {}
        middle, mean, headline = rates(training) if training else ("", "", "")
        best = result.get(headline)
        rows.append([
            name, str(about.get("status", "")), when,
            "" if best is None else style.metric(headline, best), middle, mean,
            describe_ranks(run, about), str(config.get("batch_size") or ""),
            str((about.get("plan") or {}).get("wire") or ""),
            str((about.get("task") or {}).get("title", "")),
        ])  # fmt: skip
        if failure and about.get("status") != "stopped":
            where = f"rank {failure.get('rank')} on {failure.get('host')}"
            if failure.get("step") is not None:
                where += f", {format_step(failure['step'])}"
            failed.append((name, where, str(failure.get("error") or "")))
    finished = sum(row[1] == "finished" for row in rows)
    each = [details(*pair, colours, co2) for pair in zip(runs, names, trainings, strict=True)]
    sentences = [f"{finished} of {len(rows)} runs finished."]
    heading = "runs"
    pictures: list[Picture] = []
    if len(each) == 1:  # the page is about this run
        heading, sentences = runs[0].path.resolve().name, each[0].verdict or sentences
        each = [replace(each[0], verdict=[])]
    else:
        if each[0].verdict:
            sentences.append(f"The newest is {names[0]}. {' '.join(each[0].verdict[:2])}")
        pictures = panels("", lambda: runs_panels(read_losses(filter(None, trainings))))
    compared = compare(names, runs)
    return Section(heading, sentences, [], head, rows, 1, failed, pictures, each, compared)


def draw(paths: list[Path], out: Path | None, co2: float) -> int:
    """Write the page on all runs under the paths, and return the exit code."""
    colours = style.colours_under(paths)
    matrices = [file.parent for path in paths for file in sorted(path.rglob("matrix.json"))]
    alone = [run for run in find_runs(paths)
             if not any(folder in run.path.parents for folder in matrices)]  # fmt: skip
    sections = []
    for folder in matrices:
        try:
            sections.append(make_matrix_section(BaselineFolder(folder), colours, co2))
        except MotleyError as error:
            command.warn(error)
    if alone:
        sections.append(make_runs_section(alone, colours, co2))
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


def main() -> int:
    """Write the report that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw, add_co2)

"""Draw the results of baseline_measure.py: speed and its limit, scaling, and loss over time.

    python plots/plot_baselines.py baselines/strategies              # beside its results.csv
    python plots/plot_baselines.py baselines/ --out pictures
    python plots/plot_baselines.py old_logs/                         # 5_GPUs/p1_b16_e10/metrics.csv

The exit code is 0, or 2 if there is nothing to draw.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.errors import MotleyError
from motley.plotting import command, style
from motley.plotting.plot_runs import SAMPLES, TIME, Curve, draw_curves, losses
from motley.plotting.style import PARTS, Part
from motley.records.costs import read_training
from motley.records.gpu_csv import GpuSample, read_gpu_log
from motley.sweep.results import DONE, BaselineFolder
from motley.sweep.table import Row, read_rows
from motley.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GPUS = re.compile(r"(\d+)[_ -]?GPUs?", re.IGNORECASE)


@dataclass(frozen=True)
class OldRun:
    """One run in the lab's old log format.

    Attributes:
        gpus: number of GPUs, from the name of a folder above the run.
        configuration: name of the run's folder, such as ``p1_b16_e10``.
        epoch_s: median seconds of an epoch.
    """

    gpus: int
    configuration: str
    epoch_s: float


def old_runs(paths: list[Path]) -> list[OldRun]:
    """Return the runs with a ``metrics.csv`` below a folder named like ``5_GPUs``.

    A file that cannot be read, or has no complete epoch, is reported and left out.
    """
    result = []
    for log in sorted(file for path in paths for file in path.rglob("metrics.csv")):
        gpus = next((int(m[1]) for part in log.parts[::-1] if (m := _GPUS.fullmatch(part))), None)
        if gpus is None:
            continue
        try:
            seconds = epoch_seconds(read_gpu_log(log))
        except (MotleyError, OSError, ValueError) as error:
            command.warn(f"{error}; left out")
            continue
        if not seconds:
            command.warn(f"{log} holds fewer than two epochs, so the time of one epoch is unknown")
            continue
        result.append(OldRun(gpus, log.parent.name, seconds))
    return result


def epoch_seconds(samples: list[GpuSample]) -> float | None:
    """Return the median seconds of an epoch in an old log, or None for fewer than two epochs.

    The old logs have a row at the end of each epoch.
    """
    ends: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.epoch is not None:
            ends[sample.epoch].append(sample.time)
    last = [max(times) for _, times in sorted(ends.items())]
    return float(np.median(np.diff(last))) if len(last) > 1 else None


RATE, LIMIT = PARTS["t_compute"].colour, "#333333"
# The losses of a step against the limit, as in the pictures of single runs.
LOST = {
    **{f"{part}_s": PARTS[f"t_{part}"] for part in ("wait", "comm", "data")},
    "rest": Part("slower or idle compute, and optimizer", "#BBCC99", "xxx"),
    "both": Part("compute and communication, not separable", "#CC99BB", "+++"),
}


def lost(row: Row) -> dict[str, float]:
    """Return the difference between a row's limit and its rate, in samples/s, by cause."""
    limit = row.limit
    if not row.samples_per_s or limit is None or limit <= row.samples_per_s:
        return {}
    missing = limit - row.samples_per_s
    step_s = row.batch / row.samples_per_s
    gap_s = step_s - row.batch / limit
    parts = {name: getattr(row, name) or 0.0 for name in ("wait_s", "comm_s", "data_s")}
    cause = "both" if row.comm_s is None else "rest"
    parts[cause] = max(0.0, gap_s - sum(parts.values()))
    whole = sum(parts.values())
    return {name: missing * part / whole for name, part in parts.items()}


def draw_rates(ax: "Axes", rows: Sequence[Row]) -> None:
    """Draw one bar per cell: the median rate, the lost rate by cause, marks at mean and limit."""
    shown: dict[str, str] = {}
    ends = [row.weight * (row.limit or row.samples_per_s or 0.0) for row in rows]
    most = max(ends, default=0.0) or 1.0
    for place, row in enumerate(rows):
        if row.samples_per_s is None:
            ax.text(0.01 * most, place, f"{row.outcome}{f', {row.when}' if row.when else ''}",
                    va="center", color="#AA3311")  # fmt: skip
            continue
        end = row.weight * row.samples_per_s
        half = (row.spread or 0.0) * end / 2
        label = f"{row.unit}/s, as measured"
        ax.barh(place, end, height=0.66, color=RATE, xerr=half or None,
                label="" if label in shown else label,
                error_kw={"ecolor": "0.4", "elinewidth": 1, "capsize": 2})  # fmt: skip
        shown[label] = RATE
        words = row.rate
        if row.fraction_of_limit:
            words += f", {row.fraction_of_limit:.0%} of the limit"
        if row.outcome != DONE:
            words += f"; a repeat: {row.outcome}"
        for name, part in lost(row).items():
            look = LOST[name]
            part *= row.weight
            ax.barh(place, part, left=end, height=0.66,
                    label="" if look.label in shown else look.label, **look.fill)  # fmt: skip
            shown[look.label] = look.colour
            end += part
        end = max(end, draw_marks(ax, row, place, shown))
        ax.annotate(words, (end, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(rows)), [make_title(row) for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_ylim(len(rows) - 0.4, -0.6)  # with the cells that have no bar
    ax.set_xlim(0, 1.38 * most)
    style.label_axes(ax, f"{rows[0].unit}/s" if rows else "", "")
    if shown:
        style.legend_above(ax)


def draw_marks(ax: "Axes", row: Row, place: int, shown: dict[str, str]) -> float:
    """Draw marks at a bar's mean and limit, and return the position of the last mark.

    Args:
        ax: the axes.
        row: row of the table.
        place: position of the bar.
        shown: labels that the legend has already. New labels are added to it.
    """
    end = 0.0
    for label, rate, look in (
        ("mean by the clock", row.mean_samples_per_s, ":"),
        ("limit: the sum of the hosts", row.limit, "-"),
    ):
        if rate is not None:
            at = row.weight * rate
            ax.plot([at] * 2, [place - 0.38, place + 0.38], color=LIMIT, linestyle=look,
                    linewidth=1.6, label="" if label in shown else label)  # fmt: skip
            shown[label], end = LIMIT, max(end, at)
    return end


def make_title(row: Row) -> str:
    """Return the cell's name, precision, hosts and batch."""
    hosts = "1 host" if row.machines == 1 else f"{row.machines} hosts"
    return f"{row.name}\n{row.precision}, {hosts}, batch {row.batch}"


def group_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the series of rows for a picture of scaling, by their common settings.

    The rows of a series differ only in the number of hosts. In weak scaling, the batch grows with
    the number of hosts. A series has two or more rows.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.samples_per_s:
            groups[row.strategy, row.precision, row.checkpointing, row.options].append(row)
    result = {}
    for key, group in groups.items():
        each = {row.machines: row for row in sorted(group, key=lambda row: row.batch)}
        if len(each) > 1:
            name = ", ".join(str(word) for word in key if word)
            result[name] = [each[count] for count in sorted(each)]
    return result


def draw_scaling(ax: "Axes", series: dict[str, list[Row]]) -> None:
    """Draw samples/s against the number of hosts, with the limit: the rate if no rank ever waits.

    Since hosts differ in speed, the limit is not proportional to the number of hosts.
    """
    limits = {
        name: {row.machines: row.limit for row in rows if row.limit is not None}
        for name, rows in series.items()
    }  # fmt: skip
    first = next(iter(limits.values()), {})
    alike = all(
        each.keys() == first.keys() and np.allclose([*each.values()], [*first.values()], rtol=0.02)
        for each in limits.values()
    )
    if alike and first:
        ax.plot([*first], [*first.values()], linestyle="--", color=LIMIT,
                label="the sum of the hosts")  # fmt: skip
    for number, (name, rows) in enumerate(series.items()):
        hosts = [row.machines for row in rows]
        rates = [row.weight * (row.samples_per_s or np.nan) for row in rows]
        spread = [(row.spread or 0) * rate / 2 for rate, row in zip(rates, rows, strict=True)]
        colour = style.HOST_COLOURS[number % len(style.HOST_COLOURS)]
        ax.errorbar(hosts, rates, yerr=spread, marker="o", capsize=2, color=colour, label=name)
        if not alike:
            ax.plot([*limits[name]], [*limits[name].values()], linestyle="--", color=colour,
                    label=f"{name}: the sum of its hosts")  # fmt: skip
        for host, rate, row in zip(hosts, rates, rows, strict=True):
            if row.fraction_of_limit:
                ax.annotate(f"{row.fraction_of_limit:.2f}", (host, rate), (0, -12), ha="center",
                            textcoords="offset points", fontsize=8)  # fmt: skip
    weak = any(len({row.batch for row in rows}) > 1 for rows in series.values())
    ax.set_xticks(sorted({row.machines for rows in series.values() for row in rows}))
    batch = "as many samples for each" if weak else "the same batch"
    unit = next(iter(series.values()))[0].unit
    style.label_axes(ax, f"hosts, {batch}", f"{unit}/s", zero=True)
    style.legend_above(ax)


def losses_of_cells(folder: BaselineFolder) -> dict[str, Curve]:
    """Return a curve of losses for each cell, by the cell's name.

    The curve is that of the cell's first finished run with recorded losses.
    """
    result = {}
    for cell in folder.matrix_cells():
        done = [run for run, outcome in folder.repeats(cell) if outcome.kind == DONE]
        curve = losses(read_training(done[0])).loss if done else None
        if curve and len(curve.values):
            result[cell.name] = curve
    return result


def draw_folder(folder: BaselineFolder) -> "Figure":
    """Draw the picture of the results of one matrix of runs."""
    rows = read_rows(folder)
    if not rows:
        raise MotleyError(f"{folder.path} is left out: none of its runs has ended")
    series = group_series(rows)
    heights = [1.2 + 0.46 * len(rows), *([3.4] if series else []), 3.2]
    figure = style.new_figure(11, sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    parts[0].suptitle(story(folder.path.resolve().name, rows))
    draw_rates(parts[0].subplots(), rows)
    if series:
        draw_scaling(parts[1].subplots(), series)
    curves, axes = losses_of_cells(folder), parts[-1].subplots(1, 2, sharey=True)
    for ax, against in zip(axes, (SAMPLES, TIME), strict=True):
        draw_curves(ax, curves, against)
    axes[1].set_ylabel("")
    if curves:
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def story(name: str, rows: Sequence[Row]) -> str:
    """Return a title with the result of a matrix: the fastest way to train."""
    ways = f"{plural(len(rows), 'way')} to train"
    done = [row for row in rows if row.samples_per_s and row.outcome == DONE]
    best = max(done, key=lambda row: row.samples_per_s or 0.0, default=None)
    if best is None:
        return f"{name}: {ways}, none of which has finished"
    part = f", {best.fraction_of_limit:.0%} of the limit" if best.fraction_of_limit else ""
    return f"{best.name} is the fastest of {ways} ({name}): {best.rate}{part}"


def draw_old(runs: Sequence[OldRun]) -> "Figure":
    """Draw strong scaling from the lab's old logs: the time of an epoch by the number of GPUs."""
    figure = style.new_figure(8, 4.4)
    ax = figure.subplots()
    groups: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[run.configuration][run.gpus].append(run.epoch_s)
    for number, (name, by_gpus) in enumerate(sorted(groups.items())):
        counts = sorted(by_gpus)
        seconds = [float(np.median(by_gpus[count])) for count in counts]
        colour = style.HOST_COLOURS[number % len(style.HOST_COLOURS)]
        ax.plot(counts, seconds, marker="o", color=colour, label=name)
        ideal = [seconds[0] * counts[0] / count for count in counts]
        ax.plot(counts, ideal, linestyle="--", color=colour,
                label="" if number else "as many times faster, if all were equal")  # fmt: skip
        for count, second in zip(counts, seconds, strict=True):
            ax.annotate(f"{seconds[0] / second:.2f} x", (count, second), (0, 6), ha="center",
                        textcoords="offset points", fontsize=8)  # fmt: skip
    ax.set_xticks(sorted({run.gpus for run in runs}))
    ax.margins(x=0.05, y=0.12)
    words = "GPUs; above each point: times as fast as with the fewest"
    style.label_axes(ax, words, "an epoch (s)", zero=True)
    style.legend_above(ax)
    return figure


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw one picture per matrix and one picture of all old logs, and return the exit code."""
    folders = {file.parent: BaselineFolder(file.parent)
               for path in paths for file in sorted(path.rglob("matrix.json"))}  # fmt: skip
    old = old_runs(paths)
    if not folders and not old:
        raise MotleyError(
            f"no matrix.json and no 5_GPUs/.../metrics.csv under {', '.join(map(str, paths))}: "
            "measure first, for example: python torch_dist/baseline_measure.py --matrix precision"
        )
    code = 2
    if folders:
        code = command.draw_all(
            folders, lambda path: draw_folder(folders[path]), "baselines.png", out
        )
    if old:
        path = (out or paths[0]) / "strong_scaling.png"
        command.save(draw_old(old), path)
        print(path)
        code = 0
    return code


def main() -> int:
    """Draw the pictures that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw)

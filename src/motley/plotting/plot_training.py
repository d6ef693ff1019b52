"""Draw a training: loss, accuracy, images/s, memory, learning rate, and the time of a step's parts.

The picture also shows the loss scale, if the run has used one.

    python plots/plot_training.py logs/                   # logs/<run>/training.png, every run
    python plots/plot_training.py logs/ --out pictures    # all PNGs in one folder

The exit code is 0, or 2 if there is nothing to draw.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.live.verdict import run_verdict
from motley.plotting import command, style
from motley.plotting.run_steps import list_others, seat_label, title, usual_steps
from motley.records.costs import Training, column, leak, mean, median, read_training
from motley.records.run_folder import find_runs
from motley.text import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE, HEADLINE, OVERFLOW = "#0072B2", "#009E73", "#D55E00"


def draw_curve(
    ax: "Axes", x: style.Array, y: style.Array, label: str, weights: style.Array | None = None
) -> None:
    """Draw raw values in a pale colour, and their weighted moving mean in a strong colour.

    If there are few values, no mean is drawn. Unknown values are left out.
    """
    known = np.isfinite(y)
    x, y, weights = x[known], y[known], np.ones(known.sum()) if weights is None else weights[known]
    window = len(y) // 40 | 1
    if window == 1:
        ax.plot(x, y, color=LINE, marker=".", label=label)
        return
    ax.plot(x, y, color=LINE, alpha=0.3, linewidth=0.7, label=label)
    middle = style.smooth(y * weights, window) / style.smooth(weights, window)
    ax.plot(x, middle, color=LINE, label=f"mean of {window} steps")


def mark_overflows(ax: "Axes", training: Training, y: style.Array) -> None:
    """Draw a cross at every step that was skipped because its gradient was not finite."""
    skipped = np.array([bool(record.get("overflow")) for record in training.lead])
    if skipped.any():
        label = f"overflow: step skipped ({skipped.sum()})"
        ax.plot(training.taken()[skipped], y[skipped], "x", color=OVERFLOW, label=label)


def draw_loss(ax: "Axes", training: Training) -> None:
    """Draw loss against steps, and the metric of evaluations on a second y axis."""
    step, loss = training.taken(), training.values("loss")
    draw_curve(ax, step, loss, "loss")
    known = np.isfinite(loss)
    if known.any():
        mark_overflows(ax, training, np.interp(step, step[known], loss[known]))
    style.label_axes(ax, "step", "loss", zero=True)
    if name := training.headline:
        look: dict[str, Any] = {"color": HEADLINE, "marker": "o", "markersize": 3}
        label, factor = style.metric_label(name)
        twin = ax.twinx()
        values = factor * column(training.epochs, name)
        twin.plot(column(training.epochs, "step"), values, **look)
        twin.spines["right"].set_visible(True)
        twin.grid(False)
        twin.set_ylim(0, 104 if factor == 100 else 1.1 * np.nanmax(values))
        twin.set_ylabel(label)
        ax.plot([], [], label=f"{label.partition(' (')[0]} (right)", **look)
    style.legend_above(ax)


def draw_time(ax: "Axes", training: Training) -> None:
    """Draw loss against the time of training."""
    first_s = sum(training.lead[0].get(part) or 0.0 for part in style.PARTS)
    seconds = training.running_s() + first_s
    unit, per_unit = style.time_unit(seconds[-1])
    draw_curve(ax, seconds / per_unit, training.values("loss"), "loss")
    without = ", pauses left out" if training.starts else ""
    style.label_axes(ax, f"time since the first step began{without} ({unit})", "loss", zero=True)
    style.legend_above(ax)


def draw_rate(ax: "Axes", training: Training) -> None:
    """Draw the rate of all ranks together, in the task's unit (images, tokens) per second.

    The drawn mean includes the time of evaluations, checkpoints, stalls and an epoch's smaller last
    batch.
    """
    rate, unit = training.rates(), f"{training.unit}/s"
    label = f"{unit}, without an epoch's smaller last batch" if np.isnan(rate).any() else unit
    seconds = training.values("n_global") / training.values("samples_per_s")
    draw_curve(ax, training.taken(), rate, label, weights=seconds)
    by_clock = "mean, evaluations and saves included"
    for name, value, line in (
        ("median", median(rate), ":"),
        (by_clock, training.mean_rate(), "--"),
    ):
        if np.isfinite(value):
            ax.axhline(value, color="0.3", linestyle=line, label=f"{name}: {format_rate(value)}")
    style.label_axes(ax, "step", f"{unit}, all ranks", zero=True)
    style.legend_above(ax)


def draw_scale(ax: "Axes", training: Training) -> None:
    """Draw the loss scale, and mark the steps at which the scale was too large."""
    scale = training.values("loss_scale")
    ax.plot(training.taken(), scale, color=LINE, drawstyle="steps-post", label="loss scale")
    mark_overflows(ax, training, scale)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"2^{np.log2(value):.0f}" if value > 0 else "")
    ax.set_ylim(np.nanmin(scale) / 2, np.nanmax(scale) * 2)
    style.label_axes(ax, "step", "loss scale")
    style.legend_above(ax)


def draw_learning_rate(ax: "Axes", training: Training) -> None:
    """Draw the learning rate against steps."""
    ax.plot(training.taken(), training.values("lr"), color=LINE, label="learning rate")
    style.label_axes(ax, "step", "learning rate", zero=True)
    style.legend_above(ax)


def draw_memory(ax: "Axes", training: Training, colours: dict[str, str]) -> None:
    """Draw the peak memory of each rank in the colour of its host.

    A note names ranks whose memory grows until the end.
    """
    for rank, records in training.steps.items():
        color = colours.get(training.worker(rank).get("host", ""), LINE)
        gib = column(records, "mem_peak_mib") / 1024
        ax.plot(column(records, "step") + 1, gib, color=color, linewidth=1)
    style.label_axes(ax, "step", "most that a rank has held (GiB)", zero=True)
    growth = leak(training.steps)
    text = f"grows by {growth:.3g} MiB a step, to the end" if growth else "does not keep growing"
    ax.set_title(f"memory {text}; colours of the hosts as above", fontsize=8, loc="left")


def draw_split(ax: "Axes", usual: Training, chosen: str, colours: dict[str, str]) -> None:
    """Draw one bar per rank: the parts of a usual step, in ms.

    In a run with many ranks, the bars show the first rank and three other ranks.

    Args:
        ax: the axes.
        usual: records of usual steps; see :func:`run_steps.usual_steps`.
        chosen: phrase that describes these steps.
        colours: colour of each host.
    """
    ranks, more = sorted(usual.steps), list_others(usual)
    ends, unknown = np.zeros(len(ranks) + len(more)), set()
    for part, look in style.PARTS.items():
        of_others = {"t_compute": "ready_s", "t_wait": "wait_s"}.get(part, "")
        ms = 1000 * np.array(
            [mean(column(usual.steps[rank], part)) for rank in ranks]
            + [getattr(each, of_others, np.nan) for each in more]
        )
        if np.isnan(ms[: len(ranks)]).all():
            unknown.add(part)
            continue
        ms = np.nan_to_num(ms)
        ax.barh(range(len(ms)), ms, left=ends, label=look.label, height=0.7, **look.fill)
        ends += ms
    note: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    for row, end in enumerate(ends):
        ax.annotate(f"{end:,.0f}" if end >= 100 else f"{end:.3g}", (end, row), (3, 0), **note)
    for row, rank in enumerate(ranks):
        if host := usual.worker(rank).get("host"):
            ax.annotate("■", (0, row), (-9, 0), color=colours[host], ha="center", **note)
    labels = [seat_label(usual, rank) for rank in ranks] + [each.label for each in more]
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0, pad=15)
    ax.margins(y=0.02)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    lost = "; communication not separable from compute" if {"t_wait", "t_comm"} & unknown else ""
    lost += "; for the others, data is part of compute, and the rest is unknown" if more else ""
    style.label_axes(ax, f"one step (ms), mean of {chosen}{lost}", "")
    style.legend_above(ax)


def is_scaled(training: Training) -> bool:
    """Return True if the loss scale differs from 1 in any step."""
    return bool((np.nan_to_num(training.values("loss_scale"), nan=1.0) != 1).any())


def draw_run(training: Training, colours: dict[str, str]) -> "Figure":
    """Return the picture of one run. A loss scale that is always 1 has no panel."""
    scaled = is_scaled(training)
    rows = [["loss", "time"], ["rate", "memory"], ["lr", "scale" if scaled else "lr"]]
    usual, chosen = usual_steps(training)
    curves, bars = 3.3 * len(rows), 1.0 + 0.42 * (len(usual.steps) + len(list_others(usual)))
    figure = style.new_figure(11, curves + bars)
    figure.suptitle(f"{story(training)}\n{title(training)}")
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=[bars, curves])[:, 0]
    draw_split(parts[0].subplots(), usual, chosen, colours)
    axes = parts[1].subplot_mosaic(rows)
    draw_loss(axes["loss"], training)
    draw_time(axes["time"], training)
    draw_rate(axes["rate"], training)
    draw_memory(axes["memory"], training, colours)
    draw_learning_rate(axes["lr"], training)
    if scaled:
        draw_scale(axes["scale"], training)
    return figure


def story(training: Training) -> str:
    """Return a title with the result of a run: its rate, and the rate as a fraction of the limit.

    Only steps of the last launch count, because the limit was measured for this launch.
    """
    launch = training.last_launch() or training
    rate, unit = median(launch.rates()), training.unit
    words = f"{format_rate(rate)} {unit}/s" if np.isfinite(rate) else "no rate is recorded"
    part = run_verdict(training, co2_per_kwh=None).fraction
    if part is not None:
        words += f", {part:.0%} of the sum of all devices"
    first = launch.lead[0]["step"]
    return f"{words}, since step {first + 1}" if first > training.lead[0]["step"] else words


def run_panels(
    training: Training, colours: dict[str, str]
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield a description of each panel, and a function that draws the panel."""
    usual, chosen = usual_steps(training)
    bars = 1.4 + 0.42 * (len(usual.steps) + len(list_others(usual)))
    panels: dict[str, tuple[float, Callable[[Axes], object]]] = {
        "where the time of each rank goes": (
            bars, lambda ax: draw_split(ax, usual, chosen, colours)
        ),
        "loss against steps": (3.2, lambda ax: draw_loss(ax, training)),
        "loss against time": (3.2, lambda ax: draw_time(ax, training)),
        f"{training.unit} per second": (3.2, lambda ax: draw_rate(ax, training)),
        "memory of each rank": (3.2, lambda ax: draw_memory(ax, training, colours)),
        "learning rate": (3.2, lambda ax: draw_learning_rate(ax, training)),
        "loss scale": (3.2, lambda ax: draw_scale(ax, training)),
    }  # fmt: skip
    if not is_scaled(training):
        del panels["loss scale"]
    for words, (height, fill) in panels.items():
        yield words, partial(_panel, height, fill)


def _panel(height: float, fill: "Callable[[Axes], object]") -> "Figure":
    figure, ax = style.panel(height)
    fill(ax)
    return figure


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw the picture of every run under the paths, and return the exit code."""
    runs = {folder.path: folder for folder in find_runs(paths)}
    if not runs:
        raise command.nothing("run", paths)
    colours = style.colours_under(paths)
    return command.draw_all(
        runs, lambda path: draw_run(read_training(runs[path]), colours), "training.png", out
    )


def main() -> int:
    """Draw the pictures that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw)

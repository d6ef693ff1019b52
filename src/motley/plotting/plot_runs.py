"""Draw several runs together: loss and held-out metric against samples, time and energy.

    python plots/plot_runs.py logs/                       # logs/runs.png; a row for each task
    python plots/plot_runs.py logs/a logs/b --out pictures

The energy is that of the GPUs that trained, if the records contain their power. The exit code is 0,
or 2 if there is nothing to draw.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.plotting import command, style
from motley.plotting.run_steps import read_or_say
from motley.records.costs import Training, column, joules
from motley.records.run_folder import RunFolder, find_runs
from motley.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSS = "loss"
SAMPLES, TIME, ENERGY = "samples", "time", "energy"  # what curves are drawn against
_DASHES = ("-", "--", ":", "-.")
_WATT_HOUR = 3600.0  # joules
_FEW = 40  # most evaluations that are marked one by one


@dataclass(frozen=True)
class Curve:
    """A curve of values over the samples, the time and the energy of a training.

    Attributes:
        label: label of the values' axis.
        samples: for each value, the number of samples that the run had used.
        seconds: for each value, the seconds that the run had trained.
        values: the values.
        joules: energy of all GPUs per sample, in joules; None: unknown.
    """

    label: str
    samples: style.Array
    seconds: style.Array
    values: style.Array
    joules: float | None = None

    @property
    def is_marked(self) -> bool:
        """True if the curve has so few points that each point is marked."""
        return len(self.values) == 1 or (self.label != _LOSS and len(self.values) <= _FEW)


@dataclass(frozen=True)
class Losses:
    """The curves of one run.

    Attributes:
        task: title of the task. Runs of different tasks are drawn in different axes.
        loss: loss of each step whose record has one.
        held_out: main metric of each evaluation; None without evaluations.
    """

    task: str
    loss: Curve
    held_out: Curve | None


def losses(training: Training) -> Losses:
    """Return the curves of a run. The time of a curve does not include pauses."""
    loss = training.values("loss")
    known = np.isfinite(loss)
    samples, seconds = np.cumsum(training.values("n_global")), training.running_s()
    energy = joules(RunFolder(training.path), training.steps)
    task = str((training.run.get("task") or {}).get("title", ""))
    return Losses(
        task,
        Curve(_LOSS, samples[known], seconds[known], loss[known], energy),
        _held_out(training, samples, seconds, energy),
    )


def _held_out(
    training: Training, samples: style.Array, seconds: style.Array, energy: float | None
) -> Curve | None:
    if not training.epochs:
        return None
    name = training.headline or "loss"
    label, factor = style.metric_label(name)
    values = factor * column(training.epochs, name)
    at = np.searchsorted(training.taken(), column(training.epochs, "step"))
    known = np.isfinite(values) & (at < len(samples))
    if not known.any():
        return None
    at = at[known]
    return Curve(f"held-out {label}", samples[at], seconds[at], values[known], energy)


def looks(count: int) -> Iterator[dict[str, Any]]:
    """Yield the colour and line style of each of ``count`` runs."""
    for number in range(count):
        again, colour = divmod(number, len(style.HOST_COLOURS))
        yield {
            "color": style.HOST_COLOURS[colour],
            "linestyle": _DASHES[(colour + again) % len(_DASHES)],  # for readers who see no colours
        }


def list_axes(curves: Mapping[str, Curve | None]) -> list[str]:
    """Return the quantities of the x axes: samples, time, and energy if it is known for a run."""
    knows_energy = any(curve is not None and curve.joules is not None for curve in curves.values())
    return [SAMPLES, TIME, *([ENERGY] if knows_energy else [])]


def draw_curves(ax: "Axes", curves: Mapping[str, Curve | None], against: str) -> None:
    """Draw one curve per run.

    A run without a curve takes a colour, too. Each run therefore has the same colour in all axes.

    Args:
        ax: axes to draw in.
        curves: curve of each run, by the run's name.
        against: quantity of the x axis, one of :func:`list_axes`.
    """
    known = [curve for curve in curves.values() if curve is not None]
    longest = max((curve.seconds[-1] for curve in known), default=0.0)
    unit, per_unit = style.time_unit(longest)
    for (name, curve), look in zip(curves.items(), looks(len(curves)), strict=True):
        if curve is None or (against == ENERGY and curve.joules is None):
            continue
        x = {
            SAMPLES: curve.samples, TIME: curve.seconds / per_unit,
            ENERGY: curve.samples * (curve.joules or 0.0) / _WATT_HOUR,
        }[against]  # fmt: skip
        values = style.smooth(curve.values, len(curve.values) // 40 | 1)
        ax.plot(x, values, label=name, marker="." if curve.is_marked else None, **look)
    where = {
        SAMPLES: "samples", TIME: f"time in training, pauses left out ({unit})",
        ENERGY: "energy of the GPUs that trained (Wh)",
    }  # fmt: skip
    style.label_axes(ax, where[against], known[0].label if known else "")


def by_task(runs: Mapping[str, Losses]) -> dict[str, dict[str, Losses]]:
    """Return the runs grouped by task: for each task, the curves of its runs by name."""
    tasks: dict[str, dict[str, Losses]] = defaultdict(dict)
    for name, run in runs.items():
        tasks[run.task][name] = run
    return tasks


def list_curves(runs: Mapping[str, Losses]) -> list[dict[str, Curve | None]]:
    """Return the loss curves of all runs, and then the curves of the held-out metric.

    The second entry is left out if no run has a held-out metric.
    """
    held_out = {name: run.held_out for name, run in runs.items()}
    kinds: list[dict[str, Curve | None]] = [{name: run.loss for name, run in runs.items()}]
    return [*kinds, held_out] if any(held_out.values()) else kinds


def draw_runs(runs: Mapping[str, Losses]) -> "Figure":
    """Return the picture of several runs, with one block of axes per task.

    Args:
        runs: curves of each run, by the run's name.
    """
    tasks = by_task(runs)
    kinds = {task: list_curves(each) for task, each in tasks.items()}
    heights = [max(3.2 * len(kinds[task]), 0.8 + 0.17 * len(each)) for task, each in tasks.items()]
    figure = style.new_figure(11, sum(heights))
    blocks = figure.subfigures(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, (task, each) in zip(blocks, tasks.items(), strict=True):
        block.suptitle(f"{task or 'runs'}: {plural(len(each), 'run')}")
        columns = list_axes(kinds[task][0])
        axes = block.subplots(len(kinds[task]), len(columns), sharey="row", squeeze=False)
        for row, curves in zip(axes, kinds[task], strict=True):
            for ax, against in zip(row, columns, strict=True):
                draw_curves(ax, curves, against)
            for ax in row[1:]:
                ax.set_ylabel("")
        if each:
            # All runs have a curve against samples, and maybe none against energy.
            known = axes[0, 0].get_legend_handles_labels()
            axes[0, -1].legend(*known, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def runs_panels(runs: Mapping[str, Losses]) -> "Iterator[tuple[str, Figure]]":
    """Yield a description of each panel, and a figure with only this panel."""
    for task, each in by_task(runs).items():
        for curves in list_curves(each):
            label = next(curve.label for curve in curves.values() if curve is not None)
            for against in list_axes(curves):
                names = 0.17 * max(0, len(each) - 4)  # inches
                figure, ax = style.panel(3.2 + names)
                draw_curves(ax, curves, against)
                style.legend_above(ax)
                yield f"{label} of each run against {against}: {task or 'runs'}", figure


def read_losses(trainings: Iterable[Training]) -> dict[str, Losses]:
    """Return the curves of each run by the name of its folder. Warn of runs without losses."""
    result: dict[str, Losses] = {}
    for training in trainings:
        path, curves = training.path.resolve(), losses(training)
        if len(curves.loss.values):
            result[path.name if path.name not in result else "/".join(path.parts[-2:])] = curves
        else:
            command.warn(f"{training.path} is left out: it records no loss")
    return result


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw one picture of all runs under the paths, and return the exit code."""
    runs = read_losses(filter(None, map(read_or_say, find_runs(paths))))
    if not runs:
        raise command.nothing("run", paths)
    beside = Path(os.path.commonpath([path.resolve() for path in paths]))
    if out is None and RunFolder(beside).run_file.exists():
        beside = beside.parent
    path = (out or beside) / "runs.png"
    command.save(draw_runs(runs), path)
    print(path)
    return 0


def main() -> int:
    """Draw the pictures that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw)

"""Draw several runs together: loss against samples and against time.

    python plots/plot_runs.py logs/                       # logs/runs.png; of each task a row
    python plots/plot_runs.py logs/a logs/b --out pictures

Exit code: 0, or 2 if there is nothing to draw.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import command
import numpy as np
import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from run_steps import read_or_say

from motley.live.training import Training
from motley.records.run_folder import RunFolder, find_runs

_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Losses:
    """Of one run. task: runs of another are drawn elsewhere. samples, seconds, loss: by step."""

    task: str
    samples: style.Array
    seconds: style.Array
    loss: style.Array


def losses(training: Training) -> Losses:
    """Of the steps that tell one; the time is that in which it ran."""
    loss = training.values("loss")
    known = np.isfinite(loss)
    samples = np.cumsum(training.values("n_global"))
    task = str((training.run.get("task") or {}).get("title", ""))
    return Losses(task, samples[known], training.running_s()[known], loss[known])


def draw_losses(axes: Sequence[Axes], runs: Mapping[str, Losses]) -> None:
    """Loss of each run, by name, against samples on the first axes, against time on the second."""
    longest = max((run.seconds[-1] for run in runs.values()), default=0.0)
    unit, per_unit = style.time_unit(longest)
    for number, (name, run) in enumerate(runs.items()):
        again, colour = divmod(number, len(style.HOST_COLOURS))
        look = {
            "color": style.HOST_COLOURS[colour],
            "linestyle": _DASHES[(colour + again) % len(_DASHES)],  # for who sees no colours
        }
        loss = style.smooth(run.loss, len(run.loss) // 40 | 1)
        axes[0].plot(run.samples, loss, **look)
        axes[1].plot(run.seconds / per_unit, loss, label=name, **look)
    style.label_axes(axes[0], "samples", "loss")
    style.label_axes(axes[1], f"time since the end of the first step, pauses left out ({unit})", "")
    if runs:
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_runs(runs: Mapping[str, Losses]) -> Figure:
    """The picture of several runs, by name; of each task a row."""
    tasks: dict[str, dict[str, Losses]] = defaultdict(dict)
    for name, run in runs.items():
        tasks[run.task][name] = run
    heights = [max(3.4, 0.8 + 0.17 * len(each)) for each in tasks.values()]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    rows = figure.subfigures(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, (task, each) in zip(rows, tasks.items(), strict=True):
        row.suptitle(f"{task or 'runs'}: {len(each)} run{'s' if len(each) > 1 else ''}")
        draw_losses(row.subplots(1, 2, sharey=True), each)
    return figure


def losses_of(trainings: Iterable[Training]) -> dict[str, Losses]:
    """Of each run by its folder's name; one that tells no loss is said and left out."""
    found: dict[str, Losses] = {}
    for training in trainings:
        path, told = training.path.resolve(), losses(training)
        if len(told.loss):
            found[path.name if path.name not in found else "/".join(path.parts[-2:])] = told
        else:
            command.warn(f"{training.path} tells no loss; left out")
    return found


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw all runs together; return the exit code."""
    runs = losses_of(filter(None, map(read_or_say, find_runs(paths))))
    if not runs:
        raise command.nothing("run", paths)
    beside = Path(os.path.commonpath([path.resolve() for path in paths]))
    if out is None and RunFolder(beside).run_file.exists():
        beside = beside.parent
    path = (out or beside) / "runs.png"
    command.save(draw_runs(runs), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(command.run_script(__doc__ or "", draw))

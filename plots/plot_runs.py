"""Draw several runs together: loss against samples and against time.

    python plots/plot_runs.py logs/                       # logs/runs.png
    python plots/plot_runs.py logs/a logs/b --out pictures

Exit code: 0, or 2 if there is nothing to draw.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import command
import numpy as np
import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from motley.errors import MotleyError
from motley.live.training import read_training
from motley.records.lines import JsonDict
from motley.records.run_folder import RunFolder, find_runs

_DASHES = ("-", "--", ":", "-.")


def draw_losses(axes: Sequence[Axes], runs: dict[str, Sequence[JsonDict]]) -> None:
    """Loss of each run, by name, against samples on the first axes, against time on the second; a
    run that tells no loss is left out."""
    drawn = {}
    for name, lines in runs.items():
        known = [line["loss"] is not None for line in lines]
        if any(known):
            samples = np.cumsum([line["n_global"] for line in lines])[known]
            seconds = np.array([line["time"] - lines[0]["time"] for line in lines])[known]
            loss = np.array([line["loss"] for line in lines], dtype=float)[known]
            drawn[name] = samples, seconds, loss
    longest = max((seconds[-1] for _, seconds, _ in drawn.values()), default=0.0)
    unit, per_unit = style.time_unit(longest)
    for number, (name, (samples, seconds, loss)) in enumerate(drawn.items()):
        again, colour = divmod(number, len(style.HOST_COLOURS))
        look = {
            "color": style.HOST_COLOURS[colour],
            "linestyle": _DASHES[(colour + again) % len(_DASHES)],  # for who sees no colours
        }
        window = len(loss) // 40 | 1
        axes[0].plot(samples, style.smooth(loss, window), **look)
        axes[1].plot(seconds / per_unit, style.smooth(loss, window), label=name, **look)
    style.label_axes(axes[0], "samples", "loss")
    style.label_axes(axes[1], f"time since the end of the first step ({unit})", "")
    if drawn:
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_runs(runs: dict[str, Sequence[JsonDict]]) -> Figure:
    """The picture of several runs, by name."""
    height = max(3.4, 0.8 + 0.17 * len(runs))
    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(f"{len(runs)} runs")
    draw_losses(figure.subplots(1, 2, sharey=True), runs)
    return figure


def steps_of(folders: Sequence[RunFolder]) -> dict[str, Sequence[JsonDict]]:
    """The step records of each run by its folder's name; one without any is said and left out."""
    found: dict[str, Sequence[JsonDict]] = {}
    for folder in folders:
        name = folder.path.resolve().name
        if name in found:
            name = "/".join(folder.path.resolve().parts[-2:])
        try:
            found[name] = read_training(folder).lead
        except MotleyError as error:
            command.warn(error)
    return found


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw all runs together; return the exit code."""
    runs = steps_of(list(find_runs(paths)))
    if not runs:
        raise command.nothing("run", paths)
    path = (out or paths[0]) / "runs.png"
    command.save(draw_runs(runs), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(command.run_script(__doc__ or "", draw))

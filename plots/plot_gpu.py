"""Draw the GPU logs: load, memory, temperature and power of every machine over time.

    python plots/plot_gpu.py logs/                    # logs/<run>/gpu.png for every run
    python plots/plot_gpu.py logs/ --out pictures     # all PNGs in one folder

Reads this product's gpu.<host>.csv and the lab's older eleven-column metrics.csv, in
folders of any depth. Exit code: 0, or 2 if there is nothing to draw.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import command
import numpy as np
import style
from gpu_series import Series, epoch_starts, read_folder, to_series
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from motley.errors import MotleyError
from motley.records.gpu_csv import find_gpu_logs

FEW = 40  # samples: so few are shown as dots; epochs: more lines are a grey wall
GREY, EPOCH = "0.55", "0.8"


@dataclass(frozen=True)
class Panel:
    """One quantity, of ``kinds`` (CPU, GPU); ``zero``: its axis starts at 0."""

    label: str
    field: str
    factor: float = 1.0
    kinds: str = "CPU GPU"
    zero: bool = True
    noisy: bool = False

    def shows(self, one: Series) -> bool:
        """Whether this series has data for this panel."""
        kind = "GPU" if one.gpu else "CPU"
        return kind in self.kinds and bool(np.isfinite(one.values(self.field)).any())


# RAM has a panel of its own: beside hundreds of GiB the GPUs' memory would look empty.
PANELS = (
    Panel("load (%)", "load", factor=100, noisy=True),
    Panel("GPU memory (GiB)", "memory_used_mib", factor=1 / 1024, kinds="GPU"),
    Panel("RAM (GiB)", "memory_used_mib", factor=1 / 1024, kinds="CPU"),
    Panel("temperature (°C)", "temperature_c", zero=False),
    Panel("power (W)", "power_w", noisy=True),
)


def draw_series(ax: Axes, panel: Panel, one: Series, unit: float) -> None:
    """One line; a pause in the log (of a resumed run) stays a gap."""
    steps = np.diff(one.seconds)
    pause = max(10 * np.median(steps), 30) if len(steps) else 0
    # A window wide, so that no mean reaches across.
    pauses = np.repeat(np.flatnonzero(steps > pause) + 1, one.window)

    def gapped(values: style.Array) -> style.Array:
        return np.insert(values, pauses, np.nan)

    color = one.look["color"]
    x, y = gapped(one.seconds / unit), gapped(one.values(panel.field, panel.factor))
    if panel.noisy and one.window > 1:
        ax.plot(x, y, alpha=0.2, linewidth=0.6, color=color)
        y = np.where(np.isnan(y), np.nan, style.smooth(y, one.window))
    ax.plot(x, y, marker="o" if len(y) <= FEW else None, markersize=3, **one.look)
    if panel.field == "memory_used_mib":
        total = gapped(one.values("memory_total_mib", panel.factor))
        ax.plot(x, total, "--", color=color, linewidth=0.9)
        others = gapped(one.values("others_memory_mib", panel.factor))
        ax.fill_between(x, 0, others, color=color, alpha=0.2, linewidth=0)


def add_legend(figure: Figure, series: list[Series], epochs: bool) -> None:
    """One legend for all panels, below them."""
    handles: list[Line2D | Patch] = [Line2D([], [], label=one.label, **one.look) for one in series]
    samples = [sample for one in series for sample in one.samples]
    if any(sample.memory_total_mib for sample in samples):
        handles.append(Line2D([], [], color=GREY, linestyle="--", label="all memory there is"))
    if any(sample.others_memory_mib for sample in samples):
        handles.append(Patch(color=GREY, alpha=0.4, label="memory held by other users"))
    if epochs:
        handles.append(Line2D([], [], color=EPOCH, label="an epoch starts"))
    window = max(one.window for one in series)
    if window > 1:
        label = f"load, power: mean of {window} samples; faint: all"
        handles.append(Line2D([], [], color=GREY, label=label))
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, 140 // (widest + 7)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def draw_folder(name: str, series: list[Series]) -> Figure:
    """The picture of one folder of logs; a quantity that nobody knows has no panel."""
    panels = [panel for panel in PANELS if any(panel.shows(one) for one in series)]
    if not panels:
        raise MotleyError(f"the GPU logs of {name} hold no value; left out")
    figure = Figure(figsize=(9, 1.2 + 1.75 * len(panels) + 0.1 * len(series)), layout="constrained")
    figure.suptitle(f"Machines of {name}")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    unit, seconds = style.time_unit(max(one.seconds[-1] for one in series))
    starts = epoch_starts(series)
    starts = starts if len(starts) <= FEW else []
    for ax, panel in zip(axes, panels, strict=True):
        ax.grid(not starts, axis="x")
        for start in starts:
            ax.axvline(start / seconds, color=EPOCH, linewidth=0.8, zorder=0)
        for one in filter(panel.shows, series):
            draw_series(ax, panel, one, seconds)
        style.label_axes(ax, "", panel.label, zero=panel.zero)
        if panel.field == "load":
            ax.set_ylim(0, 105)
    axes[-1].set_xlabel(f"time since the first sample ({unit})")
    add_legend(figure, series, bool(starts))
    return figure


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw every folder that holds logs; return the exit code."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for log in find_gpu_logs(paths):
        folders[log.parent].append(log)
    if not folders:
        raise command.nothing("GPU log", paths)
    colours = style.colours_under(paths)

    def picture(folder: Path) -> Figure:
        name = "/".join(folder.resolve().parts[-2:])
        return draw_folder(name, to_series(read_folder(folders[folder]), colours))

    return command.draw_all(folders, picture, "gpu.png", out)


if __name__ == "__main__":
    sys.exit(command.run_script(__doc__ or "", draw))

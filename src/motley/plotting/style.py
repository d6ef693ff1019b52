"""The look of all pictures.

Pictures share one colour per host, the colours of a step's parts, axes with units, smooth curves,
and legends. Two colours also differ in a pattern or a line style, for prints in grey.

Matplotlib is imported when the first picture is made, so that ``-h`` need not wait for it.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.records.gpu_csv import find_gpu_logs, read_hosts
from motley.records.run_folder import find_runs
from motley.records.training import RankGroups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_LOOK: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.01,
    "figure.titlesize": 11,
    "font.size": 9,
    "grid.alpha": 0.25,
    "hatch.color": "#555555",
    "hatch.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "savefig.dpi": 150,
    "text.parse_math": False,  # a "$" in the name of a run or a host is no formula
}

_CHARACTER, _HANDLE = 0.062, 0.5  # inches of a letter and of a line sample in a legend

PANEL_WIDTH = 4.8  # inches; 343 CSS pixels of a phone then show letters of 9 points as 9 pixels

# Okabe and Ito's colours for every kind of colour vision, without their yellow (too pale for
# a line on white), with Tol's wine.
HOST_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00"),
    *("#CC79A7", "#56B4E9", "#333333", "#882255"),
)


@dataclass(frozen=True)
class Part:
    """The colour and pattern with which pictures show a part of a step."""

    label: str
    colour: str
    pattern: str = ""

    @property
    def fill(self) -> dict[str, Any]:
        """Keyword arguments that give a matplotlib bar this colour and pattern."""
        return {"color": self.colour, "hatch": self.pattern}


# Pale fills, so that no part of a step is taken for a host's colour.
PARTS = {
    "t_data": Part("waiting for data", "#DDDDDD", "..."),
    "t_compute": Part("compute", "#77AADD"),
    "t_wait": Part("waiting for the slowest rank", "#EEDD88", "\\\\\\"),
    "t_comm": Part("communication", "#EE8866", "///"),
    "t_opt": Part("optimizer", "#44BB99", "xxx"),
    "t_host": Part("host (Python)", "#BBAACC", "---"),
}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places node2 before node10."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]


def host_colours(hosts: Iterable[str]) -> dict[str, str]:
    """Return one colour per host, in the hosts' order.

    After eight hosts, the colours repeat in darker shades, so that two hosts never look the same.
    """
    from matplotlib.colors import to_hex, to_rgb

    names = sorted(set(hosts), key=natural)
    cycle = len(HOST_COLOURS)
    rounds = -(-len(names) // cycle)
    colours = {}
    for index, name in enumerate(names):
        light = 1 - 0.7 * (index // cycle) / rounds
        red, green, blue = (part * light for part in to_rgb(HOST_COLOURS[index % cycle]))
        colours[name] = to_hex((red, green, blue))
    return colours


def colours_under(paths: list[Path]) -> dict[str, str]:
    """Return the colour of each host with records under ``paths``. Pictures share these colours.

    A host that did not train has only a GPU log. A host without a shared disk has only an entry in
    run.json. Both kinds of hosts get a colour.
    """
    hosts: set[str] = set()
    for log in find_gpu_logs(paths):
        with contextlib.suppress(
            MotleyError, OSError, ValueError
        ):  # the code that draws it reports the error
            hosts |= read_hosts(log)
    for run in find_runs(paths):
        with contextlib.suppress(MotleyError, OSError, ValueError):
            hosts |= {*RankGroups(run.read_run()).hosts}
    # The lab's old logs name no host, and "rank 0" may be another machine in each of them.
    nameless = {host for host in hosts if host.startswith("rank ")}
    return host_colours(hosts - nameless) | host_colours(nameless)


def time_unit(span_s: float) -> tuple[str, float]:
    """Return the unit for a time axis of ``span_s`` seconds, and the seconds in a unit."""
    return ("s", 1.0) if span_s < 180 else ("min", 60.0)


def label_axes(ax: "Axes", x: str, y: str, *, zero: bool = False) -> None:
    """Set the labels of both axes, with units. Ticks of an axis of steps are whole numbers.

    Args:
        ax: the axes.
        x: label of the x axis.
        y: label of the y axis.
        zero: True if the y axis starts at 0.
    """
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if zero:  # the axis also ends above all data, however flat
        ax.set_ylim(0, max(ax.get_ylim()[1], 1.04 * ax.dataLim.ymax))
    if x == "step":
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure. Drawing the figure needs no screen.

    Args:
        width: width in inches.
        height: height in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    matplotlib.rcParams.update(_LOOK)
    return Figure(figsize=(width, height), layout="constrained")


def panel(height: float = 3.2) -> "tuple[Figure, Axes]":
    """Return a new figure with one pair of axes, of the width of a page's panel.

    Args:
        height: height in inches.
    """
    figure = new_figure(PANEL_WIDTH, height)
    return figure, figure.subplots()


def legend_above(ax: "Axes") -> None:
    """Draw a legend above the axes, in as few rows as fit their width.

    The legend of a figure with one panel may be as wide as the figure.
    """
    handles, labels = ax.get_legend_handles_labels()
    figure = ax.figure
    alone = ax.figure.bbox.width / ax.figure.dpi <= PANEL_WIDTH
    inches = figure.bbox.width / figure.dpi
    if not alone:
        inches *= ax.get_position().width / 0.775 - 0.05  # the axes' part, before the layout
    lengths = [len(label) for label in labels]

    def fits(columns: int) -> bool:
        widths = [column.max() for column in np.array_split(lengths, columns)]  # as a legend does
        return bool(_CHARACTER * sum(widths) + _HANDLE * len(widths) <= inches)

    columns = next((count for count in range(max(1, len(labels)), 1, -1) if fits(count)), 1)
    look = {"ncols": columns, "columnspacing": 1.2, "borderpad": 0}
    if alone and labels:
        figure.legend(handles, labels, loc="outside upper left", **look)
    elif labels:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **look)


def smooth(values: Array, window: int) -> Array:
    """Return centred means over ``window`` values, an odd number. NaN (unknown) does not count."""
    known = np.isfinite(values)
    level = (
        values[known].mean() if known.any() else 0.0
    )  # subtracted so that sums stay small and exact
    sums = _moving_sum(np.where(known, values - level, 0.0), window)
    counts = _moving_sum(known * 1.0, window)
    return np.where(counts > 0.5, level + sums / np.maximum(counts, 1), np.nan)


def _moving_sum(values: Array, window: int) -> Array:
    """Return centred sums over ``window`` values.

    The function uses cumulative sums. For half a million values and any window, it takes
    milliseconds.
    """
    before: Array = np.concatenate([[0.0], np.cumsum(np.pad(values, window // 2))])
    return before[window:] - before[:-window]


def metric_label(name: str) -> tuple[str, float]:
    """Return the axis label of a metric with its unit, and the factor for values in this unit."""
    if name == "top1":
        return "top-1 (%)", 100.0
    return name.replace("_", " "), 1.0


def metric(name: str, value: float) -> str:
    """Return a metric with its name and unit, for example ``top-1 97.2 %``."""
    label, factor = metric_label(name)
    text = f"{factor * value:.1f} %" if factor == 100 else f"{value:.4g}"
    return f"{label.removesuffix(' (%)')} {text}"

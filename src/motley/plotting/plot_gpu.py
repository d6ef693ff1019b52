"""Draw the GPU logs: load, memory, temperature and power of every machine over time.

    python plots/plot_gpu.py logs/                    # logs/<run>/gpu.png for every run
    python plots/plot_gpu.py logs/ --out pictures     # all PNGs in one folder

The command reads Motley's gpu.<host>.csv and the lab's older metrics.csv with eleven columns, in
folders of any depth. The exit code is 0, or 2 if there is nothing to draw.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.errors import MotleyError
from motley.plotting import command, style
from motley.records.costs import without_pauses
from motley.records.gpu_csv import GpuSample, device_name, find_gpu_logs, read_gpu_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

DASHES = ("-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))  # GPUs of a host; "--" is totals
_LARGE_MIB = 10.0  # a log whose reading takes seconds
MANY = 150  # samples; noisy values are smoothed past that


@dataclass(frozen=True)
class Series:
    """The samples of one GPU, or of a host without a GPU, in order of time.

    Attributes:
        host: name of the host.
        gpu: number of the GPU; empty for a host without a GPU.
        look: colour and line style.
        seconds: time of each sample, in seconds since the first sample of all series. Pauses are
            left out.
        samples: the samples.
        paused: times on the scale of ``seconds`` at which all logs paused, for example before a run
            was resumed.
    """

    host: str
    gpu: str
    look: dict[str, Any]
    seconds: style.Array
    samples: tuple[GpuSample, ...]
    paused: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Label in the legend, such as ``ecetesla0: GPU 0 (Tesla P4)``."""
        name = next((device_name(sample.name) for sample in self.samples if sample.name), "")
        device = f"GPU {self.gpu}" if self.gpu else "CPU"
        return f"{self.host}: {device}" + (f" ({name})" if name else "")

    @property
    def window(self) -> int:
        """Number of samples over which noisy values are smoothed; 1 for a short log."""
        return len(self.samples) // 60 | 1 if len(self.samples) > MANY else 1

    def values(self, field: str, factor: float = 1.0) -> style.Array:
        """Return a field of all samples, times ``factor``. Unknown values are NaN."""
        numbers = [getattr(sample, field) for sample in self.samples]
        return np.array([np.nan if n is None else n * factor for n in numbers], dtype=float)


def read_folder(logs: list[Path]) -> list[GpuSample]:
    """Return the samples of all logs, in order of time.

    An unreadable log is reported and left out.
    """
    samples = []
    for log in logs:
        try:
            if (mib := log.stat().st_size / 2**20) > _LARGE_MIB:
                command.show_progress(f"reading {log} ({mib:,.0f} MiB)")
            result = read_gpu_log(log, command.warn)
            if not result:
                command.warn(f"{log} is left out: it holds no sample")
            samples += result
        except (MotleyError, OSError, ValueError) as error:
            command.warn(f"{error}; left out")
    return sorted(samples, key=lambda sample: sample.time)


def to_series(samples: list[GpuSample], colours: dict[str, str]) -> list[Series]:
    """Return one series per GPU, or per host without a GPU, on a common clock.

    The clock starts at the first sample. The clock stands still while no machine wrote a sample,
    because the run was paused at that time.
    """
    groups: dict[tuple[str, str], list[GpuSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.host, sample.gpu or ""].append(sample)
    usual = max(map(usual_interval, groups.values()), default=0.0)
    paused = find_pauses(samples, usual)
    marks = tuple(without_pauses(at, paused) - samples[0].time - usual / 2 for at, _ in paused)
    with_gpu = {host for host, gpu in groups if gpu}
    series = []
    for host, color in colours.items():
        dashes = itertools.cycle(DASHES)
        for gpu in sorted((gpu for name, gpu in groups if name == host), key=style.natural):
            if gpu or host not in with_gpu:  # a GPU that did not answer once is no CPU host
                group = tuple(groups[host, gpu])
                seconds = np.array([
                    without_pauses(sample.time, paused) - samples[0].time for sample in group
                ])  # fmt: skip
                look = {"color": color, "linestyle": next(dashes)}
                series.append(Series(host, gpu, look, seconds, group, marks))
    return series


def find_pauses(samples: Sequence[GpuSample], usual: float) -> list[tuple[float, float]]:
    """Return the pauses of all machines.

    Args:
        samples: all samples, in order of time.
        usual: seconds between two samples of a device.

    Returns:
        For each pause, the time of the first sample after it, in seconds since 1970, and the
        seconds to leave out.
    """
    least = least_pause(usual)
    return [
        (after.time, after.time - before.time - usual)
        for before, after in pairwise(samples) if after.time - before.time > least
    ]  # fmt: skip


def usual_interval(samples: Sequence[GpuSample]) -> float:
    """Return the median seconds between two samples of a device. 0: no device has two samples."""
    steps = [after.time - before.time for before, after in pairwise(samples)]
    return float(np.median(steps)) if steps else 0.0


def least_pause(usual: float) -> float:
    """Return the shortest time without a sample that counts as a pause, in seconds.

    Args:
        usual: usual seconds between two samples.
    """
    return max(10 * usual, 30.0)


def epoch_starts(series: list[Series]) -> list[float]:
    """Return the time at which each epoch starts, in seconds.

    In the lab's old logs, which have no steps, a row marks the *end* of an epoch.
    """
    starts: dict[int, float] = {}
    for one in series:
        for second, sample in zip(one.seconds, one.samples, strict=True):
            if sample.epoch is not None and sample.step is not None:
                starts[sample.epoch] = min(second, starts.get(sample.epoch, second))
    return sorted(starts.values())


FEW = 40  # most samples that are shown as dots, and most epochs that are shown as lines
GREY, EPOCH = "0.55", "0.8"
PAUSE: dict[str, Any] = {"color": "#D55E00", "linestyle": ":", "linewidth": 1.4}


@dataclass(frozen=True)
class Panel:
    """A panel that shows one quantity of all machines.

    Attributes:
        label: label of the axis, with the unit.
        field: field of the samples.
        factor: factor that converts the field's values to the unit of the axis.
        kinds: kinds of devices that have this quantity: CPU, GPU.
        zero: True if the axis starts at 0.
        noisy: True if the values are noisy, and are smoothed.
    """

    label: str
    field: str
    factor: float = 1.0
    kinds: str = "CPU GPU"
    zero: bool = True
    noisy: bool = False

    def shows(self, one: Series) -> bool:
        """Return True if this series has data for this panel."""
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


def draw_series(ax: "Axes", panel: Panel, one: Series, unit: float) -> None:
    """Draw the line of one device, with gaps where its log pauses."""
    steps = np.diff([sample.time for sample in one.samples])
    pause = least_pause(usual_interval(one.samples))
    # A gap is as wide as a window, so that no mean includes values of both sides.
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


def make_handles(series: list[Series], epochs: bool) -> "list[Line2D | Patch]":
    """Return the handles of the legend that all panels share."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Line2D([], [], label=one.label, **one.look) for one in series]
    samples = [sample for one in series for sample in one.samples]
    if any(sample.memory_total_mib for sample in samples):
        handles.append(Line2D([], [], color=GREY, linestyle="--", label="all memory there is"))
    if any(sample.others_memory_mib for sample in samples):
        handles.append(Patch(color=GREY, alpha=0.4, label="memory held by other users"))
    if epochs:
        handles.append(Line2D([], [], color=EPOCH, label="an epoch starts"))
    if series[0].paused:
        handles.append(Line2D([], [], label="a pause, left out", **PAUSE))
    window = max(one.window for one in series)
    if window > 1:
        label = f"load, power: mean of {window} samples; faint: all"
        handles.append(Line2D([], [], color=GREY, label=label))
    return handles


def add_legend(figure: "Figure", handles: "list[Line2D | Patch]") -> None:
    """Add one legend for all panels, below them."""
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, int(15.5 * figure.get_figwidth()) // (widest + 7)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def draw_panel(ax: "Axes", panel: Panel, series: list[Series], starts: list[float]) -> None:
    """Draw one quantity of all machines.

    Args:
        ax: the axes.
        panel: the quantity.
        series: samples of each machine.
        starts: seconds at which epochs start; empty if there are too many to show.
    """
    unit, seconds = style.time_unit(max(one.seconds[-1] for one in series))
    ax.grid(not starts, axis="x")
    for start in starts:
        ax.axvline(start / seconds, color=EPOCH, linewidth=0.8, zorder=0)
    for mark in series[0].paused:
        ax.axvline(mark / seconds, zorder=0, **PAUSE)
    for one in filter(panel.shows, series):
        draw_series(ax, panel, one, seconds)
    without = ", pauses left out" if series[0].paused else ""
    style.label_axes(ax, f"time since the first sample{without} ({unit})", panel.label,
                     zero=panel.zero)  # fmt: skip
    if panel.field == "load":
        ax.set_ylim(0, 105)


def make_panels(name: str, series: list[Series]) -> list[Panel]:
    """Return the panels for which the logs have values.

    Raises:
        MotleyError: the logs have no values for any panel.
    """
    panels = [panel for panel in PANELS if any(panel.shows(one) for one in series)]
    if not panels:
        raise MotleyError(f"{name} is left out: its GPU logs hold no value")
    return panels


def few_starts(series: list[Series]) -> list[float]:
    """Return the times at which epochs start; empty if there are too many to show."""
    starts = epoch_starts(series)
    return starts if len(starts) <= FEW else []


def draw_folder(name: str, series: list[Series]) -> "Figure":
    """Return the picture of one folder of GPU logs."""
    panels, starts = make_panels(name, series), few_starts(series)
    figure = style.new_figure(9, 1.2 + 1.75 * len(panels) + 0.1 * len(series))
    figure.suptitle(f"Machines of {name}")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        draw_panel(ax, panel, series, starts)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    add_legend(figure, make_handles(series, bool(starts)))
    return figure


def machine_panels(name: str, series: list[Series]) -> "Iterator[tuple[str, Figure]]":
    """Yield a description of each panel, and a figure with only this panel."""
    starts = few_starts(series)
    handles = make_handles(series, bool(starts))
    for panel in make_panels(name, series):
        figure, ax = style.panel(2.4 + 0.17 * len(handles))
        draw_panel(ax, panel, series, starts)
        add_legend(figure, handles)
        yield f"{panel.label} of each machine", figure


def draw(paths: list[Path], out: Path | None) -> int:
    """Draw every folder that holds logs, and return the exit code."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for log in find_gpu_logs(paths):
        folders[log.parent].append(log)
    if not folders:
        raise command.nothing("GPU log", paths)
    colours = style.colours_under(paths)

    def picture(folder: Path) -> "Figure":
        name = "/".join(folder.resolve().parts[-2:])
        return draw_folder(name, to_series(read_folder(folders[folder]), colours))

    return command.draw_all(folders, picture, "gpu.png", out)


def main() -> int:
    """Draw the pictures that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw)

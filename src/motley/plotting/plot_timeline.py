"""Draw the parts of some steps on every rank, on one clock: computing, waiting, communicating.

    python plots/plot_timeline.py logs/RUN                    # around the step that took longest
    python plots/plot_timeline.py logs/ --steps 100:104       # logs/<run>/timeline.png, every run

The command reads the steps that every run records. For the operators within a step, see the traces
of --profile. The exit code is 0, or 2 if there is nothing to draw.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from motley.errors import MotleyError
from motley.plotting import command, style
from motley.plotting.run_steps import title
from motley.records.costs import Training, pauses, read_training, without_pauses
from motley.records.json_files import JsonDict
from motley.records.run_folder import find_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AROUND = 2  # steps before the longest, and after it
_WARM = 3  # first steps, at most half of all, that are not searched for the longest step
_WIDE = 11.0  # inches
_FEW_RANKS = 64

Pauses = Sequence[tuple[float, float]]  # see motley.records.training.pauses


@dataclass(frozen=True)
class Span:
    """One part of one rank's step.

    Attributes:
        rank: number of the rank.
        step: number of the step.
        part: name of the part, as in style.PARTS.
        start: seconds from the start of the first span to the start of this span.
        end: seconds from the start of the first span to the end of this span.
    """

    rank: int
    step: int
    part: str
    start: float
    end: float


def spans(
    steps: dict[int, list[JsonDict]], first: int, end: int, paused: Pauses = ()
) -> list[Span]:
    """Return the spans of each rank from step ``first`` to step ``end - 1``.

    Clocks of hosts differ. All ranks finish an all-reduce at the same time, so the clocks are
    aligned at this point. If no all-reduce is recorded, clocks are not aligned. The time of pauses
    is left out.
    """
    chosen = {
        rank: {line["step"]: line for line in lines if first <= line["step"] < end}
        for rank, lines in steps.items()
    }
    chosen = {rank: lines for rank, lines in chosen.items() if lines}
    if not chosen:
        return []
    reference = chosen[min(chosen)]
    result = []
    for rank, lines in chosen.items():
        late = [
            _sum_time(line) - _sum_time(reference[step])
            for step, line in lines.items()
            if step in reference and None not in (line.get("t_comm"), reference[step].get("t_comm"))
        ]
        offset = float(np.median(late)) if late else 0.0
        for step, line in lines.items():
            ended = without_pauses(line["time"] - offset, paused)
            at = ended - sum(line.get(part) or 0.0 for part in style.PARTS)
            for part in style.PARTS:
                seconds = line.get(part) or 0.0
                result.append(Span(rank, step, part, at, at + seconds))
                at += seconds
    begin = min(span.start for span in result)
    return [
        Span(span.rank, span.step, span.part, span.start - begin, span.end - begin)
        for span in result
    ]


def _sum_time(line: JsonDict) -> float:
    """Return the time at which the all-reduce of a step ended, by the clock of the rank's host."""
    return float(line["time"] - line["t_opt"])


def longest(lines: Sequence[JsonDict]) -> int:
    """Return the number of the longest step. The first steps do not count."""
    later = lines[min(_WARM, len(lines) // 2) :]
    whole = [sum(line.get(part) or 0.0 for part in style.PARTS) for line in later]
    return int(later[int(np.argmax(whole))]["step"])


def draw_spans(ax: "Axes", found: Sequence[Span], ranks: Sequence[int]) -> None:
    """Draw one row per rank, in the order of ``ranks``, and a line at the start of each step."""
    seconds = max(span.end for span in found)
    unit, factor = ("ms", 1000.0) if seconds < 2 else ("s", 1.0)
    rows = {rank: row for row, rank in enumerate(ranks)}
    for part, look in style.PARTS.items():
        those = [span for span in found if span.part == part and span.end > span.start]
        if those:
            ax.barh(
                [rows[span.rank] for span in those],
                [factor * (span.end - span.start) for span in those],
                left=[factor * span.start for span in those], height=0.8, label=look.label,
                **look.fill,
            )  # fmt: skip
    begins = {span.step: span.start for span in reversed(found) if span.rank == ranks[0]}
    for step, start in begins.items():
        ax.axvline(factor * start, color="0.3", linewidth=0.8, linestyle=":")
        ax.annotate(f"step {step + 1}", (factor * start, 0), (2, 2), textcoords="offset points",
                    xycoords=("data", "axes fraction"), fontsize=7)  # fmt: skip
    ax.set_ylim(len(ranks) - 0.3, -0.6)
    ax.set_xlim(0, 1.01 * factor * seconds)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    style.label_axes(ax, f"time since the first of these steps began ({unit})", "")
    style.legend_above(ax)


def draw_timeline(
    training: Training, asked: tuple[int, int] | None = None, width: float = _WIDE
) -> "Figure":
    """Return a picture of some steps of a run.

    Args:
        training: records of the run.
        asked: the first step to draw, and the step before which the picture ends; None: the steps
            around the longest step.
        width: width in inches. A narrow picture has no title.

    Raises:
        MotleyError: the run has no such step.
    """
    if asked is None:
        middle = longest(training.lead)
        words = f"around step {middle + 1}, which took longest"
        first, end = max(0, middle - _AROUND), middle + _AROUND + 1
    else:
        (first, end), words = asked, f"steps {asked[0] + 1} to {asked[1]}"
    result = spans(training.steps, first, end, pauses(training.lead, training.starts))
    if not result:
        last = training.lead[-1]["step"] + 1
        raise MotleyError(
            f"{training.path} has no step from {first + 1} to {end}; its last step is {last}"
        )
    ranks = sorted({span.rank for span in result})
    figure = style.new_figure(width, 1.7 + 0.32 * min(len(ranks), _FEW_RANKS))
    if width >= _WIDE:
        figure.suptitle(f"{title(training)}; {words}")
    ax = figure.subplots()
    draw_spans(ax, result, ranks)
    hosts = [training.groups.worker(rank, end - 1).get("host") for rank in ranks]
    labels = [f"rank {rank}" + (f" - {host}" if host else "")
              for rank, host in zip(ranks, hosts, strict=True)]  # fmt: skip
    ax.set_yticks(range(len(ranks)), labels)
    return figure


def read_steps(text: str) -> tuple[int, int]:
    """Parse ``FROM:TO``, the steps after the first FROM steps, up to step TO.

    Return FROM and TO.
    """
    result = re.fullmatch(r"(\d+):(\d+)", text)
    if not result:
        raise argparse.ArgumentTypeError(
            f"{text} is not a range; write FROM:TO, as in 100:104, which draws steps 101 to 104"
        )
    if int(result[1]) >= int(result[2]):
        raise argparse.ArgumentTypeError(
            f"{text} ends before it begins; give the smaller number first"
        )
    return int(result[1]), int(result[2])


def draw(paths: list[Path], out: Path | None, steps: tuple[int, int] | None) -> int:
    """Draw the timeline of every run under the paths, and return the exit code."""
    runs = {folder.path: folder for folder in find_runs(paths)}
    if not runs:
        raise command.nothing("run", paths)
    return command.draw_all(
        runs, lambda path: draw_timeline(read_training(runs[path]), steps), "timeline.png", out
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--steps``, which only this command has."""
    parser.add_argument(
        "--steps",
        type=read_steps,
        metavar="FROM:TO",
        help="100:104 draws steps 101 to 104; default: those around the longest step",
    )


def main() -> int:
    """Draw the pictures that the command line asks for, and return the exit code."""
    return command.run_script(__doc__ or "", draw, add_options)

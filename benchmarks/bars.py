"""The picture of a benchmark's rows: how much of the limit each way reaches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """One bar a mode, ours in colour, with images/s; a line from the slowest repeat to the fastest.

    Args:
        rows: as a benchmark writes them; that of mode ``limit`` becomes the line.
    """
    shown = [row for row in rows if row["mode"] != "limit"][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.42 * len(shown)), layout="constrained")
    places = range(len(shown))
    bars = [row["fraction_of_limit"] for row in shown]
    limits = [row["fraction_of_limit"] * row["step_s"] for row in shown]
    ends = [
        (limit / max(row["repeats"]), limit / min(row["repeats"]))
        for limit, row in zip(limits, shown, strict=True)
    ]
    beyond = [(bar - low, high - bar) for bar, (low, high) in zip(bars, ends, strict=True)]
    axes.barh(
        places, bars, xerr=list(zip(*beyond, strict=True)),
        color=["tab:blue" if row["mode"].startswith("motley") else "0.65" for row in shown],
        height=0.62,
    )  # fmt: skip
    for place, row in zip(places, shown, strict=True):
        times = row.get("times_plain_ddp")
        words = f"{row['fraction_of_limit']:.2f}   {row['images_per_s']:,.0f} images/s"
        words += f"   {times:.2f} x plain DDP" if times else ""
        inside = row["fraction_of_limit"] > 0.6
        at = 0.02 if inside else row["fraction_of_limit"] + 0.02
        colour = "white" if inside else "black"
        axes.text(at, place, words, va="center", fontsize=9, color=colour)
    axes.axvline(1.0, color="black", linestyle="--")
    axes.set(yticks=list(places), yticklabels=[row["mode"] for row in shown], title=title,
             xlim=(0, 1.08), xlabel="of the limit: the sum of what all hosts do alone")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Pictures of a benchmark's rows: how much of the limit each way reaches, and the same in three
bars.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "plain-ddp": "DDP",
    "accelerate": "Accelerate",
    "deepspeed-0": "DeepSpeed, stage 0",
    "deepspeed-1": "DeepSpeed, stage 1",
    "ddp-by-hand": "DDP, shares tuned by hand",
    "motley-ddp": "Motley, DDP",
    "motley-deepspeed-0": "Motley, DeepSpeed stage 0",
    "motley-deepspeed-1": "Motley, DeepSpeed stage 1",
}
NEEDED = ("plain-ddp", "ddp-by-hand", "motley-ddp")  # for the summary
_EQUAL = ("plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1")  # give each host the same batch


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
        words += f"   {times:.2f} times DDP" if times else ""
        inside = row["fraction_of_limit"] > 0.6
        at = 0.02 if inside else row["fraction_of_limit"] + 0.02
        colour = "white" if inside else "black"
        axes.text(at, place, words, va="center", fontsize=9, color=colour)
    axes.axvline(1.0, color="black", linestyle="--")
    axes.set(
        yticks=list(places), yticklabels=[LABELS.get(row["mode"], row["mode"]) for row in shown],
        title=title, xlim=(0, 1.08),
        xlabel="part of the limit, which is the sum of the hosts, each alone",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_summary(rows: Sequence[dict[str, Any]], hosts: str, path: Path) -> None:
    """Draw three bars: the best of today's tools, Motley, and the sum of the hosts, each alone.

    Args:
        rows: as a benchmark writes them. DDP tuned by hand is a mark on Motley's bar.
        hosts: what they are, for the title, as in ``Five unequal hosts``.
        path: of the PNG.
    """
    rates = {row["mode"]: row["images_per_s"] for row in rows}
    best = max((mode for mode in _EQUAL if mode in rates), key=lambda mode: rates[mode])
    values = (rates["limit"], rates["motley-ddp"], rates[best])
    names = ("The five hosts, each alone, added up", "Motley", "DDP, Accelerate and DeepSpeed")
    figure, axes = plt.subplots(figsize=(8, 2.3), layout="constrained")
    axes.barh(range(3), values, color=("0.85", "tab:blue", "0.6"), height=0.62)
    for place, value in enumerate(values):
        inside = value > rates["limit"] / 2
        axes.text(
            value + (-1.5 if inside else 1.5), place, f"{value:,.1f}", va="center", fontsize=11,
            ha="right" if inside else "left", color="white" if place == 1 else "black",
        )  # fmt: skip
    hand = rates["ddp-by-hand"]
    axes.plot([hand, hand], [0.69, 1.31], color="black", linewidth=2)
    axes.annotate(
        f"DDP, shares tuned by hand: {hand:,.1f}", (hand, 1.31), (hand - 2, 1.66), ha="right",
        va="center", fontsize=9, arrowprops={"arrowstyle": "-", "linewidth": 0.8},
    )  # fmt: skip
    axes.set(
        yticks=range(3), yticklabels=names, xlim=(0, 1.09 * rates["limit"]), xlabel="images/s",
        title=f"{hosts}: {values[2]:,.0f} \N{RIGHTWARDS ARROW} {values[1]:,.0f} images/s, of "
        f"{values[0]:,.0f} possible",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)

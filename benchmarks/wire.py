"""Five unequal hosts over links of several rates: today's tools and each --wire of Motley's.

    sudo .venv/bin/python benchmarks/wire.py --json benchmarks/results/wire.json
    sudo .venv/bin/python benchmarks/wire.py --quick --json /tmp/wire.json
    sudo .venv/bin/python benchmarks/wire.py --links 20 --modes plain-ddp,motley-ddp-fp16

As benchmarks/mixed_lab.py with paced hosts, once a kind of link: all of 100 Mbit/s, of 20, no
limit, and 10-to-1, where the last host's link is of 20 Mbit/s and the others' of 200. Two
processors do the work of five hosts here; so that this does not count, all time goes more
slowly (--slower): a sample takes so many times longer, and a link carries so many times less.
What compute and wire are to each other stays. The bound is the longer of the limit and one
all-reduce of the mode's own bytes. Needs root, for the lab, and: pip install accelerate
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import mixed_lab
import result
from bench_lab import unshaped

_SAMPLE_S = 0.006  # on the fastest host; what link rates are named beside
LINKS: dict[str, tuple[float | None, float | None]] = {  # Mbit/s: of all, and of the last host
    "unshaped": (None, None), "100": (100, None), "20": (20, None), "10-to-1": (200, 20),
}  # fmt: skip
MODES = (
    "plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1", "deepspeed-1-fp16", "ddp-by-hand",
    "ddp-by-hand-fp16", "ddp-by-hand-powersgd", "motley-ddp", "motley-ddp-fp16",
    "motley-ddp-powersgd:4", "motley-ddp-local:4", "motley-deepspeed-0-fp16",
)  # fmt: skip
LEAF = ("motley-ddp-exact/leaf4", "motley-ddp-fp16/leaf4")  # where one link is slow


def main() -> None:
    """Measure over every kind of link, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    rows: list[dict[str, Any]] = []
    for link in options.links:
        mbit, slow = (rate and rate / options.slower for rate in LINKS[link])
        print(f"links: {link}", flush=True)
        options.modes = options.chosen or [*MODES, *(LEAF if slow else ())]
        results = mixed_lab.table(
            mixed_lab.measure(options, unshaped(mbit or 10_000, slow)), options, link
        )
        mixed_lab.show(results)
        rows += results
        if options.json:  # after each kind, for all of it takes long
            result.write(
                options.json, rows, started, slower=options.slower, load_before=load,
                accelerate=mixed_lab.accelerate_version(options.modes),
            )  # fmt: skip
            draw(rows, options.json.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One group of bars a kind of link."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["mode"] != "limit"))
    figure, all_axes = plt.subplots(
        1, len(links), sharey=True, squeeze=False, layout="constrained",
        figsize=(2.5 + 2.4 * len(links), 1.2 + 0.36 * len(modes)),
    )  # fmt: skip
    for axes, link in zip(all_axes[0], links, strict=True):
        for place, mode in enumerate(modes[::-1]):
            for row in rows:
                if (row["mode"], row["link"]) == (mode, link):
                    ours = mode.startswith("motley")
                    share = row["fraction_of_limit"]
                    axes.barh(place, share, height=0.62, color="tab:blue" if ours else "0.65")
                    inside = share > 0.6
                    axes.text(
                        share / 2 if inside else share + 0.03, place, f"{share:.2f}", va="center",
                        ha="center" if inside else "left", color="white" if inside else "black",
                        fontsize=9,
                    )  # fmt: skip
        axes.axvline(1.0, color="black", linestyle="--")
        words = link if not link.isdigit() else f"{link} Mbit/s"
        axes.set(title=words, xlim=(0, 1.08), yticks=range(len(modes)), yticklabels=modes[::-1])
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("of the limit: the sum of what all hosts do alone", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="one repeat of two modes, one link")
    parser.add_argument("--links", type=lambda text: text.split(","), default=list(LINKS),
                        help=f"default: {','.join(LINKS)}")  # fmt: skip
    parser.add_argument("--slower", type=float, default=3.0, metavar="TIMES", help="default 3")
    parser.add_argument("--n", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", default="7:5:3:2:1", help="of the hosts, default 7:5:3:2:1")
    parser.add_argument("--steps", type=int, default=3, help="timed a block, default 3")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--modes", dest="chosen", type=lambda text: text.split(","),
                        help=f"default: {','.join(MODES)}; also {','.join(LEAF)} where one "
                        "link is slow")  # fmt: skip
    options = parser.parse_args()
    if unknown := [link for link in options.links if link not in LINKS]:
        parser.error(f"--links {unknown[0]} is none of {', '.join(LINKS)}")
    if options.quick:
        options.repeats, options.links = 1, ["20"]
        options.chosen = options.chosen or ["plain-ddp", "motley-ddp-powersgd:4"]
    options.fastest_s, options.emulation = options.slower * _SAMPLE_S, "paced"
    mixed_lab.accelerate_version(options.chosen or MODES)  # what is missing is said first
    return options


if __name__ == "__main__":
    main()

"""Five unequal hosts: today's tools and Motley beside each other, against the limit, in one run.

    sudo .venv/bin/python benchmarks/mixed_lab.py --json benchmarks/results/mixed_lab.json
    sudo .venv/bin/python benchmarks/mixed_lab.py --quick --json /tmp/mixed_lab.json
    sudo .venv/bin/python benchmarks/mixed_lab.py --speeds 7:5:3:2:1 --n 180
    sudo .venv/bin/python benchmarks/mixed_lab.py --emulation quotas

Makes a lab (lab/unshaped.toml: five hosts, real ssh, gloo over TCP) and starts one mpirun job
on it, in which benchmarks/mixed_rank.py trains each way in turn: interleaved blocks, the order
reversed in every second repeat. Hosts are paced (benchmarks/paced.py): the computation is
real and small, and then sleeps until a host of that speed would be done. What five hosts
really compute in a step shares this machine's cores, so the modelled times are long beside it
(--fastest-s). With --emulation quotas nobody sleeps: a host has its part of the processors;
that is noisier, and gloo's own work counts against the part too. The limit is measured before
and after each repeat, on all hosts at once. The peers are in benchmarks/peers.py: with equal
batches, and DDP in the hands of a user who knows each host's speed. Rates are medians; a spread is
(largest - smallest) / median; stolen is what the hypervisor gave to others meanwhile. What is not
timed: making models and engines, measuring, planning, two steps of each. Needs root, for the
lab, and: pip install accelerate
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bars
import result
from bench_lab import HOSTS, BenchLab, bench_lab

_QUOTAS_PIXELS = 48  # larger images: what a step costs beside them is little
MODES = ("plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1", "ddp-by-hand", "motley-ddp",
         "motley-deepspeed-0", "motley-deepspeed-1")  # fmt: skip


def measure(options: argparse.Namespace, profile: str | None = None) -> list[dict[str, Any]]:
    """Run the job; returns what its first rank measured.

    Args:
        profile: of bench_lab.
    """
    words = [
        "--n", options.n, "--speeds", options.speeds, "--fastest-s", options.fastest_s, "--steps",
        options.steps, "--repeats", options.repeats, "--modes", ",".join(options.modes),
    ]  # fmt: skip
    if options.emulation == "quotas":
        words += ["--emulation", "quotas", "--img-size", _QUOTAS_PIXELS, "--settle", options.settle]
    results = []
    with bench_lab(profile) as lab:
        for line in lab.train("benchmarks/mixed_rank.py", *words):
            kind, _, content = line.partition(" ")
            if line == "READY\n":
                give_quotas(lab, options)
            if kind == "RESULT":
                block = json.loads(content)
                results.append(block)
                print(f"  repeat {block['repeat'] + 1} of {options.repeats}: {block['mode']:<20} "
                      f"{block['step_s']:.3f} s a step, {block['stolen']:.1%} of the "
                      "processors stolen", flush=True)  # fmt: skip
    return results


def give_quotas(lab: BenchLab, options: argparse.Namespace) -> None:
    """Each host its part of this machine's processors, in proportion to its speed."""
    speeds = [float(word) for word in options.speeds.split(":")]
    whole = options.processors * (os.cpu_count() or 1)
    for host, speed in zip(HOSTS, speeds, strict=True):
        lab.do("cpus", host, f"{whole * speed / sum(speeds):.3f}", stdout=subprocess.DEVNULL)


def table(
    results: list[dict[str, Any]], options: argparse.Namespace, link: str = "unshaped"
) -> list[dict[str, Any]]:
    """One row a mode, and the limit."""
    by_mode: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in results:
        by_mode[each["mode"]].append(each)

    def middle(mode: str, name: str) -> float | None:
        values = [each[name] for each in by_mode.get(mode, ()) if name in each]
        return statistics.median(values) if values else None

    limit, alone = middle("limit", "step_s"), middle("limit", "alone_s")
    plain = middle("plain-ddp", "step_s")
    rows = []
    for mode, block in by_mode.items():
        seconds = [each["step_s"] for each in block]
        step_s, forecast = statistics.median(seconds), middle(mode, "predicted_s")
        wire_s = middle(mode, "wire_s")
        rows.append({
            "mode": mode, "engine": "deepspeed" if "deepspeed" in mode else "torch",
            "link": link, "n": options.n,
            "speeds": [float(word) for word in options.speeds.split(":")],
            "images_per_s": options.n / step_s,
            "fraction_of_limit": limit / step_s, "times_plain_ddp": plain and plain / step_s,
            "times_best_single": alone / step_s,
            "spread": (max(seconds) - min(seconds)) / step_s, "step_s": step_s,
            "predicted_s": forecast, "prediction_error": forecast and forecast / step_s - 1,
            "wire_s": wire_s, "fraction_of_bound": wire_s and max(limit, wire_s) / step_s,
            "repeats": seconds, "stolen": [each["stolen"] for each in block],
            "laps": block[-1].get("laps"), "wire": block[-1].get("wire"),
            "buckets": block[-1].get("buckets"),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table, for a terminal. The bound is the longer of the limit and one all-reduce."""
    heads = ("images/s", "of limit", "of bound", "x plain DDP", "spread", "predicted")
    print(f"\n{'':<24}" + "".join(f"{head:>13}" for head in heads))
    for row in rows:
        cells = (
            f"{row['images_per_s']:.1f}", f"{row['fraction_of_limit']:.3f}",
            _unless_none(row["fraction_of_bound"], ".3f"),
            _unless_none(row["times_plain_ddp"], ".2f"),
            f"{row['spread']:.1%}", _unless_none(row["prediction_error"], "+.1%"),
        )  # fmt: skip
        print(f"{row['mode']:<24}" + "".join(f"{cell:>13}" for cell in cells))


def _unless_none(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def accelerate_version(modes: Sequence[str]) -> str | None:
    """Of the peer that is no package of Motley's; None where no mode needs it."""
    if "accelerate" not in modes:
        return None
    try:
        return importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            "mode accelerate needs its package: pip install accelerate; or name --modes without it"
        )


def main() -> None:
    """Measure, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    rows = table(measure(options), options)
    show(rows)
    if options.json:
        hosts = f"Five {options.emulation} hosts, speeds {options.speeds}"
        bars.draw(rows, f"{hosts}, batch {options.n}", options.json.with_suffix(".png"))
        if {*bars.NEEDED} <= {*options.modes}:
            bars.draw_summary(rows, "Five unequal hosts", options.json.with_suffix(".summary.png"))
        result.write(
            options.json, rows, started, emulation=options.emulation, load_before=load,
            accelerate=accelerate_version(options.modes),
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="one repeat, under two minutes")
    parser.add_argument("--n", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", default="7:5:3:2:1", help="of the hosts, default 7:5:3:2:1")
    parser.add_argument("--emulation", choices=("paced", "quotas"), default="paced")
    parser.add_argument("--processors", type=float, default=0.7, metavar="PART",
                        help="of all, which quotas give to the hosts together, default 0.7: of 0.9 "
                        "they do not get all that was measured, once all compute")  # fmt: skip
    parser.add_argument("--fastest-s", type=float, default=0.024, metavar="SECONDS",
                        help="a sample on the fastest host, default 0.024")  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="of ours timed a block, default 6")
    parser.add_argument("--settle", type=int, default=32, metavar="STEPS",
                        help="of ours on quotas, in which shares follow the ranks' times as in a "
                        "training, before those that are timed; default 32")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES),
                        help=f"default: {','.join(MODES)}")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.fastest_s = 1, 4, 0.006
    accelerate_version(options.modes)  # what is missing is said before minutes of measuring
    return options


if __name__ == "__main__":
    main()

"""One of five hosts halves its speed in mid-run, and recovers: how soon the others take over.

    sudo .venv/bin/python benchmarks/replan_lab.py --json benchmarks/results/replan_lab.json
    sudo .venv/bin/python benchmarks/replan_lab.py --quick --json /tmp/replan_lab.json

The lab and its paced hosts are those of mixed_lab.py. The real script trains three times: with
--replan auto, with --replan off, and unpaced with all samples on one rank, whose losses the
others must show. A rate is the median of a phase's last steps; beside it is the mean of the whole
phase, by the clock. The limit is that of the speeds measured at the start, with the slow host's
times doubled while it is slow. Needs root, for the lab.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import result
from bench_lab import HOSTS, BenchLab, bench_lab
from speeds import list_rates, parse_speeds

from motley.plan.plan import limit_s
from motley.plan.speeds import SpeedTable
from motley.records.costs import mean_rate

mpl.use("Agg")
import matplotlib.pyplot as plt

SLOW, FACTOR = 1, 2.0
_STEADY = 5  # steps, whose median is a throughput


def runs(lab: BenchLab, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train all three; their records."""
    rates = ",".join(map(str, list_rates(parse_speeds(options.speeds), options.fastest_s)))
    pace = ["benchmarks/paced_train.py", "--rates", rates]
    common = ["--logs", "~/logs", "--batch-size", options.n, "--no-augment", "--max-steps",
              3 * options.steps, "--precision", "fp32"]  # fmt: skip
    slow = ["--slow", f"{SLOW}:{FACTOR}:{options.steps}:{2 * options.steps}"]
    words = {
        "auto": [*pace, *slow, "--replan", "auto", "--hosts", "all"],
        "off": [*pace, *slow, "--replan", "off", "--hosts", "all"],
        "one": ["torch_dist/train_vit.py", "--shares", "1,0,0,0,0"],
    }
    for name, given in words.items():
        print(f"training: {name}", flush=True)
        for line in lab.train(*given, *common, "--run", name):
            if line.startswith(("epoch", "  rank", "the ranks")):
                print(f"  {line.strip()}", flush=True)
    return {name: lab.records(name) for name in words}


def limits(run: dict[str, Any], n: int) -> tuple[float, float]:
    """Images/s at the limit: as measured, and while the slow host is slow."""
    speeds = [SpeedTable.from_json(each) for each in run["plan"]["speeds"]]
    slow = list(speeds)
    slow[SLOW] = replace(slow[SLOW], seconds=tuple(FACTOR * s for s in slow[SLOW].seconds))
    return n / limit_s(n, speeds), n / limit_s(n, slow)


def rows(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a run and phase."""
    usual, slowed = limits(found["auto"]["run"], options.n)
    table = []
    for name in ("off", "auto"):
        rates = [step["samples_per_s"] for step in found[name]["steps"]]
        replans = [e["step"] for e in found[name]["events"] if e["event"] == "replan"]
        for phase, limit in enumerate((usual, slowed, usual)):
            first = phase * options.steps
            part = rates[first : first + options.steps]
            table.append({
                "mode": f"motley --replan {name}", "engine": "torch", "link": "unshaped",
                "phase": ("before", "one host at half speed", "restored")[phase], "n": options.n,
                "images_per_s": statistics.median(part[-_STEADY:]),
                "fraction_of_limit": statistics.median(part[-_STEADY:]) / limit,
                "mean_images_per_s": mean_rate(found[name]["steps"][first : first + options.steps]),
                "spread": (max(part[-_STEADY:]) - min(part[-_STEADY:])) / max(part[-_STEADY:]),
                "steps_to_0.93": steps_to(0.93 * limit, part),
                "replans": sum(first <= step < first + options.steps for step in replans),
            })  # fmt: skip
    return table


def steps_to(wanted: float, rates: list[float]) -> int | None:
    """Steps until the median of the next few reaches a rate; None if it never does."""
    for step in range(len(rates) - _STEADY + 1):
        if statistics.median(rates[step : step + _STEADY]) >= wanted:
            return step
    return None


def picture(found: dict[str, dict[str, Any]], options: argparse.Namespace, path: Path) -> None:
    """Images/s by step of both runs, beside the limit."""
    usual, slowed = limits(found["auto"]["run"], options.n)
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    edges = [0, options.steps, 2 * options.steps, 3 * options.steps]
    axes.stairs([usual, slowed, usual], edges, baseline=None, color="0.4", linestyle="--",
                label="limit: the sum of all hosts")  # fmt: skip
    for name, colour in (("off", "tab:orange"), ("auto", "tab:blue")):
        rates = [step["samples_per_s"] for step in found[name]["steps"]]
        axes.plot(range(len(rates)), rates, color=colour, label=f"--replan {name}")
    title = f"{HOSTS[SLOW]} halves its speed at step {edges[1]}, recovers at {edges[2]}"
    axes.set(xlabel="step", ylabel="images/s", ylim=(0, 1.15 * usual), xlim=(0, edges[-1]),
             title=title)  # fmt: skip
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    with bench_lab() as lab:
        results = runs(lab, options)
    table = rows(results, options)
    one = [step["loss"] for step in results["one"]["steps"]]
    worst = {
        name: max(abs(a["loss"] / b - 1) for a, b in zip(results[name]["steps"], one, strict=True))
        for name in ("off", "auto")
    }
    for row in table:
        steps = row["steps_to_0.93"]
        soon = "never 0.93 of it" if steps is None else f"0.93 of it after {steps} steps"
        print(
            f"{row['mode']:<22} {row['phase']:<24} {row['images_per_s']:7.1f} images/s at last "
            f"(mean {row['mean_images_per_s']:.1f})  "
            f"{row['fraction_of_limit']:.3f} of the limit  re-plans {row['replans']}  {soon}"
        )
    print(f"largest difference of a loss from one rank's: {max(worst.values()):.1e}")
    if options.json:
        picture(results, options, options.json.with_suffix(".png"))
        result.write(
            options.json, table, started, loss_difference=worst, emulation="paced",
            replans=[e for e in results["auto"]["events"] if e["event"] == "replan"],
            load_before=load,
        )  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="shorter steps, under two minutes")
    parser.add_argument("--n", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", default="7:5:3:2:1", help="of the hosts, default 7:5:3:2:1")
    parser.add_argument("--fastest-s", type=float, default=0.012, metavar="SECONDS",
                        help="a sample on the fastest host, default 0.012")  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, help="of each phase, default 40")
    options = parser.parse_args()
    if options.quick:
        options.fastest_s, options.steps = 0.004, 30
    return options


if __name__ == "__main__":
    main()

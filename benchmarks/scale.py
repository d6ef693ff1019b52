"""From 10 to 10,000 hosts: what a plan, a step and the watching of all cost the first rank.

    .venv/bin/python benchmarks/scale.py --json benchmarks/results/scale.json
    .venv/bin/python benchmarks/scale.py --quick --json /tmp/scale.json

Hosts, one rank on each, are unequal and connected by a modelled network; what is timed is real. A
plan: who trains, shares, forecast, other ways, advice, and what there is to say of the links. A
step: whether the shares still fit, as each rank asks it. Up to 1,000 ranks that only say what ranks
say, over loopback, have the real supervisor of rank 0 hear them: what it takes of a core, from
which part of its time it keeps a thread that computes in Python, as the one that trains does, and
how soon all stop when a rank is killed, or falls silent.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import result
from scale_ranks import FakeRanks

from motley.cluster.facts import Interface
from motley.cluster.network import choose_networks
from motley.comm.modes.numbers import EXACT
from motley.measure.measured_plan import balance
from motley.measure.profile import Measured
from motley.plan.advice import larger_batch
from motley.plan.evidence import LONGEST
from motley.plan.forecast import choose_machines, forecast_alternatives
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import Flow, Links, SpeedTable, rounds
from motley.plan.wire import AllReduceCost
from motley.plotting import style

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
MOST_WATCHED = 1000
PLAN_LIMITS = ((1000, 1.0), (10_000, 10.0))  # hosts, seconds
CORE_LIMIT = 0.05
PARTS = {"plan_s": "a plan", "step_s": "a step: do the shares still fit?",
         "subnet_s": "the subnet all share"}  # fmt: skip
MET = 16  # others that each host's link was measured with, as in motley.measure.link_speed
PORTS = (11.8e9, 11.8e9, 11.8e9, 1.18e9)  # bytes a second: some have 10 GbE, the rest 100
MODEL = 346e6  # bytes of ViT-B/16's gradient
HOP_S = 20e-6
LONG_S = 1.0


class Lab:
    """Modelled hosts."""

    def __init__(self, size: int) -> None:
        dice = random.Random(size)
        self.size, self.names = size, [f"host{number}" for number in range(size)]
        rates = [dice.choice((190.0, 410.0, 1200.0, 2600.0)) * dice.uniform(0.9, 1.1)
                 for _ in range(size)]  # fmt: skip
        sizes = tuple(2**power for power in range(9))
        self.speeds = tuple(
            SpeedTable(sizes, tuple(0.004 + n / rate for n in sizes), 0.006) for rate in rates
        )
        ports = [dice.choice(PORTS) for _ in range(size)]
        self.links = Links(dict(enumerate(self.names)), {
            way: Flow(min(ports[way[0]], ports[way[1]]) * dice.uniform(0.97, 1), HOP_S)
            for pairs in some_rounds(size) for a, b in pairs for way in ((a, b), (b, a))
        })  # fmt: skip
        ring_s = self.links.ring_s(MODEL, size)
        self.wire = AllReduceCost(2 * size * HOP_S, ring_s, size=MODEL)
        self.batch = 256 * size


def some_rounds(size: int) -> list[list[tuple[int, int]]]:
    """The first rounds of :func:`rounds`; of many hosts by neighbours, which costs no hour."""
    if size <= 300:
        return rounds(range(size))[:MET]
    return [[(host, (host + far) % size) for host in range(size)] for far in range(1, MET // 2 + 1)]


def seconds(work: Callable[[], object]) -> float:
    """Processor time, for other programs may run; the middle of three, of what is short."""
    took: list[float] = []
    while len(took) < 3 and sum(took) < LONG_S:
        begin = time.process_time()
        work()
        took.append(time.process_time() - begin)
    return statistics.median_low(took)


def plan(lab: Lab) -> dict[str, Any]:
    """What the plan of a job costs, part by part, and what it says."""
    everyone = range(lab.size)
    job = lab.batch, everyone, lab.speeds, lab.wire, lab.links
    parts = {
        "choose_s": seconds(lambda: choose_machines(*job)),
        "what_if_s": seconds(lambda: forecast_alternatives(job[0], lab.names, *job[1:])),
        "advice_s": seconds(lambda: larger_batch(job[0], lab.names, *job[1:])),
        "remarks_s": seconds(lab.links.remarks),
    }
    measured = Measured(lab.speeds, {EXACT: lab.wire}, lab.links)
    parts["balance_s"] = seconds(lambda: balance(lab.batch, measured))
    made = balance(lab.batch, measured)
    parts["micro_batches_s"] = seconds(lambda: made.plan.micro_batches)
    forecast = made.forecast
    assert forecast is not None
    return {
        "n": lab.batch, "plan_s": sum(parts.values()), **parts, "images_per_s":
        forecast.samples_per_s, "fraction_of_limit": forecast.limit_s / forecast.step_s,
    }  # fmt: skip


def watch_steps(lab: Lab) -> dict[str, float]:
    """What a step asks of each rank: whether the shares still fit."""
    counts = balance(lab.batch, Measured(lab.speeds, {EXACT: lab.wire}, lab.links)).plan.counts
    monitor, dice = ReplanMonitor(lab.speeds, range(lab.size)), random.Random(1)
    usual = [s.compute_seconds(n) - s.step_s for s, n in zip(lab.speeds, counts, strict=True)]
    took = []
    for _ in range(2 * LONGEST):
        ready = [each * dice.uniform(0.97, 1.03) for each in usual]
        begin = time.process_time()
        monitor.step(ready, counts)
        took.append(time.process_time() - begin)
    # Noise is estimated every 32 steps, and long windows are looked at less often than short ones.
    return {"step_s": statistics.mean(took[LONGEST:]), "longest_step_s": max(took[LONGEST:])}


def start(lab: Lab) -> dict[str, float]:
    """What each rank does with the facts of all hosts: finds the subnet that they share."""
    interfaces = {
        host: [Interface("docker0", "172.17.0.1", 16),
               Interface("eth0", f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}", 8)]
        for host in range(lab.size)
    }  # fmt: skip
    names = dict(enumerate(lab.names))
    return {"subnet_s": seconds(lambda: choose_networks(interfaces, names, {}))}


def watch_ranks(size: int, quick: bool) -> dict[str, Any]:
    """What rank 0's supervisor costs, and how soon it ends a job."""
    with FakeRanks(size) as ranks:
        results = {**ranks.joined, **ranks.cost(5 if quick else 20)}
        results["killed_s"], results["killed_said"] = ranks.end_by_death(size // 2)
    if size == MOST_WATCHED and not quick:
        with FakeRanks(size) as ranks:
            results["silent_s"], results["silent_said"] = ranks.end_by_silence(size // 2)
    return results


def row(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """All of one size."""
    lab = Lab(size)
    results = {
        "mode": f"motley, {size} hosts", "engine": "torch", "link": "modelled", "hosts": size,
        **plan(lab), **watch_steps(lab), **start(lab),
    }  # fmt: skip
    if size <= MOST_WATCHED:
        results |= watch_ranks(size, options.quick)
    return results


def show(each: dict[str, Any]) -> None:
    """A line for a terminal."""
    watched = ""
    if "core" in each:
        watched = (
            f"; beats {each['core']:.1%} of a core, which keep a thread that computes from "
            f"{each['kept_from']:.1%} of its time, {each['files']} files, a killed rank ends all "
            f"in {each['killed_s']:.2f} s"
        )
    if "silent_s" in each:
        watched += f", a silent one in {each['silent_s']:.1f} s"
    print(
        f"{each['hosts']:6,} hosts: plan {each['plan_s']:.3f} s, each step "
        f"{1e3 * each['step_s']:.2f} ms{watched}", flush=True,
    )  # fmt: skip


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and parts of a core by the number of hosts, each beside what it may be."""
    figure, (times, core) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    hosts = [each["hosts"] for each in rows]
    for number, (name, words) in enumerate(PARTS.items()):
        times.plot(hosts, [each[name] for each in rows], marker="o", markersize=3.5, label=words,
                   color=style.HOST_COLOURS[number])  # fmt: skip
    times.plot(*zip(*PLAN_LIMITS, strict=True), "k_", markersize=14, label="a plan may take")
    times.set(title="Processor time", ylabel="seconds", yscale="log", ylim=(1e-4, 300))
    times.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    times.legend(loc="upper left", ncols=2)
    watched = [each for each in rows if "core" in each]
    core.plot([each["hosts"] for each in watched], [100 * each["core"] for each in watched],
              marker="o", markersize=3.5, color=style.HOST_COLOURS[0])  # fmt: skip
    core.axhline(100 * CORE_LIMIT, color="black", linestyle="--", linewidth=1)
    core.text(hosts[0], 100 * CORE_LIMIT, "the most that it may be", va="bottom", fontsize=8)
    core.set(title="Rank 0 hears all others", ylabel="% of one core", ylim=(0, 110 * CORE_LIMIT))
    for axes in (times, core):
        axes.set(xscale="log", xlabel="hosts, one rank on each")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure each size, show, write."""
    options = arguments()
    started, rows = time.time(), []
    for size in (10, 100, 1000) if options.quick else SIZES:
        rows.append(row(size, options))
        show(rows[-1])
    if options.json:
        result.write(options.json, rows, started)
        picture(rows, options.json.with_suffix(".png"))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="three sizes, up to 1,000 hosts")
    return parser.parse_args()


if __name__ == "__main__":
    main()

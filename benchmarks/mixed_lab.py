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
and after each repeat, on all hosts at once. Rates are medians; a spread is (largest -
smallest) / median; stolen is what the hypervisor gave to others meanwhile. Needs root, for the
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
from pathlib import Path

import bars
from bench_lab import HOSTS, ROOT, BenchLab, bench_lab

sys.path.insert(0, str(ROOT / "src"))

from motley.runs import commit, versions

_QUOTAS = 0.9  # of all processors, over all hosts
_QUOTAS_PIXELS = 32  # larger images: what a step costs beside them is little
MODES = ("plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1", "motley-ddp",
         "motley-deepspeed-0", "motley-deepspeed-1")  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run the job; returns what its first rank measured."""
    words = [
        "--n", options.n, "--speeds", options.speeds, "--fastest-s", options.fastest_s, "--steps",
        options.steps, "--repeats", options.repeats, "--modes", ",".join(options.modes),
    ]  # fmt: skip
    if options.emulation == "quotas":
        words += ["--emulation", "quotas", "--img-size", _QUOTAS_PIXELS]
    results = []
    with bench_lab() as lab:
        for line in lab.train("benchmarks/mixed_rank.py", *words):
            kind, _, content = line.partition(" ")
            if line == "READY\n":
                give_quotas(lab, options)
            if kind == "RESULT":
                result = json.loads(content)
                results.append(result)
                print(f"  repeat {result['repeat'] + 1} of {options.repeats}: {result['mode']:<20} "
                      f"{result['step_s']:.3f} s a step, {result['stolen']:.1%} of the "
                      "processors stolen", flush=True)  # fmt: skip
    return results


def give_quotas(lab: BenchLab, options: argparse.Namespace) -> None:
    """Each host its part of this machine's processors, in proportion to its speed."""
    speeds = [float(word) for word in options.speeds.split(":")]
    whole = _QUOTAS * (os.cpu_count() or 1)
    for host, speed in zip(HOSTS, speeds, strict=True):
        lab.do("cpus", host, f"{whole * speed / sum(speeds):.3f}", stdout=subprocess.DEVNULL)


def table(results: list[dict[str, object]], options: argparse.Namespace) -> list[dict[str, object]]:
    """One row a mode, and the limit."""
    times: dict[str, list[float]] = defaultdict(list)
    predicted: dict[str, list[float]] = defaultdict(list)
    laps = {str(result["mode"]): result["laps"] for result in results if "laps" in result}
    for result in results:
        times[str(result["mode"])].append(float(result["step_s"]))
        if "predicted_s" in result:
            predicted[str(result["mode"])].append(float(result["predicted_s"]))
    stolen = {mode: [r["stolen"] for r in results if r["mode"] == mode] for mode in times}
    limit = statistics.median(times["limit"])
    plain = statistics.median(times["plain-ddp"]) if "plain-ddp" in times else None
    speeds = [float(word) for word in options.speeds.split(":")]
    single = statistics.median(float(r["alone_s"]) for r in results if r["mode"] == "limit")
    rows = []
    for mode, seconds in times.items():
        middle = statistics.median(seconds)
        forecast = statistics.median(predicted[mode]) if mode in predicted else None
        rows.append({
            "mode": mode, "engine": "deepspeed" if "deepspeed" in mode else "torch",
            "link": "unshaped", "n": options.n, "speeds": speeds,
            "images_per_s": options.n / middle,
            "fraction_of_limit": limit / middle, "times_plain_ddp": plain and plain / middle,
            "times_best_single": single / middle,
            "spread": (max(seconds) - min(seconds)) / middle, "step_s": middle,
            "predicted_s": forecast, "prediction_error": forecast and forecast / middle - 1,
            "repeats": seconds, "stolen": stolen[mode], "laps": laps.get(mode),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """The table, for a terminal."""
    heads = f"{'images/s':>9} {'of limit':>9} {'x plain DDP':>12} {'spread':>7} {'predicted':>10}"
    print(f"\n{'':<20} {heads}")
    for row in rows:
        error, times = row["prediction_error"], row["times_plain_ddp"]
        print(
            f"{row['mode']:<20} {row['images_per_s']:9.1f} {row['fraction_of_limit']:9.3f} "
            f"{'' if times is None else format(times, '12.2f'):>12} {row['spread']:7.1%} "
            f"{'' if error is None else format(error, '+10.1%'):>10}"
        )


def main() -> None:
    """Measure, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    rows = table(measure(options), options)
    show(rows)
    if options.json:
        packages = {name: importlib.metadata.version(name) for name in ("accelerate",)}
        content = {
            "rows": rows, "versions": {**versions(), **packages}, "commit": commit(),
            "command": " ".join(["python", *sys.argv]), "emulation": options.emulation,
            "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
            "seconds": time.time() - started,
            "cores": os.cpu_count(), "load_before": load,
        }  # fmt: skip
        title = f"Five hosts, {options.speeds}, N = {options.n}, {options.emulation}"
        bars.draw(rows, title, options.json.with_suffix(".png"))
        options.json.write_text(json.dumps(content, indent=1) + "\n")


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
    parser.add_argument("--fastest-s", type=float, default=0.024, metavar="SECONDS",
                        help="a sample on the fastest host, default 0.024")  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="of ours timed a block, default 6")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES),
                        help=f"default: {','.join(MODES)}")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.fastest_s = 1, 4, 0.006
    return options


if __name__ == "__main__":
    main()

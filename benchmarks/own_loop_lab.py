"""A loop of one's own on five unequal hosts, beside the same model as a task, in turn.

    sudo .venv/bin/python benchmarks/own_loop_lab.py --json benchmarks/results/own_loop_lab.json
    sudo .venv/bin/python benchmarks/own_loop_lab.py --quick --json /tmp/own_loop_lab.json

Makes a lab (lab/unshaped.toml: five hosts, real ssh, gloo over TCP), whose hosts are paced as in
mixed_lab.py. Both ways start without any shares and find theirs. A rate is that of the steps after
the first ones (--settle), with the whole loop: loader, records, another choice of shares. The
limit is the sum of the paced hosts. The losses of the loop are held against one process that is not
paced, also of a run in which a host is cut off. Equal shares, by hand, are what other tools do.
Needs root, for the lab.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import result
from bench_lab import HOSTS, BenchLab, bench_lab
from result import ROOT
from speeds import list_rates, parse_speeds

LOST = HOSTS[3]  # the host that is cut off
WAYS = ("own loop", "task", "own loop, equal shares")


def train(lab: BenchLab, words: list[Any], verbose: bool, **more: Any) -> None:
    """Run a job of all hosts, and print what it prints if ``verbose``."""
    for line in lab.train(*words, **more):
        if verbose:
            print(f"    {line.rstrip()}")


def run(lab: BenchLab, way: str, name: str, options: argparse.Namespace) -> float:
    """Train one way; return its seconds per step after the first steps."""
    follows = way != WAYS[2]
    steps, settle = (options.steps, options.settle) if follows else (10, 2)
    rates = join_rates(options)
    if way == "task":
        words = ["benchmarks/paced_train.py", "--rates", rates, "--batch-size", options.n,
                 "--no-augment", "--max-steps", steps, "--precision", "fp32", "--hosts", "all",
                 "--logs", "~/logs", "--run", name, "--eval-samples", 10]  # fmt: skip
    else:
        words = ["benchmarks/own_loop_paced.py", "--rates", rates, "--n", options.n,
                 "--steps", steps, "--logs", "~/logs", "--run", name]  # fmt: skip
    shares = {} if follows else {"MOTLEY_SHARES": "1,1,1,1,1"}
    train(lab, words, options.verbose, environment=shares)
    records = [each for each in lab.records(name)["steps"] if each["n_global"] == options.n]
    last = records[settle:]
    return float((last[-1]["time"] - last[0]["time"]) / (last[-1]["step"] - last[0]["step"]))


def lose_host(lab: BenchLab, name: str, options: argparse.Namespace) -> int:
    """Cut a host off in the middle of a step; return the number of finished steps that are lost."""

    def cut() -> None:
        steps = f"cat ~/logs/{name}/steps.rank0.jsonl 2>/dev/null | wc -l"
        while int(lab.on_head(steps)) < options.steps // 2:
            time.sleep(0.2)
        lab.do("cut", LOST, stdout=subprocess.DEVNULL)

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    words = ["benchmarks/own_loop_paced.py", "--rates", join_rates(options), "--n", options.n,
             "--steps", options.steps]  # fmt: skip
    variables = {"MOTLEY_RUN": name, "MOTLEY_LOGS": "$HOME/logs"}
    train(lab, words, options.verbose, environment=variables, keeps=True)
    thread.join()
    lab.do("heal", LOST, stdout=subprocess.DEVNULL)
    steps = [each["step"] for each in lab.records(name)["steps"]]
    assert {*steps} == {*range(options.steps)}, steps
    return len(steps) - options.steps


def join_rates(options: argparse.Namespace) -> str:
    """Return the rows per second of all hosts, as the scripts read them."""
    return ",".join(map(str, list_rates(options.speeds, options.fastest_s)))


def compare_losses(lab: BenchLab, name: str, options: argparse.Namespace) -> float:
    """Return the largest relative difference of the loop's losses from those of one process."""
    one = Path(f"/tmp/own_loop_lab_{os.getpid()}.json")
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "own_loop_paced.py", "--n", str(options.n),
         "--steps", str(options.steps), "--losses", one],
        check=True, cwd="/tmp", stdout=subprocess.DEVNULL,
    )  # fmt: skip
    losses = {each["step"]: each["loss"] for each in lab.records(name)["steps"]}
    expected = json.loads(one.read_text())
    one.unlink()
    return max(abs(losses[step] / loss - 1) for step, loss in enumerate(expected))


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=180, help="global batch, default 180")
    parser.add_argument("--speeds", type=parse_speeds, default="7:5:3:2:1",
                        help="of the hosts, default 7:5:3:2:1")  # fmt: skip
    parser.add_argument("--fastest-s", type=float, default=0.024, metavar="SECONDS",
                        help="a sample on the fastest host, default 0.024")  # fmt: skip
    parser.add_argument("--steps", type=int, default=50, help="of a run, default 50")
    parser.add_argument("--settle", type=int, default=20, help="steps not timed, default 20")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat of shorter steps")
    parser.add_argument("--verbose", action="store_true", help="print the output of the runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.fastest_s = 1, 0.006
    started, load = time.time(), os.getloadavg()
    limit = options.n / sum(list_rates(options.speeds, options.fastest_s))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with bench_lab() as lab:
        for repeat in range(options.repeats):
            for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
                name = f"{way.replace(' ', '_').replace(',', '')}_{repeat}"
                seconds[way].append(run(lab, way, name, options))
                print(f"  repeat {repeat + 1}: {way}: {seconds[way][-1]:.3f} s a step, "
                      f"{limit / seconds[way][-1]:.3f} of the limit", flush=True)  # fmt: skip
        apart = compare_losses(lab, "own_loop_0", options)
        repeated = lose_host(lab, "cut_off", options)
        apart_cut = compare_losses(lab, "cut_off", options)
    rows: list[dict[str, Any]] = []
    for way, each in seconds.items():
        step_s = statistics.median(each)
        rows.append({
            "way": way, "n": options.n, "step_s": step_s, "fraction_of_limit": limit / step_s,
            "of_task": statistics.median(seconds["task"]) / step_s,
            "times_equal": statistics.median(seconds[WAYS[2]]) / step_s,
            "spread": (max(each) - min(each)) / step_s, "repeats": each,
        })  # fmt: skip
        print(
            f"{way:<24}{step_s:7.3f} s a step  {limit / step_s:.3f} of the limit  "
            f"{rows[-1]['of_task']:.3f} of the task  spread {rows[-1]['spread']:.1%}"
        )
    print(f"largest difference of a loss from one process: {apart:.1e}")
    print(f"{LOST} cut off in the middle: {repeated} steps lost, losses {apart_cut:.1e} apart")
    if options.json:
        result.write(options.json, rows, started, speeds=options.speeds, limit_s=limit,
                     load_before=load, loss_difference=apart, steps_lost=repeated,
                     loss_difference_cut=apart_cut, emulation="paced")  # fmt: skip


if __name__ == "__main__":
    main()

"""Does what a run advises come true? The real lab of lab/tesla.toml trains on all five machines,
exactly, as its people did but with measured shares; then each of the best pieces of advice of that
run is carried out, and its gain is held against what was foreseen.

    sudo .venv/bin/python benchmarks/advice.py --json benchmarks/results/advice.json
    sudo .venv/bin/python benchmarks/advice.py --quick --json /tmp/advice.json

The lab is the one of tesla_replay.py: GPUs paced to its log's figures, links as its all-reduces
show them. Repeats are interleaved. Needs root, for the lab.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import result
from bench_lab import BenchLab, bench_lab
from tesla_replay import Case, Replay

from motley.plan.advice import Advice

_FACTS = result.ROOT / "lab" / "tesla_lab.json"
_PLAIN = "as it was"
_FIRST_STEPS = 10  # fewer say nothing of a run
_LAST_LINES = 9  # of a run: what it reached, and what it advises


def carried_out(case: Case, option: str) -> Case:
    """The same with what was advised: in place of what it had of that option, if anything."""
    name, _, value = option.partition(" ")
    if name == "--batch-size":
        return replace(case, n=int(value))
    words, times = re.subn(rf"{name} \S+", option, case.words)
    return replace(case, words=words if times else f"{words} {option}")


def advice_of(run: dict[str, Any], most: int) -> list[Advice]:
    """The best that a user can follow, the largest gain first."""
    entries = [Advice.from_json(each) for each in run["advice"]]
    with_gain = [each for each in entries if each.option and each.times]
    return sorted(with_gain, key=lambda each: -(each.times or 0))[:most]


def measure(lab: BenchLab, replay: Replay, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for the plain run, and one a piece of advice."""
    plain = Case(options.batch_size, "--hosts all --wire exact")
    first = replay.run(lab, plain, "first", _FIRST_STEPS)
    advice = advice_of(first, options.most)
    print("".join(first["said"][-_LAST_LINES:]), end="")
    print("\n".join(f"advice: {each.option}: {each.times:.2f} times" for each in advice))
    cases = {_PLAIN: plain, **{each.option: carried_out(plain, each.option) for each in advice}}
    rates = defaultdict[str, list[float]](list)
    for repeat in range(options.repeats):
        for place, (name, case) in enumerate([*cases.items()][:: -1 if repeat % 2 else 1]):
            run = replay.run(lab, case, f"r{repeat}c{place}", options.steps)
            rates[name].append(case.n / run["step_s"])
            print(f"  repeat {repeat + 1} of {options.repeats}: {name:<60} "
                  f"{rates[name][-1]:6.1f} images/s", flush=True)  # fmt: skip
    middle = {name: statistics.median(results) for name, results in rates.items()}
    foreseen = {each.option: each.times for each in advice}
    return [
        {
            "mode": f"motley, {name}", "engine": "torch", "link": "tesla", "n": cases[name].n,
            "images_per_s": middle[name], "repeats": rates[name],
            "spread": (max(rates[name]) - min(rates[name])) / middle[name],
            "times": middle[name] / middle[_PLAIN], "foreseen_times": foreseen.get(name),
        }
        for name in cases
    ]  # fmt: skip


def main() -> None:
    """Measure, show, write."""
    options = arguments()
    started = time.time()
    replay = Replay(_FACTS, options.slower)
    with bench_lab(replay.profile) as lab:
        rows = measure(lab, replay, options)
    for row in rows:
        expected = row["foreseen_times"]
        off = (
            f"  foreseen {expected:.2f}, off by {expected / row['times'] - 1:+.1%}"
            if expected
            else ""
        )
        print(f"{row['mode']:<70} {row['images_per_s']:7.1f} images/s  {row['times']:.2f} times, "
              f"spread {row['spread']:.1%}{off}")  # fmt: skip
    if options.json:
        result.write(options.json, rows, started, slower=options.slower)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one repeat of 3 steps")
    parser.add_argument("--batch-size", type=int, default=80, help="default 80, as in the lab")
    parser.add_argument("--most", type=int, default=3, help="pieces of advice, default 3")
    parser.add_argument("--slower", type=float, default=2.0, metavar="TIMES", help="default 2")
    parser.add_argument("--steps", type=int, default=4, help="timed in each run, default 4")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps = 1, 3
    return options


if __name__ == "__main__":
    main()

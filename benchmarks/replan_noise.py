"""Re-planning under simulated noise: moves, step time against fixed shares, delay of a move.

    .venv/bin/python benchmarks/replan_noise.py --json benchmarks/results/replan_noise.json
    .venv/bin/python benchmarks/replan_noise.py --quick --json /tmp/replan_noise.json

Step times are simulated (tests/support/step_times.py), and both ways to share meet the same noise
in each of some seeded repeats. A monitor of another commit runs beside the present one, if given:

    git show COMMIT:src/motley/plan/replan.py > /tmp/before.py
    .venv/bin/python benchmarks/replan_noise.py --before /tmp/before.py
"""

import argparse
import importlib.util
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import result

sys.path.append(str(result.ROOT / "tests" / "support"))
from step_times import (
    Scenario,
    alternating,
    bursts,
    drifting,
    heavy_tails,
    lognormal,
    simulate,
    slower,
    speed,
    stalls,
)

from motley.plan.plan import split
from motley.plan.replan import Device, ReplanMonitor

FIRST_SEED = 10_000  # the monitor's constants were chosen with smaller seeds
CHANGE = 100  # step at which a rank takes twice as long
FIVE = (0.001, 0.0014, 0.0023, 0.0035, 0.007)  # seconds per sample: 7:5:3:2:1


@dataclass(frozen=True)
class Case:
    """A scenario and its length in steps.

    Attributes:
        change: step of a change that the shares should follow; 0 for none.
        alternates: the better of two fixed splits is compared: for a rank that is slow, or not.
    """

    scenario: Scenario
    steps: int = 1000
    change: int = 0
    alternates: bool = False


def cases() -> dict[str, Case]:
    """Return all scenarios by name."""

    def equal(ranks: int, noise: Any, **more: Any) -> Scenario:
        return Scenario((0.002,) * ranks, noise, batch=40 * ranks, **more)

    gpus = [Device(rank, "GPU") for rank in range(4)]
    results = {}
    for ranks in (2, 4, 5, 16):
        results |= {
            f"{ranks} equal, 30 % noise": Case(equal(ranks, lognormal(0.3))),
            f"{ranks} equal, 30 % noise, heavy tails, drift": Case(
                equal(ranks, drifting(heavy_tails(0.3)))
            ),
        }
    results |= {
        "4 equal GPUs, waits of 30 % for input": Case(
            equal(4, lognormal(0.05), stall=stalls(0.024), kinds=gpus), 500
        ),
        "4 equal GPUs, waits of 100 % for input": Case(
            equal(4, lognormal(0.05), stall=stalls(0.08), kinds=gpus), 500
        ),
        "4 equal GPUs, noise that lasts 10 steps": Case(equal(4, bursts(0.3, 0.5), kinds=gpus)),
        "7:5:3:2:1, 30 % noise": Case(Scenario(FIVE, lognormal(0.3))),
        "4 equal, one takes 160 ms for any share": Case(
            equal(4, lognormal(0.03), floor_s={1: 0.16})
        ),
    }
    slow, two = slower(1, 2, CHANGE), slower(1, 2, CHANGE, 2 * CHANGE)
    results |= {
        "2 equal, one halves its speed": Case(equal(2, lognormal(0.03), change=slow), 300, CHANGE),
        "4 equal, one halves its speed": Case(equal(4, lognormal(0.03), change=slow), 300, CHANGE),
        "16 equal, one halves its speed": Case(
            equal(16, lognormal(0.05), change=slow), 300, CHANGE
        ),
        "7:5:3:2:1, one halves its speed, recovers": Case(
            Scenario(FIVE, lognormal(0.05), two), 300, CHANGE
        ),
        "4 equal, 30 % noise, one halves its speed": Case(
            equal(4, lognormal(0.3), change=slow), 300, CHANGE
        ),
    }
    for ranks in (2, 4, 5, 16):
        results[f"{ranks} equal, one alternates every 30 steps"] = Case(
            equal(ranks, lognormal(0.03), change=alternating(1, 2, 30)), 600, alternates=True
        )
    return results


def fixed_s(case: Case, seed: int) -> float:
    """Return the mean step with fixed shares."""
    scenario = case.scenario
    results = float(simulate(scenario, case.steps, seed, None).seconds.mean())
    if not case.alternates:
        return results
    tables = [speed(each) for each in scenario.samples_s]
    slow = split(scenario.batch, [tables[0], tables[1].slower(2), *tables[2:]])
    other = simulate(replace(scenario, counts=slow), case.steps, seed, None)
    return min(results, float(other.seconds.mean()))


def row(name: str, case: Case, mode: str, monitor: Any, repeats: int) -> dict[str, Any]:
    """Simulate one scenario with one monitor."""
    seeds = range(FIRST_SEED, FIRST_SEED + repeats)
    runs = [simulate(case.scenario, case.steps, seed, monitor) for seed in seeds]
    parts = [
        float(run.seconds.mean()) / fixed_s(case, seed)
        for seed, run in zip(seeds, runs, strict=True)
    ]
    moves = [len(run.moves) for run in runs]
    results = {
        "mode": mode, "scenario": name, "steps": case.steps, "repeats": repeats,
        "moves": statistics.mean(moves), "most_moves": max(moves),
        "above_one_move": sum(count > 1 for count in moves),
        "taken_back": statistics.mean(run.taken_back for run in runs),
        "of_fixed_shares": statistics.mean(parts), "worst_of_fixed_shares": max(parts),
    }  # fmt: skip
    if case.change:
        delays = [
            next((step - case.change for step, _ in run.moves if step > case.change), case.steps)
            for run in runs
        ]
        results |= {"delay_steps": statistics.median(delays), "longest_delay_steps": max(delays)}
    return results


def show(each: dict[str, Any]) -> None:
    """Print a row."""
    delay = ""
    if "delay_steps" in each:
        delay = f"  follows after {each['delay_steps']:g} (at most {each['longest_delay_steps']})"
    print(
        f"{each['scenario']:<46} {each['mode']:<7} moves {each['moves']:6.2f} (at most "
        f"{each['most_moves']:3}) in {each['steps']:4}  time of fixed shares "
        f"{each['of_fixed_shares']:.3f} (at most {each['worst_of_fixed_shares']:.3f}){delay}",
        flush=True,
    )


def load_monitor(path: Path) -> Any:
    """Return the monitor of another commit."""
    spec = importlib.util.spec_from_file_location("replan_before", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module.ReplanMonitor


def main() -> None:
    """Simulate, show, write."""
    options = arguments()
    started, rows = time.time(), []
    monitors = {"before": load_monitor(options.before)} if options.before else {}
    monitors["motley"] = ReplanMonitor
    for name, case in cases().items():
        for mode, monitor in monitors.items():
            rows.append(row(name, case, mode, monitor, 2 if options.quick else options.repeats))
            show(rows[-1])
    if options.json:
        result.write(options.json, rows, started)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two repeats")
    parser.add_argument("--repeats", type=int, default=50, help="per scenario, default 50")
    parser.add_argument("--before", type=Path, metavar="FILE", help="replan.py of another commit")
    return parser.parse_args()


if __name__ == "__main__":
    main()

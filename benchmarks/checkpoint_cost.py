"""What a checkpoint a minute costs: ViT-B on two CPU ranks, with saves and without.

    .venv/bin/python benchmarks/checkpoint_cost.py --json benchmarks/results/checkpoint_cost.json
    .venv/bin/python benchmarks/checkpoint_cost.py --quick --json /tmp/checkpoint_cost.json

Trains with the real script on synthetic images, in interleaved pairs: one run saves every --every,
its neighbour never does. A checkpoint's cost is what the steps from the first save to the last took
longer than the same steps of the neighbour, for each save but the last: so that whole periods are
compared, with all that a save does to later steps, which a thread that hashes and writes runs
beside. By the mean: a median of steps would hide it. What it costs a minute does not depend on
--every, so that a short run may save more often. A second figure compares with the run's own median
step, in place of a neighbour's, which another program may have slowed down.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run

MINUTE_S = 60.0


def train(options: argparse.Namespace, every: str, logs: Path) -> tuple[list[float], list[int]]:
    """One run: when each step ended, seconds, and after how many steps it was saved."""
    folder = real_run(
        2, "torch_dist/train_vit.py", logs, "--dataset", "synthetic", "--model", options.model,
        "--batch-size", options.n, "--precision", "fp32", "--wire", "exact", "--shares", "equal",
        "--eval-images", 2, "--max-steps", options.steps, "--save-every", every, "--keep", 1000,
    )  # fmt: skip
    names = (path.name for path in (folder / "checkpoints").glob("step_*"))
    saves = sorted(int(name.removeprefix("step_")) for name in names)
    return [step["time"] for step in lines_of(folder / "steps.rank0.jsonl")], saves


def cost(times: list[float], saves: list[int], without: list[float]) -> dict[str, float]:
    """Of a run that saves, beside its neighbour.

    Args:
        times, without: when each step ended, of the two.

    Returns:
        Seconds of a step and of a checkpoint, and what this would be of each minute.
    """
    within = [step for step in saves if 0 < step < len(times)]  # the last is made at the end
    if len(within) < 2:
        raise SystemExit(f"only {len(within)} saves in mid-run: give more --steps, or less --every")
    first, last = within[0] - 1, within[-1] - 1
    periods, steps = len(within) - 1, last - first
    took, beside = times[last] - times[first], without[last] - without[first]
    own = steps * statistics.median(after - before for before, after in pairwise(times))
    return {
        "saves": periods, "steps": steps, "step_s": took / steps, "step_without_s": beside / steps,
        "checkpoint_s": (took - beside) / periods, "checkpoint_by_own_median_s":
        (took - own) / periods, "of_a_minute": (took - beside) / periods / MINUTE_S,
        "of_a_minute_by_own_median": (took - own) / periods / MINUTE_S,
        "stopped_s": statistics.mean(
            times[step] - times[step - 1] - own / steps for step in within
        ),
    }  # fmt: skip


def row(pairs: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    """All pairs together."""
    middle = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    shares = [pair["of_a_minute"] for pair in pairs]
    return {
        "mode": f"--save-every {options.every}", "engine": "torch", "link": "loopback",
        "n": options.n, "model": options.model, **middle,
        "images_per_s": options.n / middle["step_s"],
        "images_per_s_without": options.n / middle["step_without_s"],
        "mean_of_a_minute": statistics.mean(shares), "spread": max(shares) - min(shares),
        "pairs": pairs,
    }  # fmt: skip


def main() -> None:
    """Train the pairs, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    pairs = []
    for pair in range(options.pairs):
        order = (options.every, str(10**9))
        found = {}
        for every in order if pair % 2 == 0 else order[::-1]:
            with tempfile.TemporaryDirectory() as logs:  # checkpoints take gigabytes
                found[every] = train(options, every, Path(logs))
        pairs.append(cost(*found[order[0]], found[order[1]][0]))
        each = pairs[-1]
        print(
            f"pair {pair + 1} of {options.pairs}: a step {each['step_s']:.2f} s, without saves "
            f"{each['step_without_s']:.2f} s; a checkpoint {each['checkpoint_s']:.2f} s, "
            f"{each['of_a_minute']:.2%} of a minute; by its own median step "
            f"{each['checkpoint_by_own_median_s']:.2f} s, {each['of_a_minute_by_own_median']:.2%}",
            flush=True,
        )
    found_row = row(pairs, options)
    print(
        f"one checkpoint a minute costs {found_row['of_a_minute']:.2%} of the time (median of "
        f"{len(pairs)}; spread {found_row['spread']:.2%}); {found_row['stopped_s']:.2f} s of it "
        "all ranks wait"
    )
    if options.json:
        result.write(options.json, [found_row], started, load_before=load)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one pair of a smaller model")
    parser.add_argument("--model", default="vit_base_patch32_224", help="timm name, default "
                        "vit_base_patch32_224: of ViT-B/16's size, with shorter steps")  # fmt: skip
    parser.add_argument("--n", type=int, default=4, help="global batch, default 4")
    parser.add_argument("--every", default="20s", help="between saves, default 20s")
    parser.add_argument("--steps", type=int, default=50, help="of each run, default 50")
    parser.add_argument("--pairs", type=int, default=2, help="default 2")
    options = parser.parse_args()
    if options.quick:
        options.model, options.every, options.pairs = "vit_small_patch32_224", "6s", 1
    return options


if __name__ == "__main__":
    main()

"""What a checkpoint a minute costs: ViT-L on a GPU, or ViT-B on two CPU ranks; with saves, without.

    .venv/bin/python benchmarks/checkpoint_cost.py --json benchmarks/results/checkpoint_cost.json
    .venv/bin/python benchmarks/checkpoint_cost.py --quick --json /tmp/checkpoint_cost.json

Trains with the real script on synthetic images, in interleaved pairs: one run saves after as many
steps as take --every, its neighbour never does. A checkpoint's cost is what the steps from the
first save to the last took longer than the same steps of the neighbour, for each save but the last:
so that whole periods are compared, with all that a save does to later steps, which a thread that
writes and hashes runs beside. By the mean: a median of steps would hide it. What it costs a minute
does not depend on --every, so that a short run may save more often. A second figure compares with
the run's own median step, in place of a neighbour's, which another program may have slowed down.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run
from single_gpu import machine

MINUTE_S = 60.0


def train(options: argparse.Namespace, every: int, logs: Path) -> list[float]:
    """One run, saved after every so many steps: when each step ended, seconds."""
    folder = real_run(
        options.ranks, "torch_dist/train_vit.py", logs, "--dataset", "synthetic",
        "--model", options.model, "--batch-size", options.n, "--precision", options.precision,
        "--wire", "exact", "--shares", "equal", "--compile", "off", "--lr", 1e-5,
        "--eval-images", 2, "--max-steps", options.steps, "--save-every", every,
    )  # fmt: skip
    shutil.rmtree(folder / "checkpoints")  # gigabytes
    return [step["time"] for step in lines_of(folder / "steps.rank0.jsonl")]


def mean_step_s(times: list[float]) -> float:
    """Seconds, by the clock."""
    return (times[-1] - times[0]) / (len(times) - 1)


def cost(times: list[float], every: int, without: list[float]) -> dict[str, float]:
    """Of a run that saves after every so many steps, beside its neighbour.

    Args:
        times, without: when each step ended, of the two.

    Returns:
        Seconds of a step and of a checkpoint, and what this would be of each minute.
    """
    within = [*range(every, len(times), every)]
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


def row(pairs: list[dict[str, float]], every: int, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs together."""
    middle = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    shares = [pair["of_a_minute"] for pair in pairs]
    return {
        "mode": f"--save-every {every}", "engine": "torch", "link": "loopback",
        "n": options.n, "model": options.model, "precision": options.precision,
        "ranks": options.ranks, **middle,
        "images_per_s": options.n / middle["step_s"],
        "images_per_s_without": options.n / middle["step_without_s"],
        "mean_of_a_minute": statistics.mean(shares), "spread": max(shares) - min(shares),
        "pairs": pairs,
    }  # fmt: skip


def main() -> None:
    """Train the pairs, show, write."""
    options = arguments()
    started, load = time.time(), os.getloadavg()
    pairs, every = list[dict[str, float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            results = {}
            for saves in (False, True) if pair % 2 == 0 else (True, False):
                results[saves] = train(options, every if saves else 10**9, Path(folder))
                every = every or max(1, round(options.every / mean_step_s(results[False])))
            pairs.append(cost(results[True], every, results[False]))
            show(pair, pairs[-1], options.pairs)
    found_row = row(pairs, every, options)
    print(
        f"one checkpoint a minute costs {found_row['of_a_minute']:.2%} of the time (median of "
        f"{len(pairs)}; spread {found_row['spread']:.2%}); the step after one takes "
        f"{found_row['stopped_s']:.2f} s more than a usual one, the wait for it included"
    )
    if options.json:
        result.write(options.json, [found_row], started, load_before=load, machine=machine())


def show(pair: int, each: dict[str, float], pairs: int) -> None:
    """A line for a terminal."""
    print(
        f"pair {pair + 1} of {pairs}: a step {each['step_s']:.3f} s, without saves "
        f"{each['step_without_s']:.3f} s; a checkpoint {each['checkpoint_s']:.2f} s, "
        f"{each['of_a_minute']:.2%} of a minute; by its own median step "
        f"{each['checkpoint_by_own_median_s']:.2f} s, {each['of_a_minute_by_own_median']:.2%}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    """The command line; what is not given depends on whether there is a GPU."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one pair; on CPUs of a smaller model")
    parser.add_argument("--model", help="timm name, default vit_large_patch16_224; on CPUs "
                        "vit_base_patch32_224: of ViT-B/16's size, with shorter steps")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1 if gpu else 2)
    parser.add_argument("--precision", default="bf16" if gpu else "fp32", choices=("bf16", "fp32"))
    parser.add_argument("--n", type=int, default=128 if gpu else 4, help="global batch")
    parser.add_argument("--every", type=float, default=12.0 if gpu else 20.0, metavar="SECONDS",
                        help="between saves")  # fmt: skip
    parser.add_argument("--steps", type=int, default=330 if gpu else 70, help="of each run")
    parser.add_argument("--pairs", type=int, default=2, help="default 2")
    options = parser.parse_args()
    options.model = options.model or f"vit_{'large_patch16' if gpu else 'base_patch32'}_224"
    if options.quick:
        options.pairs = 1
        if not gpu:
            options.model, options.every = "vit_small_patch32_224", 6.0
    return options


if __name__ == "__main__":
    main()

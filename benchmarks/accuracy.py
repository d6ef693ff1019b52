"""Does a way of training cost accuracy? The same training over several seeds, side by side.

    .venv/bin/python benchmarks/accuracy.py --json benchmarks/results/accuracy.json
    .venv/bin/python benchmarks/accuracy.py --quick --json /tmp/accuracy.json
    .venv/bin/python benchmarks/accuracy.py --variant "one rank=--shares 1,0,0" --variant "..."

Trains the digits ViT on this machine with the real script, each variant with each seed in
turn. The first variant is what the others are compared with: a difference is of two runs of
one seed, in points of top-1; 0.5 points are 2 of 360 held-out images.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run

VARIANTS = {
    "fp32": "--precision fp32",
    "fp32 + bf16 + fp16": "--precision fp32,bf16,fp16",
}
RANKS = 3


def train(options: argparse.Namespace, words: str, seed: int, logs: Path) -> dict[str, Any]:
    """One run; its result, and how often it skipped a step."""
    common = ("--seed", seed, "--epochs", options.epochs, "--shares", "5,3,1")
    folder = real_run(RANKS, "torch_dist/train_vit.py", logs, *common, *words.split())
    kinds = [event["event"] for event in lines_of(folder / "events.jsonl")]
    ended: dict[str, Any] = json.loads((folder / "run.json").read_text())["result"]
    return {"seed": seed, "top1": ended["top1"], "loss": ended["loss"],
            "skipped": kinds.count("overflow"), "drift": kinds.count("drift")}  # fmt: skip


def main() -> None:
    """Train, show, write."""
    options = arguments()
    variants = dict(word.split("=", 1) for word in options.variant) or VARIANTS
    started = time.time()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for name, words in variants.items():
                runs[name].append(train(options, words, seed, Path(folder)))
                print(f"  seed {seed}  {name:<24} top-1 {runs[name][-1]['top1']:.2%}", flush=True)
    first = next(iter(runs.values()))
    rows = []
    for name, found in runs.items():
        points = [100 * (a["top1"] - b["top1"]) for a, b in zip(found, first, strict=True)]
        rows.append({
            "mode": name, "options": variants[name], "engine": "torch", "ranks": RANKS,
            "top1": statistics.mean(run["top1"] for run in found),
            "difference_points": statistics.mean(points), "differences": points, "runs": found,
        })  # fmt: skip
        print(f"{name:<26} top-1 {rows[-1]['top1']:.2%}, {statistics.mean(points):+.2f} points "
              f"({min(points):+.2f} to {max(points):+.2f}), skipped steps "
              f"{sum(run['skipped'] for run in found)}")  # fmt: skip
    if options.json:
        result.write(options.json, rows, started, epochs=options.epochs)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one seed, under two minutes")
    parser.add_argument("--seeds", type=int, default=5, help="default 5")
    parser.add_argument("--epochs", type=int, default=30, help="default 30")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS",
                        help="in place of the two precisions; may be given again")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 5
    return options


if __name__ == "__main__":
    main()

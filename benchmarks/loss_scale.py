"""fp16: how many steps are skipped before the loss scale fits, by where it starts.

    .venv/bin/python benchmarks/loss_scale.py --json benchmarks/results/loss_scale.json
    .venv/bin/python benchmarks/loss_scale.py --quick --json /tmp/loss_scale.json
    .venv/bin/python benchmarks/loss_scale.py --engine deepspeed -- --opt lamb

Trains with the real script, once from 2^16 (the first guess of PyTorch and DeepSpeed), once from
2^32, and once from the scale that --loss-scale auto finds on the first batches. On a GPU it is
ViT-B/16 on synthetic images, elsewhere the digits ViT. What follows -- goes to the script.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import result
from real_run import lines_of, real_run

from motley.cluster.gpus import read_devices

mpl.use("Agg")
import matplotlib.pyplot as plt

STARTS = {"from 2^16": "2^16", "from 2^32": "2^32", "motley: found": "auto"}


def train(options: argparse.Namespace, scale: str, logs: Path) -> list[dict[str, Any]]:
    """One run; its step records."""
    words = ("--precision", "fp16", "--loss-scale", scale, "--max-steps", options.steps)
    script = f"{options.engine}/train_vit.py"
    folder = real_run(1, script, logs, *words, "--epochs", 1000, *options.words)
    return lines_of(folder / "steps.rank0.jsonl")


def last_loss(steps: list[dict[str, Any]]) -> float:
    """Over the last tenth of the steps."""
    return statistics.mean(step["loss"] for step in steps[-(len(steps) // 10 or 1) :])


def row(mode: str, steps: list[dict[str, Any]], engine: str) -> dict[str, Any]:
    """What a run came to."""
    skipped = [step["step"] for step in steps if step["overflow"]]
    return {
        "mode": mode, "engine": engine, "n": steps[0]["n_global"], "steps": len(steps),
        "first_scale": steps[0]["loss_scale"], "last_scale": steps[-1]["loss_scale"],
        "skipped": len(skipped), "skipped_steps": skipped, "last_loss": last_loss(steps),
    }  # fmt: skip


def picture(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The histories of the scale; a cross is a skipped step."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for mode, steps in found.items():
        numbers = [step["step"] for step in steps]
        scales = [step["loss_scale"] for step in steps]
        skipped = [step for step in steps if step["overflow"]]
        (line,) = axes.step(numbers, scales, where="post",
                            label=f"{mode}: {len(skipped)} steps skipped")  # fmt: skip
        axes.plot([step["step"] for step in skipped], [step["loss_scale"] for step in skipped],
                  "x", color=line.get_color())  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.set(
        xlabel="step", ylabel="loss scale", title="fp16: the loss scale, and skipped steps (x)"
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, show, write."""
    options = arguments()
    started = time.time()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode, scale in STARTS.items():
            steps = results[mode] = train(options, scale, Path(folder))
            print(f"  {mode:<14} skipped {sum(step['overflow'] for step in steps)} of "
                  f"{options.steps} steps; loss {last_loss(steps):.4f}", flush=True)  # fmt: skip
    if options.json:
        picture(results, options.json.with_suffix(".png"))
        rows = [row(mode, steps, options.engine) for mode, steps in results.items()]
        devices = [device.name for device in read_devices()]
        result.write(options.json, rows, started, devices=devices)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="and a picture beside it")
    parser.add_argument("--quick", action="store_true", help="60 steps, under two minutes")
    parser.add_argument("--steps", type=int, default=500, help="default 500")
    parser.add_argument("--engine", choices=("torch_dist", "deepspeed"), default="torch_dist")
    parser.add_argument("words", nargs="*", metavar="OPTION", help="of the training script")
    options = parser.parse_args()
    if options.quick:
        options.steps = 60
    if read_devices() and "--dataset" not in options.words:
        options.words = ["--dataset", "synthetic", "--batch-size", "128", *options.words]
    return options


if __name__ == "__main__":
    main()

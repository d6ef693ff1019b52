"""Half the digits' classes, with and without the weights of a run on the other half.

    .venv/bin/python benchmarks/finetune.py --json benchmarks/results/finetune.json
    .venv/bin/python benchmarks/finetune.py --quick --json /tmp/finetune.json

A small ViT learns 0 to 4; then 5 to 9 are learnt of 72 images, from random weights, from its
weights with --initial-checkpoint, and with all but the head frozen. Each has three rates and is
shown at its best: fewest steps to the accuracy, a median over seeds.
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

mpl.use("Agg")
import matplotlib.pyplot as plt

ENOUGH = 0.85
WORDS = ("--precision", "fp32", "--warmup-epochs", 1)
FEW = ("--data-fraction", 0.1, "--batch-size", 24)  # 72 images, so that it is evaluated often
MODES: dict[str, tuple[str, ...]] = {
    "random weights": (),
    "motley --initial-checkpoint": ("begin",),
    "motley --initial-checkpoint --freeze backbone": ("begin", "--freeze", "backbone"),
}


def learn(first: Path, mode: str, rate: float, seed: int, logs: Path, epochs: int) -> list[Any]:
    """Steps and accuracy of each evaluation."""
    begin, *rest = MODES[mode] or ("",)
    words = ("--initial-checkpoint", str(first)) if begin else ()
    folder = real_run(
        1, "torch_dist/train_vit.py", logs, "--classes", "5,6,7,8,9", "--epochs", epochs,
        "--lr", rate, "--seed", seed, *WORDS, *FEW, *words, *rest,
    )  # fmt: skip
    return [(line["step"], line["top1"]) for line in lines_of(folder / "epochs.jsonl")]


def steps_to(curve: list[Any]) -> float:
    """The first evaluation that is good enough; twice the last where none is."""
    return float(next((step for step, top1 in curve if top1 >= ENOUGH), 2 * curve[-1][0]))


def picture(best: dict[str, list[list[Any]]], path: Path) -> None:
    """Accuracy over steps: medians over seeds, and all seeds faintly."""
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for number, (mode, curves) in enumerate(best.items()):
        steps = [step for step, _ in curves[0]]
        for curve in curves:
            axes.plot(steps, [top1 for _, top1 in curve], f"C{number}", alpha=0.2)
        middle = [statistics.median(curve[at][1] for curve in curves) for at in range(len(steps))]
        axes.plot(steps, middle, f"C{number}", label=mode, linewidth=2)
    axes.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="steps", ylabel="top-1 of held-out digits 5 to 9", ylim=(0, 1))
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("What a run on digits 0 to 4 is worth to one on 5 to 9", loc="left")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all, write the file and the picture beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one seed, one rate, few epochs")
    options = parser.parse_args()
    started = time.time()
    seeds, rates, epochs = range(1, 6), (1e-3, 2e-3, 5e-3), 14
    if options.quick:
        seeds, rates, epochs = range(1, 2), (1e-3,), 3
    best: dict[str, list[list[Any]]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        first = real_run(
            1, "torch_dist/train_vit.py", logs, "--classes", "0,1,2,3,4",
            "--epochs", 3 if options.quick else 10, "--batch-size", 60, *WORDS,
        )  # fmt: skip
        for mode in MODES:
            results = {
                rate: [learn(first, mode, rate, seed, logs, epochs) for seed in seeds]
                for rate in rates
            }
            middle = {r: statistics.median(map(steps_to, c)) for r, c in results.items()}
            rate = min(rates, key=lambda each: (middle[each], -results[each][0][-1][1]))
            best[mode] = results[rate]
            steps = sorted(map(steps_to, results[rate]))
            rows.append({
                "mode": mode, "engine": "torch", "link": None, "n": 24, "rate": rate,
                "steps": middle[rate], "spread": (steps[-1] - steps[0]) / middle[rate],
                "top1": statistics.median(c[-1][1] for c in results[rate]), "curves": results,
            })  # fmt: skip
            print(f"{mode:48} {middle[rate]:6.0f} steps to {ENOUGH:.0%} at a rate of {rate:g}, "
                  f"in the end {rows[-1]['top1']:.1%}", flush=True)  # fmt: skip
    result.write(options.json, rows, started)
    picture(best, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()

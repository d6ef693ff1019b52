"""Does a way of training cost accuracy? The same training over several seeds, side by side.

    .venv/bin/python benchmarks/accuracy.py --json benchmarks/results/accuracy.json
    .venv/bin/python benchmarks/accuracy.py --compare wire --json /tmp/accuracy.json
    .venv/bin/python benchmarks/accuracy.py --compare wire --data textures --json /tmp/textures.json
    .venv/bin/python benchmarks/accuracy.py --quick --json /tmp/accuracy.json
    .venv/bin/python benchmarks/accuracy.py --variant "one rank=--shares 1,0,0" --variant "..."

Trains a small ViT on this machine with the real script, each variant with each seed in turn: on
the digits, or on ten textures of 32 x 32 pixels in colour. The first variant is what the others
are compared with: a difference is of two runs of one seed, in points of top-1; 0.5 points are 2
of 360 held-out digits, 5 of 1,000 held-out textures. A comparison of wires is drawn beside its
JSON: by images, and by the time that a step takes in results/wire.json over links of 20 Mbit/s.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import result
import textures
from real_run import lines_of, real_run

WIRES = ("exact", "fp16", "bf16", "powersgd:1", "powersgd:4", "powersgd:4+bf16",
         "powersgd:8", "local:2", "local:4", "local:8")  # fmt: skip
COMPARE = {
    "precision": {
        "fp32": "--precision fp32",
        "fp32 + bf16 + fp16": "--precision fp32,bf16,fp16",
    },
    "wire": {wire: f"--precision fp32 --wire {wire}" for wire in WIRES},
}
RANKS = 3
LINK = "20"


@dataclass(frozen=True)
class Data:
    """What is learnt.

    Attributes:
        options: of train_vit.py. samples: an epoch.
        train, held_out: textures a class; 0: they ship with scikit-learn.
    """

    options: tuple[object, ...]
    samples: int
    train: int = 0
    held_out: int = 0

    def make(self, folder: Path) -> tuple[object, ...]:
        """Write it below ``folder`` if need be; returns the options of train_vit.py."""
        if not self.train:
            return self.options
        textures.make(folder, self.train, self.held_out)
        return (*self.options, "--data-dir", folder)


DATA = {
    "digits": Data((), 1437),
    "textures": Data(
        ("--dataset", "folder", "--img-size", textures.PIXELS, "--model", "vit_tiny_patch16_224",
         "--batch-size", 64, "--no-augment", "--workers", 1, "--lr", 5e-4),
        3000, train=300, held_out=100,
    ),
}  # fmt: skip


def train(words: str, common: tuple[object, ...], seed: int, logs: Path) -> dict[str, Any]:
    """One run; its result, its accuracy after each epoch, and how often it skipped a step."""
    folder = real_run(
        RANKS, "torch_dist/train_vit.py", logs, *common, "--seed", seed, "--shares", "5,3,1",
        *words.split(),
    )  # fmt: skip
    kinds = [event["event"] for event in lines_of(folder / "events.jsonl")]
    ended: dict[str, Any] = json.loads((folder / "run.json").read_text())["result"]
    return {
        "seed": seed, "top1": ended["top1"], "loss": ended["loss"],
        "curve": [each["top1"] for each in lines_of(folder / "epochs.jsonl")],
        "skipped": kinds.count("overflow"), "drift": kinds.count("drift"),
    }  # fmt: skip


def main() -> None:
    """Train, show, write."""
    options = arguments()
    variants = dict(word.split("=", 1) for word in options.variant) or COMPARE[options.compare]
    started, data, last = time.time(), DATA[options.data], [*variants][-1]
    # entry_cn.sh gives each run the whole machine, which several at a time would fight for.
    threads = (os.cpu_count() or 1) // (options.jobs * RANKS)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        logs = Path(folder) / "logs"
        common = (*data.make(Path(folder) / "images"), "--epochs", options.epochs)
        cases = list(product(range(options.seeds), variants))
        results = pool.map(lambda case: train(variants[case[1]], common, case[0], logs), cases)
        for (seed, name), run in zip(cases, results, strict=True):
            runs[name].append(run)
            print(f"  seed {seed}  {name:<24} top-1 {run['top1']:.2%}", flush=True)
            if name == last and options.json:  # after each seed, for all of it takes long
                rows = compare(runs, variants, options.data)
                result.write(options.json, rows, started, epochs=options.epochs, data=options.data)
                if options.compare == "wire":
                    draw(rows, data.samples, options.json.with_suffix(".png"))
    for row in compare(runs, variants, options.data):
        points = row["differences"]
        print(f"{row['mode']:<26} top-1 {row['top1']:.2%}, {row['difference_points']:+.2f} points "
              f"({min(points):+.2f} to {max(points):+.2f}), skipped steps "
              f"{sum(run['skipped'] for run in row['runs'])}")  # fmt: skip


def compare(
    runs: dict[str, list[dict[str, Any]]], variants: dict[str, str], data: str
) -> list[dict[str, Any]]:
    """One row a variant, against the first."""
    first, rows = next(iter(runs.values())), []
    for name, each in runs.items():
        points = [100 * (a["top1"] - b["top1"]) for a, b in zip(each, first, strict=True)]
        rows.append({
            "mode": name, "options": variants[name], "engine": "torch", "ranks": RANKS,
            "data": data, "top1": statistics.mean(run["top1"] for run in each),
            "difference_points": statistics.mean(points), "differences": points, "runs": each,
        })  # fmt: skip
    return rows


def draw(rows: list[dict[str, Any]], samples: int, path: Path) -> None:
    """What is still wrong, mean of the seeds, by images and by time.

    Args:
        samples: an epoch.
    """
    timed = json.loads((Path(__file__).parent / "results" / "wire.json").read_text())["rows"]
    rates = {row["mode"]: row["images_per_s"] for row in timed if row["link"] == LINK}
    figure, (by_images, by_time) = plt.subplots(
        1, 2, figsize=(11, 4), sharey=True, layout="constrained"
    )
    for row in rows:
        curves = [run["curve"] for run in row["runs"]]
        curve = [100 - 100 * statistics.mean(each) for each in zip(*curves, strict=True)]
        images = [samples * (epoch + 1) for epoch in range(len(curve))]
        rate = rates.get("motley-ddp" + (f"-{row['mode']}" if row["mode"] != "exact" else ""))
        look: dict[str, Any] = {"linestyle": "-" if row["mode"][0] in "efb" else "--"}
        label = f"{row['mode']}  {row['difference_points']:+.2f} points"
        line = by_images.plot(images, curve, label=label, **look)[0]
        if rate:
            by_time.plot([n / rate for n in images], curve, color=line.get_color(), **look)
    by_images.set(xlabel="images", ylabel="wrong of the held-out images, %")
    by_time.set(xlabel=f"seconds, five paced hosts over links of {LINK} Mbit/s")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    for axes in (by_images, by_time):
        axes.set(yscale="log", yticks=(2, 5, 10, 20, 50), yticklabels=(2, 5, 10, 20, 50))
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one seed, under two minutes")
    parser.add_argument("--compare", choices=COMPARE, default="precision", help="default precision")
    parser.add_argument("--data", choices=DATA, default="digits", help="default digits")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, default 1")
    parser.add_argument("--seeds", type=int, default=5, help="default 5")
    parser.add_argument("--epochs", type=int, default=30, help="default 30")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS",
                        help="in place of what --compare names; may be given again")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 5
    return options


if __name__ == "__main__":
    main()

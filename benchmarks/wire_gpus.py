"""Each --wire on the GPUs of one machine, through NCCL over sockets as between machines.

    .venv/bin/python benchmarks/wire_gpus.py --json benchmarks/results/wire_gpus.json
    .venv/bin/python benchmarks/wire_gpus.py --quick

Trains ViT-B/16 on synthetic images with the real script, one rank a GPU, with NVLink and shared
memory forbidden to NCCL, so that gradients go through the loopback interface; and once as NCCL
would do it. Runs are interleaved. A step's time is the median of a run's later steps, of local
steps their mean; beside it is their mean by the clock. The last known loss is compared with the
exact wire's last.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run

from motley.cluster.gpus import read_devices
from motley.records.costs import mean_rate

_SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
}  # fmt: skip
_LATER = 0.5  # of a run's steps are timed
CASES = (
    ("direct", "exact"), ("sockets", "exact"), ("sockets", "bf16"), ("sockets", "fp16"),
    ("sockets", "powersgd:4"), ("sockets", "local:4"),
)  # fmt: skip


def train(options: argparse.Namespace, link: str, wire: str, logs: Path) -> dict[str, Any]:
    """One run: its step time, forecast and losses."""
    for name, value in _SOCKETS.items():
        os.environ.pop(name, None)
        if link == "sockets":
            os.environ[name] = value
    folder = real_run(
        options.ranks, "torch_dist/train_vit.py", logs, "--dataset", "synthetic",
        "--model", options.model, "--precision", options.precision, "--wire", wire,
        "--batch-size", options.n, "--max-steps", options.steps,
    )  # fmt: skip
    steps, run = (
        lines_of(folder / "steps.rank0.jsonl"),
        json.loads((folder / "run.json").read_text()),
    )
    seconds = [step["n_global"] / step["samples_per_s"] for step in steps]
    forecast = run["plan"]["forecast"]
    middle = statistics.mean if wire.startswith("local") else statistics.median  # few of them meet
    first = int(len(seconds) * _LATER)
    return {
        "step_s": middle(seconds[first:]), "mean_images_per_s": mean_rate(steps[first:]),
        "predicted_s": forecast["step_s"], "wire_s": forecast["wire_s"],
        "limit_s": forecast["limit_s"], "buckets": forecast["buckets"],
        "losses": [step["loss"] for step in steps if step["loss"] is not None],
    }  # fmt: skip


def main() -> None:
    """Train each case in turn, some times over; show, write."""
    options = arguments()
    devices = read_devices()
    started = time.time()
    results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for link, wire in CASES if repeat % 2 == 0 else CASES[::-1]:
                case = train(options, link, wire, Path(folder))
                results[link, wire].append(case)
                print(f"  {link:<8}{wire:<12}{case['step_s'] * 1e3:8.1f} ms a step", flush=True)
    exact = results["sockets", "exact"][0]["losses"]
    rows = [row(options, link, wire, results[link, wire], exact) for link, wire in CASES]
    slow = rows[1]["step_s"]
    print(f"\n{'link':<9}{'wire':<12}{'images/s':>9}{'mean':>9}{'times exact':>12}{'of limit':>9}"
          f"{'predicted':>10}{'one all-reduce':>15}{'last loss':>11}")  # fmt: skip
    for each in rows:
        print(
            f"{each['link']:<9}{each['mode'][11:]:<12}{each['images_per_s']:9,.0f}"
            f"{each['mean_images_per_s']:9,.0f}"
            f"{slow / each['step_s']:12.2f}{each['fraction_of_limit']:9.3f}"
            f"{each['prediction_error']:10.1%}{each['wire_s'] * 1e3:12.1f} ms"
            f"{each['loss_difference']:+11.1e}"
        )
    if options.json:
        result.write(options.json, rows, started, devices=[device.name for device in devices or ()])


def row(
    options: argparse.Namespace,
    link: str,
    wire: str,
    runs: list[dict[str, Any]],
    exact: list[float],
) -> dict[str, Any]:
    """What the repeats of a case came to."""
    seconds = [run["step_s"] for run in runs]
    step_s, limit_s = statistics.median(seconds), statistics.median(run["limit_s"] for run in runs)
    predicted = statistics.median(run["predicted_s"] for run in runs)
    return {
        "mode": f"motley-ddp-{wire}", "engine": "torch", "link": link, "n": options.n,
        "ranks": options.ranks, "precision": options.precision, "step_s": step_s,
        "images_per_s": options.n / step_s,
        "mean_images_per_s": statistics.median(run["mean_images_per_s"] for run in runs),
        "fraction_of_limit": limit_s / step_s,
        "spread": (max(seconds) - min(seconds)) / step_s, "repeats": seconds,
        "predicted_s": predicted, "prediction_error": predicted / step_s - 1,
        "wire_s": statistics.median(run["wire_s"] for run in runs),
        "buckets": runs[-1]["buckets"],
        "loss_difference": runs[0]["losses"][-1] / exact[-1] - 1,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one repeat of a few steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="vit_base_patch16_224", help="timm name")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--n", type=int, default=256, help="global batch, default 256")
    parser.add_argument("--steps", type=int, default=40, help="a run, default 40")
    parser.add_argument("--repeats", type=int, default=2, help="default 2")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps = 1, 10
    return options


if __name__ == "__main__":
    main()

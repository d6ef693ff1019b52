"""Unequal GPUs of one machine, one rank each: plain DDP, ours, and what they could do together.

    python benchmarks/mixed_gpus.py --json benchmarks/results/mixed_gpus.json
    python benchmarks/mixed_gpus.py --quick --ranks bf16,fp32:256,1024 --ranks bf16,bf16@44:512

`--ranks` names the precision of each rank, and the global batches. The GPUs are unequal by
precision, or by size: `bf16@44` computes on 44 of its processors.
All train the same timm model on the same noise. The limit is the sum of what the ranks do
alone, each at its best micro-batch with all others busy, measured before and after each
repeat; it is the same for all batches: of the largest of them. `at N` is the fraction of
what they could do alone at that batch, with micro-batches no larger than it. Modes are
interleaved, their order reversed on odd repeats, and warm steps dropped. A rate is the median
over repeats, its spread (largest - smallest) / median. Without GPUs it runs on the CPU with a
small model, to try it.
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import result
from result import ROOT
from single_gpu import machine

SETS = (  # as many as the GPUs suffice for
    "bf16,fp32:256,512,1024",
    "bf16,fp16,tf32,fp32:1024",
    "bf16,bf16@88,bf16@44,bf16@16:1024",
)
Lines = list[dict[str, Any]]


def run(ranks: str, batches: str, options: argparse.Namespace) -> Lines:
    """What one job measured, by batch, mode and repeat."""
    command = [
        "mpirun", "-np", str(len(ranks.split(","))), "--hostfile", "hosts.txt", "./entry_cn.sh",
        "benchmarks/mixed_gpu_rank.py", "--ranks", ranks, "--n", batches, "--model", options.model,
        "--steps", str(options.steps), "--warm", str(options.warm),
        "--repeats", str(options.repeats), "--wires", options.wires,
    ]  # fmt: skip
    lines: Lines = []
    print(" ".join(command), flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if not line.startswith("RESULT "):
                print(f"  {line}", end="")
                continue
            results = json.loads(line.removeprefix("RESULT "))
            rate = results["n"] / results["step_s"]
            print(f"  {results['mode']:<16} N {results['n']:5d}  {rate:9,.1f} images/s", flush=True)
            lines.append(results)
    if job.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {job.returncode}")
    return lines


def rows_of(ranks: str, lines: Lines) -> list[dict[str, Any]]:
    """One row a batch and mode; fractions are of the limit of the same repeat."""
    limits = [line for line in lines if line["mode"] == "limit"]
    others = [line for line in lines if line["mode"] != "limit"]
    by_repeat = {
        repeat: statistics.mean(rate(line) for line in limits if line["repeat"] == repeat)
        for repeat in {line["repeat"] for line in limits}
    }
    alone = statistics.median(line["n"] / line["best_single_s"] for line in limits)
    rows = [limit_row(limits)]
    for n, mode in sorted({(line["n"], line["mode"]) for line in others}, reverse=True):
        same = [line for line in others if (line["n"], line["mode"]) == (n, mode)]
        parts = [rate(line) / by_repeat[line["repeat"]] for line in same]
        row = {"mode": mode, "engine": "torch", "fraction_of_limit": statistics.median(parts)}
        parts = [
            rate(line) / limit["at_n"][str(n)]
            for line in same
            for limit in limits
            if limit["repeat"] == line["repeat"]
        ]
        row["fraction_at_n"] = statistics.median(parts)
        row["step_s"] = statistics.median(line["step_s"] for line in same)
        rows.append(
            row | compute_rates(same) | (predicted_of(same) if "predicted_s" in same[0] else {})
        )
    plain = {row["n"]: row["images_per_s"] for row in rows if row["mode"] == "plain-ddp"}
    for row in rows:
        row |= {"ranks": ranks, "link": None, "times_best_single": row["images_per_s"] / alone}
        known = row["mode"] != "limit"
        row["times_plain_ddp"] = row["images_per_s"] / plain[row["n"]] if known else None
    return rows


def limit_row(limits: Lines) -> dict[str, Any]:
    """The limit, and what it was made from in the first repeat."""
    return {
        "mode": "limit", "engine": None, "fraction_of_limit": 1.0, **compute_rates(limits),
        "measured_s": max(line["measured_s"] for line in limits), "speeds": limits[0]["speeds"],
    }  # fmt: skip


def compute_rates(same: Lines) -> dict[str, Any]:
    """Images/s over the repeats."""
    rates = [rate(line) for line in same]
    middle = statistics.median(rates)
    return {
        "n": same[0]["n"], "images_per_s": middle, "spread": (max(rates) - min(rates)) / middle,
        "repeats": rates,
    }  # fmt: skip


def predicted_of(same: Lines) -> dict[str, Any]:
    """The forecast beside what came; each rank's own times are of the first repeat."""
    errors = [line["predicted_s"] / line["step_s"] - 1 for line in same]
    names = ("counts", "micro_batches", "wire", "buckets", "predicted_compute_s", "laps")
    return {
        "predicted_s": statistics.median(line["predicted_s"] for line in same),
        "prediction_error": max(errors, key=abs),
        "refined_s": max(line["refined_s"] for line in same),
        **{name: same[0][name] for name in names},
    }  # fmt: skip


def rate(line: dict[str, Any]) -> float:
    """Images/s."""
    return float(line["n"] / line["step_s"])


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    took = rows[0]["measured_s"] + max(row.get("refined_s", 0.0) for row in rows)
    print(f"\n{rows[0]['ranks']}: measured in {took:.1f} s at most")
    print(f"  {'':<16}{'N':>6}{'images/s':>10}{'of limit':>10}{'at N':>7}{'x plain':>9}"
          f"{'spread':>8}{'step':>9}{'predicted':>11}  samples")  # fmt: skip
    for row in rows:
        at_n = f"{row['fraction_at_n']:.3f}" if "fraction_at_n" in row else ""
        times = f"{row['times_plain_ddp']:.2f}" if row["times_plain_ddp"] else ""
        step = f"{row['step_s']:.4f} s" if "step_s" in row else ""
        predicted = f"{row['predicted_s']:.4f} s" if "predicted_s" in row else ""
        print(
            f"  {row['mode']:<16}{row['n']:>6}{row['images_per_s']:>10,.0f}"
            f"{row['fraction_of_limit']:>10.3f}{at_n:>7}{times:>9}{row['spread']:>8.1%}{step:>9}"
            f"{predicted:>11}  {' + '.join(map(str, row.get('counts', ())))}"
        )


def main() -> None:
    """Run all sets of ranks, print a table each, and write JSON after each."""
    options = arguments()
    started, done = time.time(), Lines()
    for words in options.ranks:
        ranks, _, batches = words.partition(":")
        rows = rows_of(ranks, run(ranks, batches, options))
        show(rows)
        done += rows
        if options.json:
            result.write(
                options.json, done, started, machine=machine(), model=options.model,
                steps=options.steps, warm=options.warm,
            )  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line; what is not given depends on the GPUs."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = torch.cuda.device_count()
    sets = "precision[@processors],...:batch,...; again for another set"
    parser.add_argument("--ranks", action="append", metavar="SET", help=sets)
    parser.add_argument(
        "--wires", default="exact", metavar="MODE,...", help="what of ours travels, default exact"
    )
    model = "vit_base_patch16_224" if gpus else "vit_digits"
    parser.add_argument("--model", default=model, help="timm name")
    parser.add_argument("--steps", type=int, default=48 if gpus else 6, help="timed")
    parser.add_argument("--warm", type=int, default=5 if gpus else 2, help="steps not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    if not options.ranks:
        options.ranks = [
            words for words in SETS if words.count(",", 0, words.find(":")) < (gpus or 2)
        ]
    if options.quick:
        options.repeats = 1
    return options


if __name__ == "__main__":
    main()

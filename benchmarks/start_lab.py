"""What each part of a start takes on five hosts of the lab in a box: the first time, and again.

    sudo .venv/bin/python benchmarks/start_lab.py --json benchmarks/results/start_lab.json
    sudo .venv/bin/python benchmarks/start_lab.py --trees . ../other --repeats 5
    sudo .venv/bin/python benchmarks/start_lab.py --quick

Each repeat starts the same short job twice in each tree, first with nothing remembered on any
host, and then again. A part is what run.json's `start` says of it, on rank 0, which waits for the
others; `records` is what comes after it, until the first step is begun. Medians of the repeats.
Needs root, for the lab, whose five hosts share this machine's processors.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import result
from bench_lab import HOSTS, BenchLab, bench_lab, unshaped

from motley.live.track import PARTS

_FORGET = "rm -f /tmp/motley-*/speed-*.json /tmp/motley-*/wire-*.json"


def start(lab: BenchLab, tree: Path, name: str, words: str) -> dict[str, float]:
    """Train for some steps; seconds by part, imports among them."""
    common = ["--hosts", "all", "--max-steps", 12, "--eval-samples", 30, "--logs", "~/logs"]
    for _ in lab.train("torch_dist/train_vit.py", *common, "--run", name, words, tree=tree):
        pass
    results = lab.records(name)
    first = results["steps"][0]
    began = first["time"] - sum(first[part] or 0.0 for part in PARTS)
    return {**results["run"]["start"], "records": began - results["run"]["started"]}


def rows(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row a tree and kind of start."""
    table = []
    for (tree, mode), starts in found.items():
        parts = {
            part: statistics.median(each.get(part, 0.0) for each in starts)
            for part in dict.fromkeys(part for each in starts for part in each)
        }
        totals = [sum(each.values()) - each["imports"] for each in starts]
        table.append({
            "mode": f"motley, {mode}", "engine": "torch", "tree": tree, "parts": parts,
            "after_imports_s": statistics.median(totals), "all_s": totals,
            "spread": (max(totals) - min(totals)) / statistics.median(totals),
        })  # fmt: skip
    return table


def show(table: list[dict[str, Any]]) -> None:
    """Print a table, one part a line."""
    parts = list(dict.fromkeys(part for row in table for part in row["parts"]))
    for row in table:
        print(f"{row['tree']}, {row['mode']}: {row['after_imports_s']:.2f} s after imports, of "
              f"{', '.join(f'{each:.2f}' for each in sorted(row['all_s']))}")  # fmt: skip
    print("part      " + "".join(f"{row['mode'][8:]:>10}" for row in table))
    for part in parts:
        print(f"{part:<10}" + "".join(f"{row['parts'].get(part, 0.0):10.2f}" for row in table))


def main() -> None:
    """Start, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--mbit", type=int, default=1000, help="of each link, default 1000")
    parser.add_argument("--trees", type=Path, nargs="+", default=[result.ROOT], metavar="DIR",
                        help="checkouts that are compared; default: this one")  # fmt: skip
    parser.add_argument("--words", default="", help="more options of the job")
    options = parser.parse_args()
    started, load = time.time(), os.getloadavg()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    with bench_lab(unshaped(options.mbit)) as lab:
        for repeat in range(1 if options.quick else options.repeats):
            for number, tree in enumerate(map(Path.resolve, options.trees)):
                for host in HOSTS:
                    lab.do("exec", host, "--", "bash", "-c", _FORGET)
                for mode in ("first", "again"):
                    took = start(lab, tree, f"{mode}{repeat}.{number}", options.words)
                    results.setdefault((tree.name, mode), []).append(took)
                    print(tree.name, mode, took, flush=True)
    table = rows(results)
    show(table)
    if options.json:
        result.write(options.json, table, started, load_before=load)


if __name__ == "__main__":
    main()

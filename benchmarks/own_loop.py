"""Time a loop of one's own with the library and without it, in turn.

    python benchmarks/own_loop.py --json benchmarks/results/own_loop.json
    python benchmarks/own_loop.py --ranks 2 --workers 8 --json benchmarks/results/own_loop_x2.json
    python benchmarks/own_loop.py --ranks 2 --workers 8 --strategy fsdp --json own_loop_fsdp.json
    python benchmarks/own_loop.py --quick --json /tmp/own_loop.json

One process: the bare loop, the loop with ``motley.join()`` alone, and the same with one rank's
whole machinery (MOTLEY_SHARES=1). Several GPUs: with the library, with torch's DDP or FSDP2 by
hand, and the bare loop on one of them. Repeats are interleaved; a rate is their median, its spread
(largest - smallest) / median. Without a GPU it trains a small model.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import result
from result import ROOT, VENV

SCRIPT = ROOT / "benchmarks" / "own_loop_script.py"
SMALL = ["--model", "vit_tiny_patch16_224", "--size", "32", "--batch", "64"]


def run(words: list[str], environment: dict[str, str]) -> float:
    """Return the seconds per step that the script prints."""
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if not lines:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}")
    return float(lines[-1].split()[1])


def main() -> None:
    """Time all ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0, help="loader processes, default 0")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one repeat of ten steps")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    import torch

    started = time.time()
    more = ["--steps", str(10 if options.quick else options.steps)]
    more += ["--warm-up", "10"] * options.quick + ["--compile"] * options.compile
    more += ["--workers", str(options.workers)]
    batch = 256
    if not torch.cuda.is_available():
        more, batch = more + SMALL, 64
    python, ranks = sys.executable, str(options.ranks)
    alone = [python, str(SCRIPT), "bare", *more]
    sharded = options.strategy == "fsdp"
    lab = [python, str(SCRIPT), "lab-fsdp" if sharded else "lab", *more]
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    ways = {"bare": (alone, one)}
    if options.ranks == 1:
        ways |= {"lab": (lab, one), "lab, one rank": (lab, {**one, "MOTLEY_SHARES": "1"})}
    else:
        mpirun = [str(VENV / "bin" / "mpirun"), "-np", ranks, "--host", f"localhost:{ranks}"]
        torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        ways |= {
            f"lab, {ranks} ranks": ([*mpirun, *lab], {}),
            f"{'FSDP2' if sharded else 'DDP'}, {ranks} ranks": (
                [*torchrun, str(SCRIPT), options.strategy, *more],
                {},
            ),
        }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 if options.quick else options.repeats):
        for way, (words, environment) in ways.items():
            times[way].append(run(words, environment))
            print(f"{way}: {batch / times[way][-1]:,.0f} images/s", flush=True)
    rows = []
    for way, seconds in times.items():
        rate = batch / statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        bare = batch / statistics.median(times["bare"])
        rows.append({"way": way, "images_per_s": rate, "spread": spread, "of_bare": rate / bare})
        print(f"{way:20} {rate:8,.0f} images/s, spread {spread:.1%}, {rate / bare:.3f} of bare")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    result.write(options.json, rows, started, device=device, ranks=options.ranks, batch=batch,
                 compiled=options.compile, workers=options.workers)  # fmt: skip


if __name__ == "__main__":
    main()

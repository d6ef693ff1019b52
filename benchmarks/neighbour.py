"""A neighbour takes 60 % of one GPU's memory in mid-run: does training go on, and is it the same?

    .venv/bin/python benchmarks/neighbour.py --json benchmarks/results/neighbour.json
    .venv/bin/python benchmarks/neighbour.py --quick --ranks 1 --micro-batch 512

Trains with the real script, alone and then beside a process of another user (if root may start
one), which wants 60 % of the first GPU's memory from the third step on and holds what it gets
until the end. The losses of both runs are compared, step by step. A neighbour can only take
what is free, and PyTorch keeps what it once had; so the second run gives all memory back at
once (PYTORCH_NO_CUDA_MEMORY_CACHING=1), which makes it slow and the neighbour's case easy.
"""

import argparse
import contextlib
import json
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result
from real_run import lines_of, real_run

from motley.cluster.gpus import read_devices
from motley.launch.process import die_with_parent

USER = "nobody"
AFTER = 3  # steps
PIECE_MIB = 512  # taken at once


def take(wanted_mib: int) -> None:
    """What the neighbour does once it is told to: take all that is free, until it has what it
    wants; hold it."""
    import torch

    die_with_parent()
    torch.cuda.init()
    sys.stdin.readline()
    held: list[torch.Tensor] = []
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(held) * PIECE_MIB < wanted_mib:
                held.append(torch.empty(PIECE_MIB << 20, dtype=torch.uint8, device="cuda:0"))
                print(len(held) * PIECE_MIB, flush=True)
        time.sleep(0.002)


class Neighbour:
    """The other process; it takes memory when the run has taken its first steps.

    Attributes:
        held_mib: that it has at the moment. whole_at: steps that the run had recorded when it
            had all; None if it never had.
    """

    def __init__(self, run: Path, wanted_mib: int) -> None:
        self.held_mib, self._wanted_mib = 0, wanted_mib
        self.whole_at: int | None = None
        self._steps = run / "steps.rank0.jsonl"
        self._over = threading.Event()

    @contextlib.contextmanager
    def about(self) -> Iterator[None]:
        """Comes while this is open, and goes at its end."""
        command = [sys.executable, __file__, "--take", str(self._wanted_mib)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            user=USER if os.geteuid() == 0 else None,
        ) as process:  # fmt: skip
            thread = threading.Thread(target=self._watch, args=(process,))
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                process.kill()
                thread.join()

    def _watch(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        while len(lines_of(self._steps)) < AFTER:
            if self._over.wait(0.05):
                return
        print("go", file=process.stdin, flush=True)
        for line in process.stdout:
            self.held_mib = int(line)
            if self.held_mib >= self._wanted_mib and self.whole_at is None:
                self.whole_at = len(lines_of(self._steps))


def train(options: argparse.Namespace, logs: Path) -> Path:
    """One run; its folder."""
    words = (
        "--dataset", "synthetic", "--model", options.model, "--precision", options.precision,
        "--micro-batch", options.micro_batch, "--max-steps", options.steps,
        "--batch-size", options.micro_batch * options.ranks, "--shares", "equal",
    )  # fmt: skip
    return real_run(options.ranks, f"{options.engine}/train_vit.py", logs, *words)


def main() -> None:
    """Train alone, train beside the neighbour, compare."""
    options = arguments()
    if options.take:
        take(options.take)
    devices = read_devices()
    if not devices or devices[0].memory_total_mib is None:
        raise SystemExit("there is no GPU here, or nobody says how much memory it has")
    wanted = int(0.6 * devices[0].memory_total_mib)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        alone = lines_of(train(options, Path(folder)) / "steps.rank0.jsonl")
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        neighbour = Neighbour(Path(folder) / "run1", wanted)
        with neighbour.about():
            run = train(options, Path(folder))
        beside = lines_of(run / "steps.rank0.jsonl")
        events = [e for e in lines_of(run / "events.jsonl") if e["event"] == "out_of_memory"]
        status = json.loads((run / "run.json").read_text())["status"]
    pairs = zip(alone, beside, strict=True)
    worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
    held = neighbour.held_mib / devices[0].memory_total_mib
    user = USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    peak = max(step["mem_peak_mib"] for step in alone) / devices[0].memory_total_mib
    print(f"{user} took {held:.0%} of {devices[0].name} by step {neighbour.whole_at}; the run, "
          f"which uses {peak:.0%} alone, {status} after {len(beside)} steps")  # fmt: skip
    print(f"  losses differ by at most {worst:.1e} of themselves")
    for event in events:
        print(f"  {event['text']}")
    row: dict[str, Any] = {
        "mode": "motley-neighbour", "engine": options.engine, "n": beside[0]["n_global"],
        "ranks": options.ranks, "precision": options.precision, "status": status,
        "needed": peak, "taken": held, "taken_by_step": neighbour.whole_at,
        "loss_difference": worst, "owner_named": user in str(events), "events": events,
    }  # fmt: skip
    if options.json:
        names = [device.name for device in devices]
        result.write(options.json, [row], started, devices=names)
    if not events:
        raise SystemExit("memory never ended: choose a larger --micro-batch")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--take", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="10 steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="vit_small_patch16_224", help="timm name")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--micro-batch", type=int, default=1536, help="default fits an H200")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--engine", choices=("torch_dist", "deepspeed"), default="torch_dist")
    options = parser.parse_args()
    if options.quick:
        options.steps = 10
    return options


if __name__ == "__main__":
    main()

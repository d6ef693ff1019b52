"""One rank of benchmarks/mixed_gpus.py: plain DDP and ours in turn, interleaved, in one job.

Each rank has a GPU to itself, and a precision; some have a part of the GPU's processors
alone, as a smaller GPU would. Without GPUs it runs on the CPU, to try it. Rank 0 prints
one line of JSON a measurement.
"""

import argparse
import contextlib
import gc
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from mixed import Bench

from motley.comm.modes import parse_wire
from motley.comm.modes.numbers import EXACT
from motley.launch.world import World, run
from motley.measure.process_group import ProcessGroup, join_process_group, leave_process_group
from motley.plan.plan import limit_s
from motley.plan.precision import read_precisions


class GpuBench(Bench):
    """A timm model on the rank's own GPU."""

    def __init__(self, world: World, group: ProcessGroup, options: argparse.Namespace) -> None:
        # A learning rate that changes next to nothing: noise has no labels to learn.
        words = ["--dataset", "synthetic", "--model", options.model, "--lr", "1e-6"]
        super().__init__(world, group, words, options.warm, options.steps)


def only_processors(count: int) -> object:
    """Give this process's work to so many of the GPU's processors; returns what must be kept."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=count, device_id=torch.cuda.current_device())
    torch.cuda.set_stream(context.Stream())
    return context


def main(world: World, options: argparse.Namespace) -> None:
    """For each repeat: the limit, all modes at each batch in turn, and the limit again."""
    precisions, _, processors = zip(*(rank.partition("@") for rank in options.ranks), strict=True)
    group = join_process_group(world, read_precisions(",".join(precisions)))
    assert group.rank is not None
    own = processors[group.rank]
    with contextlib.ExitStack() as saved:
        if own:
            saved.callback(id, only_processors(int(own)))
        bench = GpuBench(world, group, options)
        for repeat in range(options.repeats):
            measure(bench, options, repeat)
    leave_process_group()


def measure(bench: GpuBench, options: argparse.Namespace, repeat: int) -> None:
    """One repeat."""

    def tell(mode: str, n: int, result: dict[str, Any]) -> None:
        if bench.rank == 0:
            line = {"mode": mode, "n": n, "repeat": repeat, **result}
            print("RESULT " + json.dumps(line), flush=True)
        gc.collect()
        if bench.group.device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()

    most = max(options.n)

    def limit() -> list[Any]:
        start = time.perf_counter()
        speeds = bench.speeds(most)
        best = min(speed.compute_seconds(most) for speed in speeds)
        at_n = {n: n / limit_s(n, [speed.at_most(n) for speed in speeds]) for n in options.n}
        tell("limit", most, {
            "step_s": limit_s(most, speeds), "best_single_s": best, "at_n": at_n,
            "measured_s": time.perf_counter() - start,
            "speeds": [speed.as_json() for speed in speeds],
        })  # fmt: skip
        return speeds

    speeds = limit()
    turns = [(n, wire) for n in options.n for wire in (None, *options.wires)]
    for n, wire in turns if repeat % 2 == 0 else turns[::-1]:
        if wire is None:
            # Its steps are long, and as long as each other.
            tell("plain-ddp", n, bench.plain_ddp(n, warm=2, steps=max(1, options.steps // 4)))
        else:
            name = "motley-ddp" if wire == EXACT else f"motley-ddp-{wire}"
            tell(name, n, bench.ours(n, speeds, mode=wire))
    limit()


def arguments() -> argparse.Namespace:
    """Options, as mixed_gpus.py gives them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=lambda text: text.split(","))
    parser.add_argument("--n", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--wires", type=lambda text: [parse_wire(word) for word in text.split(",")])
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--repeats", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    run(lambda world: main(world, given))

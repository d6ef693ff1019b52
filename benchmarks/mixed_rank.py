"""One rank of benchmarks/mixed_lab.py: all modes in turn, interleaved, in one job.

What others do is in benchmarks/peers.py. Each mode builds the same model from the same seed, takes
two steps that are not timed and as many that are as any other. Outside the timed steps are making
the model and its engine, measuring, and planning. Rank 0 prints one line of JSON a measurement.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import peers
import psutil
import torch
import torch.distributed as dist
from mixed import Bench
from paced import Pace, Paced

from motley.comm.modes import parse_wire
from motley.comm.modes.numbers import EXACT
from motley.engines.strategies import ZERO, known_strategies, list_engines
from motley.engines.zero_config import ZeroOptions
from motley.launch.world import World, run
from motley.measure.process_group import ProcessGroup, join_process_group, leave_process_group
from motley.plan.plan import limit_s
from motley.plan.precision import read_precisions
from motley.plan.speeds import SpeedTable
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net

_QUOTAS_S = 6.0  # in which mixed_lab.py sets them: imports under a quota would take minutes


class LabBench(Bench):
    """Hosts that are paced, or have a part of a processor each; and the other peers."""

    def __init__(self, world: World, group: ProcessGroup, options: argparse.Namespace) -> None:
        words = ["--batch-size", str(options.n), "--no-augment", "--img-size", options.img_size]
        super().__init__(world, group, words, options.warm, options.steps)
        self.options = options
        self.pace = Pace(options.fastest_s * max(options.speeds) / options.speeds[self.rank])

    def model(self) -> TaskModel:
        """See Bench."""
        net = build_net(self.task, self.config)
        if self.options.emulation == "quotas":
            return TaskModel(self.task, net, "fp32", self.group.device)
        return Paced(self.task, net, self.pace)

    def peer(self, mode: str) -> dict[str, Any]:
        """A peer, as a good user has it, over as many steps as ours."""
        step = peers.parse_step(mode, self, self.options.n, self.options.speeds)
        return {"step_s": self.time_steps(step)}


def ours(bench: LabBench, mode: str, speeds: list[SpeedTable]) -> dict[str, Any]:
    """``motley-ddp``, ``motley-deepspeed-STAGE``, and either with ``-WIRE``."""
    _, engine, *rest = mode.split("-")
    make: Any = None
    own: tuple[Any, ...] = (bench.task,)
    if engine == "deepspeed":
        stage = int(rest.pop(0))
        own = (bench.task, ZeroOptions(stage))
        make = list_engines(replace(bench.config, own=own), known_strategies(ZERO))
    wire = parse_wire(rest[0]) if rest else EXACT
    assert wire is not None
    return bench.ours(bench.options.n, speeds, make, wire, bench.options.settle, own=own)


def cpu_seconds() -> tuple[float, float]:
    """Of all processors so far: what other machines on the same hardware took, and all."""
    times = psutil.cpu_times()
    return times.steal, sum(times) - times.guest - times.guest_nice  # in user and nice already


def main(world: World, options: argparse.Namespace) -> None:
    """Measure the limit, all modes in turn, and the limit again, for each repeat."""
    torch.set_num_threads(1)
    bench = LabBench(world, join_process_group(world, read_precisions("fp32")), options)

    before = cpu_seconds()

    def tell(mode: str, repeat: int, result: dict[str, Any]) -> None:
        nonlocal before
        now = cpu_seconds()
        stolen = (now[0] - before[0]) / (now[1] - before[1])
        before = now
        if world.rank == 0:
            line = {"mode": mode, "repeat": repeat, "stolen": stolen, **result}
            print("RESULT " + json.dumps(line), flush=True)

    if options.emulation == "quotas":
        bench.time_steps(bench.plain_ddp_step(bench.model(), bench.batch(bench.model(), 2)))
        if world.rank == 0:
            print("READY", flush=True)
        time.sleep(_QUOTAS_S)

    def limit() -> list[SpeedTable]:
        speeds = bench.speeds(options.n)
        alone = min(speed.compute_seconds(options.n) for speed in speeds)
        tell("limit", repeat, {"step_s": limit_s(options.n, speeds), "alone_s": alone})
        return speeds

    for repeat in range(options.repeats):
        speeds = limit()
        order = options.modes if repeat % 2 == 0 else options.modes[::-1]
        for mode in order:
            results = bench.peer(mode) if mode in peers.NAMES else ours(bench, mode, speeds)
            tell(mode, repeat, results)
            gc.collect()
            dist.barrier()
        limit()
    leave_process_group()


def arguments() -> argparse.Namespace:
    """Options, as mixed_lab.py gives them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=180)
    parser.add_argument("--speeds", type=lambda text: [float(w) for w in text.split(":")])
    parser.add_argument("--emulation", default="paced")
    parser.add_argument("--img-size", default="8")
    parser.add_argument("--fastest-s", type=float, default=0.006)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--settle", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", type=lambda text: text.split(","))
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    run(lambda world: main(world, given))

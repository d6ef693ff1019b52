"""What each strategy costs beside DDP, on the GPUs of one machine, in one job.

    mpirun -np 2 ./entry_cn.sh benchmarks/strategies_gpus.py --json strategies.json
    mpirun -np 2 ./entry_cn.sh benchmarks/strategies_gpus.py --quick --only ddp --only fsdp

Every engine trains the same model on the same batch, kept on the device, in equal shares, as it is
and with its blocks compiled; ``bare-fsdp2`` is torch's fully_shard as its tutorial has it, a block
at a time. Repeats are interleaved; DeepSpeed's come after all others, for what is computed in a
process that has used it takes a sixth longer. A rate is the median over repeats of N / (seconds of
the timed steps), its spread (largest - smallest) / median; memory is that of the first repeat, for
something of DeepSpeed's engines stays. The loss of the last step says whether all have learned the
same. Without GPUs it runs on the CPU with a small model, to try it.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result  # first: where the library is
import torch
import torch.distributed as dist
from mixed import Bench
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from motley.comm.modes.numbers import EXACT
from motley.engines.protocol import EngineContext
from motley.engines.strategies import TORCH, ZERO, known_strategies, list_engines
from motley.launch.world import World, run
from motley.measure.process_group import join_process_group, leave_process_group
from motley.plan.plan import make_plan
from motley.plan.precision import read_precisions, start_scale
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser

NO_OVERLAP = "ddp-no-overlap"  # as DDP is planned where links are as fast as a GPU's memory
# The package through which each is reached, and its options.
MODES = {
    "ddp": (TORCH, ()), NO_OVERLAP: (TORCH, ()), "fsdp": (TORCH, ("--strategy", "fsdp")),
    "fsdp-reshard": (TORCH, ("--strategy", "fsdp", "--reshard-after-forward")),
    "zero1": (ZERO, ("--stage", "1")), "zero2": (ZERO, ("--stage", "2")),
    "zero3": (ZERO, ("--stage", "3")),
}  # fmt: skip
BARE, COMPILED = "bare-fsdp2", "-compiled"
_COMPILES = ("ddp", NO_OVERLAP, "fsdp", "zero1", "zero3")
ALL = [*MODES, BARE, *(f"{name}{COMPILED}" for name in _COMPILES)]


class StrategyBench(Bench):
    """Engines of one model, one after another."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self._options = options
        group = join_process_group(world, read_precisions(options.precision))
        words = ["--dataset", "synthetic", "--model", options.model, "--lr", "1e-5"]
        super().__init__(world, group, words, options.warm, options.steps)
        self._words = words

    def measure(self, mode: str) -> dict[str, Any]:
        """Seconds a step, the last loss, and the most memory in MiB."""
        gc.collect()
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results = self._bare() if mode == BARE else self._ours(mode)
        mib = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
        return {**results, "mib": mib}

    def _ours(self, mode: str) -> dict[str, Any]:
        package, words = MODES[mode.removesuffix(COMPILED)]
        strategies, n = known_strategies(package), self._options.batch
        config = read_config(
            training_parser("", strategies), [*self._words, *words, "--batch-size", str(n)]
        )
        model, ranks = self.model(), self.group.size
        if mode.endswith(COMPILED):
            model.compile_task()
        buckets = 1 if mode.startswith(NO_OVERLAP) else None
        plan = make_plan(n, [1.0] * ranks, [n // ranks] * ranks, EXACT, buckets)
        scale = start_scale("auto", (*self.group.precisions, "fp32"))
        context = EngineContext(
            config, self.rank, ranks, self.group.device, self.group.precisions, scale, plan
        )
        engine = list_engines(config, strategies)(model, context)
        results = self.time_engine(model, engine, plan, EXACT)
        return {**results, "loss": self._loss(engine, model)}

    def _loss(self, engine: Any, model: TaskModel) -> float:
        n = self._options.batch
        engine.accumulate(self.batch(model, n // self.group.size), n, True)
        return float(engine.step().loss_sum) / n

    def _bare(self) -> dict[str, Any]:
        model, n = self.model(), self._options.batch
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self._options.precision == "bf16" else None,
            reduce_dtype=torch.float32, cast_forward_inputs=False,
        )  # fmt: skip
        for block in self.task.blocks(model.net).values():
            fully_shard(block, mp_policy=policy)
        fully_shard(model.net, mp_policy=policy)
        optimizer, batch = self.optimizer(model), self.batch(model, n // self.group.size)
        losses = []

        def step() -> None:
            loss = model(batch.data).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        seconds = self.time_steps(step)
        step()
        dist.all_reduce(losses[-1])
        return {"step_s": seconds, "loss": float(losses[-1]) / self.group.size}


def main(world: World, options: argparse.Namespace) -> None:
    """All modes in turn, some times over; show, write."""
    started, bench = time.time(), StrategyBench(world, options)
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for mode in order(options.only, options.repeats):
        seen = bench.measure(mode)
        results[mode].append(seen)
        if world.rank == 0:
            laps = {k: round(1e3 * s, 1) for k, s in seen.get("laps", [{}])[0].items()}
            print(f"  {mode:<26}{1e3 * seen['step_s']:8.1f} ms a step, loss {seen['loss']:.5f}",
                  f"{seen['mib'] or 0:,.0f} MiB", laps, sep=", ", flush=True)  # fmt: skip
    leave_process_group()
    if world.rank != 0:
        return
    rows = [row(mode, cases, results, options) for mode, cases in results.items()]
    print(f"\n{options.model}, {options.precision}, N = {options.batch}, {world.size} ranks")
    for each in rows:
        rate, times, spread = each["images_per_s"], each["times_plain_ddp"] or 0, each["spread"]
        print(f"  {each['mode']:<26}{rate:10,.1f} images/s {times:6.3f} of DDP, {spread:.1%} apart")
    if options.json:
        devices = [str(device.name) for device in world.nodes[0].devices]  # of one machine
        result.write(options.json, rows, started, model=options.model, gpus=devices,
                     precision=options.precision, ranks=world.size)  # fmt: skip


def order(modes: list[str], repeats: int) -> Iterator[str]:
    """Interleaved; DeepSpeed's last."""
    zero = [mode for mode in modes if mode.startswith("zero")]
    for part in ([mode for mode in modes if mode not in zero], zero):
        for repeat in range(repeats):
            yield from part if repeat % 2 == 0 else part[::-1]


def row(
    mode: str,
    cases: list[dict[str, Any]],
    found: dict[str, list[dict[str, Any]]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Beside DDP, compiled where this is."""
    like = f"ddp{COMPILED}" if mode.endswith(COMPILED) else "ddp"
    seconds = [case["step_s"] for case in cases]
    middle, peer = statistics.median(seconds), [case["step_s"] for case in found.get(like, ())]
    times = statistics.median(peer) / middle if peer else None
    return {
        "mode": mode if mode == BARE else f"motley-{mode}",
        "engine": "deepspeed" if mode.startswith("zero") else "torch", "link": "direct",
        "n": options.batch, "images_per_s": options.batch / middle, "fraction_of_limit": None,
        "times_plain_ddp": times, "times_best_single": None,
        "spread": (max(seconds) - min(seconds)) / middle, "loss": cases[-1]["loss"],
        "mib": cases[0]["mib"], "seconds": seconds,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = "vit_large_patch16_224" if gpu else "vit_tiny_patch16_224"
    parser.add_argument("--model", default=model)
    parser.add_argument("--batch", type=int, default=256 if gpu else 4)
    parser.add_argument("--precision", default="bf16" if gpu else "fp32")
    parser.add_argument("--only", action="append", choices=ALL, help="default: all")
    parser.add_argument("--warm", type=int, default=8 if gpu else 1, help="steps not timed")
    parser.add_argument("--steps", type=int, default=24 if gpu else 2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.only = options.only or ALL
    options.repeats = 1 if options.quick else options.repeats
    return options


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        given = arguments()
        run(lambda world: main(world, given))

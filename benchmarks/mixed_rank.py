"""One rank of benchmarks/mixed_lab.py: all modes in turn, interleaved, in one job.

Peers train as their documentation says: equal batches, and their own averaging. Each mode
builds the same model from the same seed. Rank 0 prints one line of JSON a measurement.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paced import Paced
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "torch_dist"), str(ROOT / "deepspeed")]

import quiet  # noqa: E402, F401 - before deepspeed
from ddp_engine import DdpEngine  # noqa: E402
from zero_engine import ZeroEngine  # noqa: E402

from motley import launch  # noqa: E402
from motley.balance import Speed, forecast, limit_s, split  # noqa: E402
from motley.data import load_images  # noqa: E402
from motley.engine import EngineMaker, Seating, make_optimizer  # noqa: E402
from motley.measure import measure_speed, measure_wire  # noqa: E402
from motley.model import build_model, image_size, model_name  # noqa: E402
from motley.options import Config, read_config, training_parser  # noqa: E402
from motley.plan import make_plan  # noqa: E402
from motley.precision import LossScale  # noqa: E402
from motley.sampler import Batch  # noqa: E402
from motley.team import Team, join_team, leave_team  # noqa: E402

PEERS = ("plain-ddp", "accelerate", "deepspeed-0", "deepspeed-1")
OURS = {"motley-ddp": None, "motley-deepspeed-0": 0, "motley-deepspeed-1": 1}


class Bench:
    """What all modes share on one rank."""

    def __init__(self, world: launch.World, team: Team, options: argparse.Namespace) -> None:
        assert team.rank is not None
        self.world, self.team, self.rank, self.options = world, team, team.rank, options
        words = ["--batch-size", str(options.n), "--no-augment"]
        config = read_config(training_parser(""), words)
        self.config: Config = replace(config, model=model_name(config))
        self.images = load_images(self.config, image_size(self.config))
        self.sample_s = options.fastest_s * max(options.speeds) / options.speeds[self.rank]

    def model(self) -> Paced:
        """A fresh one, the same on all ranks."""
        net = build_model(self.config, self.images)
        size = image_size(self.config)
        return Paced(net, self.images, size, self.options.overhead_s, self.sample_s)

    def batch(self, model: Paced, count: int) -> Batch:
        """Images and labels; their content costs nothing and matters not."""
        labels = torch.arange(count) % 10
        return Batch(model.blank_images(count), labels, tuple(range(count)))

    def time_steps(self, step: Callable[[], None]) -> float:
        """Seconds a step, over the timed ones, all ranks together."""
        for _ in range(self.options.warm):
            step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.options.steps):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / self.options.steps

    def speeds(self) -> list[Speed]:
        """Every rank alone at its best, all ranks busy at once."""
        model = self.model()
        make = lambda: make_optimizer(model.net, self.config)  # noqa: E731
        own = measure_speed(model, make, self.options.n)
        return self.world.allgather(own)

    def ours(
        self, make_engine: EngineMaker, stage: int | None, speeds: list[Speed]
    ) -> dict[str, Any]:
        """Our engine and plan; the loop's own way to take a step."""
        model = self.model()
        counts = split(self.options.n, speeds)
        plan = make_plan(self.options.n, counts, [speed.micro_batch for speed in speeds])
        wire_s = measure_wire(list(model.parameters()))
        predicted = forecast(counts, speeds, wire_s, 1)
        seating = Seating(
            replace(self.config, stage=stage), self.rank, self.team.size, self.team.device,
            self.team.precisions, LossScale(1.0, dynamic=False), plan,
        )  # fmt: skip
        engine = make_engine(model, seating)
        sizes = plan.micro_batches[self.rank]
        batches = [self.batch(model, size) for size in sizes]

        def step() -> None:
            losses: list[Tensor] = []
            for place, batch in enumerate(batches):
                losses.append(engine.accumulate(batch, plan.global_batch, place == len(sizes) - 1))
            engine.step(torch.cat(losses).sum(), 0.0)

        return {"step_s": self.time_steps(step), "predicted_s": predicted.step_s}

    def peer(self, mode: str) -> dict[str, Any]:
        """A peer as its documentation says: N / ranks samples each."""
        model = self.model()
        batch = self.batch(model, self.options.n // self.team.size)
        step = getattr(self, "_" + mode.replace("-", "_"))(model, batch)
        return {"step_s": self.time_steps(step)}

    def _plain_ddp(self, model: Paced, batch: Batch) -> Callable[[], None]:
        ddp = DistributedDataParallel(model)
        optimizer = make_optimizer(model.net, self.config)

        def step() -> None:
            optimizer.zero_grad()
            functional.cross_entropy(ddp(batch.images), batch.labels).backward()
            optimizer.step()

        return step

    def _accelerate(self, model: Paced, batch: Batch) -> Callable[[], None]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        net, optimizer = accelerator.prepare(model, make_optimizer(model.net, self.config))

        def step() -> None:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(net(batch.images), batch.labels))
            optimizer.step()

        return step

    def _deepspeed(self, model: Paced, batch: Batch, stage: int) -> Callable[[], None]:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model.net, self.config),
            config={
                "train_micro_batch_size_per_gpu": len(batch.labels),
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )  # fmt: skip

        def step() -> None:
            engine.backward(functional.cross_entropy(engine(batch.images), batch.labels))
            engine.step()

        return step

    def _deepspeed_0(self, model: Paced, batch: Batch) -> Callable[[], None]:
        return self._deepspeed(model, batch, 0)

    def _deepspeed_1(self, model: Paced, batch: Batch) -> Callable[[], None]:
        return self._deepspeed(model, batch, 1)


def main(world: launch.World, options: argparse.Namespace) -> None:
    """Measure the limit, all modes in turn, and the limit again, for each repeat."""
    torch.set_num_threads(1)
    bench = Bench(world, join_team(world, "fp32"), options)

    def tell(mode: str, repeat: int, result: dict[str, Any]) -> None:
        if world.rank == 0:
            print("RESULT " + json.dumps({"mode": mode, "repeat": repeat, **result}), flush=True)

    for repeat in range(options.repeats):
        speeds = bench.speeds()
        tell("limit", repeat, {"step_s": limit_s(options.n, speeds)})
        order = options.modes if repeat % 2 == 0 else options.modes[::-1]
        for mode in order:
            if mode in OURS:
                make = DdpEngine if OURS[mode] is None else ZeroEngine
                tell(mode, repeat, bench.ours(make, OURS[mode], speeds))
            else:
                tell(mode, repeat, bench.peer(mode))
            gc.collect()
            dist.barrier()
        tell("limit", repeat, {"step_s": limit_s(options.n, bench.speeds())})
    leave_team()


def arguments() -> argparse.Namespace:
    """Options, as mixed_lab.py gives them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=180)
    parser.add_argument("--speeds", type=lambda text: [float(w) for w in text.split(":")])
    parser.add_argument("--fastest-s", type=float, default=0.006)
    parser.add_argument("--overhead-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", type=lambda text: text.split(","))
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    launch.run(lambda world: main(world, given))

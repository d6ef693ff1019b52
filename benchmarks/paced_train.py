"""The training scripts on paced hosts, one of which may change; replan_lab.py and tesla_replay.py
start it.

    ... ./entry_cn.sh benchmarks/paced_train.py --rates 70,50,30,20,10 [OPTIONS OF train_vit.py]
    ... ./entry_cn.sh benchmarks/paced_train.py --rates ... --slow 1:2:40:80 [OPTIONS]

--rates are samples a second, by rank; --optimizer-s what an optimizer step takes on each.
--slower is by how much all time there is is stretched: measuring then takes longer too. --slow
RANK:FACTOR:FROM:TO makes one rank FACTOR times slower from step FROM to step TO. Whatever
the precision of a rank is called, it computes in fp32 here; the plan goes by the name.
"""

import argparse
import time
from typing import Any

import torch
from paced import Pace, Paced
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from motley.engines.strategies import TORCH, ZERO, known_strategies, list_engines
from motley.launch.world import World, run
from motley.tasks.task import Task
from motley.train.command_line import read_config, training_parser
from motley.train.start import train


def numbers(text: str) -> list[float]:
    """Of a list with commas."""
    return [float(word) for word in text.split(",")]


def main() -> None:
    """Put a paced model and a schedule of its pace where training would have its own."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rates", type=numbers, required=True)
    parser.add_argument("--optimizer-s", type=numbers)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--slow", type=lambda text: [float(word) for word in text.split(":")])
    parser.add_argument("--engine", choices=("ddp", "deepspeed"), default="ddp")
    given, rest = parser.parse_known_args()
    strategies = known_strategies(ZERO if given.engine == "deepspeed" else TORCH)
    config = read_config(training_parser(str(__doc__), strategies), rest)

    def work(world: World) -> None:
        torch.set_num_threads(1)
        Paced.measuring_s *= given.slower
        pace = Pace(1 / given.rates[world.rank])
        make: Any = list_engines(config, strategies)
        if given.slow:
            make = Changing(make, pace, world.rank, given.slow)
        if given.optimizer_s:
            pace_optimizer(given.optimizer_s[world.rank])

        def model(task: Task, net: nn.Module, _: str, __: torch.device) -> Paced:
            return Paced(task, net, pace)

        train(world, config, make, model)

    run(work)


class Changing:
    """An engine maker whose engines change the pace between two steps."""

    def __init__(self, make: Any, pace: Pace, rank: int, slow: list[float]) -> None:
        self.traits = make.traits
        self._make, self._pace, self._rank, self._slow = make, pace, rank, slow

    def __call__(self, model: Any, context: Any) -> Any:
        """Set one on a model."""
        slow_rank, factor, first, end = self._slow
        engine, taken = self._make(model, context), 0
        real = engine.accumulate

        def accumulate(batch: Any, n_global: int, last: bool) -> Any:
            nonlocal taken
            slow = self._rank == slow_rank and first <= taken < end
            self._pace.factor = factor if slow else 1.0
            taken += last
            return real(batch, n_global, last)

        engine.accumulate = accumulate
        return engine


def pace_optimizer(step_s: float) -> None:
    """Let each step of any optimizer take so long."""
    began = 0.0

    def begin(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def end(*_: Any) -> None:
        time.sleep(max(0.0, began + step_s - time.perf_counter()))

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


if __name__ == "__main__":
    main()

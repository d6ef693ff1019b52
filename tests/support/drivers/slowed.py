"""Trains, and slows one part of the steps after another by a known time.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/slowed.py [OPTIONS]

After PHASE steps as they are, each of CAUSES takes SLOW_S longer for PHASE steps. It does on both
ranks, but the last cause is rank 1 alone.
"""

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch.distributed as dist

from motley.data.loader import Loader, Steps
from motley.data.source import Batch, Tensors
from motley.engines.ddp import NoOverlapEngine
from motley.engines.protocol import EngineContext
from motley.launch.world import run
from motley.plan.plan import Plan
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import SpeedTable
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

PHASE, SLOW_S, COMPUTE_S = 9, 0.2, 0.02
CAUSES = ("input", "optimizer", "host", "wire", "rank")
_now = {"step": -1}  # of this rank


def slow(cause: str) -> None:
    """Sleep if the present step is one that this cause slows."""
    phase = _now["step"] // PHASE
    if 0 < phase <= len(CAUSES) and CAUSES[phase - 1] == cause:
        time.sleep(SLOW_S)


class SlowedModel(TaskModel):
    """Takes its time for a batch, and rank 1 more in its phase."""

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """See TaskModel."""
        if _now["step"] >= 0 and not scored:
            time.sleep(COMPUTE_S)
            if dist.get_rank() == 1:
                slow("rank")
        return super().forward(data, scored)


class SlowedEngine(NoOverlapEngine):
    """Has a slow wire in one phase, and a slow optimizer in another."""

    def __init__(self, model: TaskModel, context: EngineContext) -> None:
        super().__init__(model, context)
        self.optimizer.register_step_pre_hook(lambda *_: slow("optimizer"))

    def _send(self) -> None:
        slow("wire")
        super()._send()


class SlowedMonitor(ReplanMonitor):
    """Runs slow Python between the parts of a step, and proposes nothing."""

    def step(self, *_: object) -> None:
        """See ReplanMonitor."""
        slow("host")


def slow_steps(loader: Loader, epoch: int, consumed: int, plan: Plan) -> Steps:
    """Loader.steps, whose micro-batches come late in one phase."""
    steps = _steps(loader, epoch, consumed, plan)
    read = steps._read

    def late(done: int) -> Any:
        batches = read(done)
        usual = type(batches).__next__

        class Late(type(batches)):  # type: ignore[misc]
            def __next__(self) -> Batch:
                _now["step"] += 1
                slow("input")
                return usual(self)

        batches.__class__ = Late
        return batches

    steps._read = late
    return steps


_steps = Loader.steps

if __name__ == "__main__":
    Loader.steps = slow_steps  # type: ignore[method-assign]
    config = read_config(training_parser(str(__doc__)))

    def monitor(speeds: Sequence[SpeedTable], kinds: Sequence[Hashable]) -> ReplanMonitor:
        """Ask nothing of the speeds."""
        return SlowedMonitor(speeds, kinds)

    run(lambda world: train(world, config, SlowedEngine, SlowedModel, monitor))

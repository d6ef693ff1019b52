"""Trains with one rank that becomes four times slower at step 30 and recovers at step 60.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/slowing.py [OPTIONS]

The options are those of train_vit.py.
"""

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from motley.data.source import Batch, Tensors
from motley.engines.ddp import NoOverlapEngine
from motley.launch.world import run
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import SpeedTable
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

SAMPLE_S = 0.004  # slow beside the real computation, whose noise then matters little


class Slow(TaskModel):
    """Takes its time for each sample, also while it is measured."""

    factor = 1

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """See TaskModel."""
        if torch.is_grad_enabled():
            time.sleep(SAMPLE_S * Slow.factor * len(data.get("images", ())))
        return super().forward(data, scored)


class Counting(NoOverlapEngine):
    """Makes the first rank slow between two steps."""

    steps = 0

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """See motley.engines.protocol.Engine."""
        Slow.factor = 4 if self._context.rank == 0 and 30 <= self.steps < 60 else 1
        self.steps += last
        super().accumulate(batch, n_global, last)

    def evaluate(self, batch: Batch) -> Tensor:
        """See motley.engines.protocol.Engine."""
        if self._context.rank == 0:
            print(f"evaluated {len(batch)} after step {self.steps}", flush=True)
        return super().evaluate(batch)


if __name__ == "__main__":
    config = read_config(training_parser(str(__doc__)))

    def monitor(speeds: Sequence[SpeedTable], kinds: Sequence[Hashable]) -> ReplanMonitor:
        """CPU ranks of one machine count as equal, which these are not."""
        return ReplanMonitor(speeds, range(len(kinds)))

    run(lambda world: train(world, config, Counting, Slow, monitor))

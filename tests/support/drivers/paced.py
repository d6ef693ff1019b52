"""Trains with ranks that all take their time for each sample, so that each host is worth its share.

mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/paced.py [OPTIONS]

The options are those of train_vit.py.
"""

import time
from typing import Any

import torch

from motley.data.source import Tensors
from motley.engines.ddp import NoOverlapEngine
from motley.launch.world import run
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

SAMPLE_S = 0.02


class Slow(TaskModel):
    """Takes its time."""

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """See TaskModel."""
        if torch.is_grad_enabled():
            time.sleep(SAMPLE_S * len(data.get("images", ())))
        return super().forward(data, scored)


if __name__ == "__main__":
    config = read_config(training_parser(str(__doc__)))
    run(lambda world: train(world, config, NoOverlapEngine, Slow))

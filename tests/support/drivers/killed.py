"""Trains, and is killed just before an evaluation: after the checkpoint, if one is due there.

mpirun -np 1 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/killed.py --before 2 [OPTIONS]

``--before 0``: never.
"""

import argparse
import os
import signal

from torch import Tensor

from motley.data.source import Batch
from motley.engines.ddp import NoOverlapEngine
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
from motley.train.start import train


class Killed(NoOverlapEngine):
    """Begins one evaluation less than ``before``."""

    before = 0
    _due = False
    _evaluations = 0

    def sync_parameters(self) -> None:
        """See motley.engines.protocol.Engine; it goes before an evaluation."""
        super().sync_parameters()
        self._due = True

    def evaluate(self, batch: Batch) -> Tensor:
        """See motley.engines.protocol.Engine."""
        self._evaluations += self._due
        self._due = False
        if self._evaluations == self.before:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(batch)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--before", type=int, required=True)
    given, rest = own.parse_known_args()
    Killed.before = given.before
    config = read_config(training_parser(str(__doc__)), rest)
    run(lambda world: train(world, config, Killed))

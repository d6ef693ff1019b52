"""Trains with one rank that becomes four times slower at step 30 and recovers at step 60.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/drivers/slowing.py [OPTIONS of train_vit.py]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch_dist"))

from ddp_engine import DdpEngine
from torch import Tensor

from motley import launch, train
from motley.options import read_config, training_parser
from motley.rebalance import Watch
from motley.sampler import Batch


class Slowing(DdpEngine):
    """Sleeps after each micro-batch, as a slower device would compute."""

    steps = 0

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> Tensor:
        """See motley.engine.Engine."""
        slow = 4 if self._seating.rank == 0 and 30 <= self.steps < 60 else 1
        time.sleep(0.002 * slow * len(batch.labels))
        self.steps += last
        return super().accumulate(batch, n_global, last)


if __name__ == "__main__":
    # CPU ranks of one machine count as equal, which these are not.
    train.Watch = lambda speeds, kinds: Watch(speeds, range(len(kinds)))
    config = read_config(training_parser(str(__doc__)))
    launch.run(lambda world: train.train(world, config, Slowing))

"""Trains, and reads the outcome of each step late, as ranks with GPUs do, on CPUs.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/late.py [OPTIONS]

With ``--at-once`` it reads as ranks without GPUs do. At its end it prints how many steps were read
late.
"""

import sys

from motley.engines.ddp import NoOverlapEngine
from motley.engines.protocol import LaunchedStep
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
from motley.train.start import train


class LateEngine(NoOverlapEngine):
    """Has a device that could finish a step without the host."""

    read_late = 0

    def _may_read_late(self) -> bool:
        return self._finishes_on_device()

    def launch_step(self, late: bool) -> LaunchedStep:
        """See motley.engines.protocol.Engine."""
        LateEngine.read_late += late
        return super().launch_step(late)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--at-once"]
    engine = NoOverlapEngine if len(words) < len(sys.argv) - 1 else LateEngine
    config = read_config(training_parser(str(__doc__)), words)
    run(lambda world: train(world, config, engine))
    print(f"read late: {LateEngine.read_late}", flush=True)

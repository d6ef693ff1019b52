"""Trains, and asks for the end at a step boundary once its last rank has begun step 7.

mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/pausing.py [OPTIONS]

The options are those of torch_dist/train_vit.py.
"""

import os
import threading
import time

from motley.engines.strategies import TORCH, known_strategies, list_engines
from motley.launch.world import World, run
from motley.membership.pause import PAUSE_SIGNAL
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

STEP = 7


def ask(world: World) -> None:
    """As whoever is on that host, and may."""
    while (world.supervisor.step or 0) < STEP:
        time.sleep(0.001)
    os.kill(os.getpid(), PAUSE_SIGNAL)


def main() -> None:
    strategies = known_strategies(TORCH)
    config = read_config(training_parser("", strategies))

    def work(world: World) -> None:
        if world.rank == world.size - 1:
            threading.Thread(target=ask, args=(world,), daemon=True).start()
        train(world, config, list_engines(config, strategies))

    run(work)


if __name__ == "__main__":
    main()

"""Trains, and is killed just before an evaluation: after the checkpoint, if one is due there.

mpirun -np 1 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/killed.py --before 2 [OPTIONS]

``--before 0``: never.
"""

import argparse
import os
import signal
from typing import Any

from motley.config.options import read_config, training_parser
from motley.engines.ddp import DdpEngine
from motley.launch.world import run
from motley.train import loop as train

if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--before", type=int, required=True)
    given, rest = own.parse_known_args()
    evaluate, made = train.evaluate, list[Any]()

    def killed(*arguments: Any) -> Any:
        """Evaluate, so many times less one."""
        made.append(None)
        if len(made) == given.before:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*arguments)

    train.evaluate = killed
    config = read_config(training_parser(str(__doc__)), rest)
    run(lambda world: train.train(world, config, DdpEngine))

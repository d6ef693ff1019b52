"""Trains where of more than three ranks the first alone writes steps, as of more than 64.

mpirun -np 4 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/few_writers.py [OPTIONS]

The options are those of train_vit.py.
"""

import functools

import motley.train.start as start
from motley.engines.ddp import NoOverlapEngine
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser

if __name__ == "__main__":
    config = read_config(training_parser(str(__doc__)))
    start.Recorder = functools.partial(start.Recorder, most_writers=3)  # type: ignore
    run(lambda world: start.train(world, config, NoOverlapEngine))

"""Trains on forked ranks, whose caches are in a folder of their own, as on a disk of another node.

own_cache.py FOLDER [OPTIONS]

The options are those of train_vit.py.
"""

import sys
import tempfile

from motley.engines.ddp import NoOverlapEngine
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

if __name__ == "__main__":
    tempfile.tempdir = sys.argv.pop(1)
    config = read_config(training_parser(str(__doc__)))
    run(lambda world: train(world, config, NoOverlapEngine))

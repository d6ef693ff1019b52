"""Train any model on all ranks: with torch.distributed, or with DeepSpeed where --stage is given.

mpirun -np 5 --hostfile hosts.txt motley train --task text --epochs 2
mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --stage 3
mpirun -np 5 --hostfile hosts.txt motley train --resume auto

Options of a task are listed with --task NAME --help-all.
"""

import sys

from motley.engines.strategy import TORCH, ZERO
from motley.train.start import train_script

_OF_ZERO = ("--stage", "--deepspeed-config", "--offload")


def main() -> None:
    """Train as the command line asks."""
    flags = {word.partition("=")[0] for word in sys.argv[1:]}
    train_script(TORCH if flags.isdisjoint(_OF_ZERO) else ZERO, str(__doc__))

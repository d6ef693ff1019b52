"""Train any model on all ranks: with torch.distributed, or with DeepSpeed where --stage is given.

mpirun -np 5 --hostfile hosts.txt motley train --task text --epochs 2
mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt motley train --task mine.py --stage 3
mpirun -np 5 --hostfile hosts.txt motley train --resume auto

Options of a task are listed with --task NAME --help-all.
"""

import sys

from motley.config.config_file import ConfigFile, split_config
from motley.engines.strategy import TORCH, ZERO
from motley.errors import MotleyError
from motley.train.start import train_script

_OF_ZERO = {"stage", "deepspeed_config"}


def main() -> None:
    """Train as the command line asks."""
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:]}
    train_script(ZERO if _OF_ZERO & (names | _named_in_file()) else TORCH, str(__doc__))


def _named_in_file() -> set[str]:
    """Return the options of the file that ``--config`` names."""
    try:
        path, _ = split_config(sys.argv[1:])
        return set(ConfigFile.read(path).values) if path else set()
    except MotleyError:  # which reading the command line says better
        return set()

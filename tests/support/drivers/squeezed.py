"""Trains, and lets memory run out on rank 1: in a forward pass, then in a backward pass.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/squeezed.py [OPTIONS]

with ``--stage 1`` or ``--wire local:2`` among the options too.

The limit is the kernel's own (RLIMIT_AS), the error that of torch's allocator.
"""

import argparse
import ctypes
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor

from motley.data.source import Batch
from motley.engines.protocol import LaunchedStep
from motley.engines.strategies.zero import TRAITS
from motley.launch.world import run
from motley.membership import messages
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train

if "--stage" in sys.argv:
    from motley.engines.zero_engine import ZeroEngine as Engine
elif "local:2" in sys.argv:
    from motley.engines.local_sgd import LocalEngine as Engine
elif "--late" in sys.argv:
    from late import LateEngine as Engine
elif "--no-overlap" in sys.argv:
    from motley.engines.ddp import NoOverlapEngine as Engine
else:
    from motley.engines.ddp import DdpEngine as Engine

_M_MMAP_THRESHOLD, _SMALL = -3, 1 << 16  # malloc gives larger blocks back when they are freed
_SPARE = 28 << 20  # bytes; a pass of 256 digits takes 32 MiB, of 128 half of it
_BALLAST = 16 << 20


def leave(spare: int) -> None:
    """Let this process have no more memory than it has now, and so many bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


class Squeezed(Engine):  # type: ignore[misc, valid-type]
    """Takes memory away from rank 1, twice."""

    step_number = 0

    def __init__(self, model: TaskModel, context: object) -> None:
        super().__init__(model, context)
        model.net.blocks[0].register_forward_hook(self._watch)
        self._ballast: Tensor | None = None

    def accumulate(self, batch: Batch, n_global: int, last: bool) -> None:
        """See motley.engines.protocol.Engine."""
        if self._context.rank == 1 and self.step_number == 3:
            leave(_SPARE)
        self.step_number += last
        super().accumulate(batch, n_global, last)

    def _watch(self, _block: object, _given: object, made: Tensor) -> None:
        in_training = made.requires_grad and len(made) > 1
        if self._context.rank == 1 and self.step_number == 8 and in_training:
            made.register_hook(self._fill)

    def _fill(self, _: Tensor) -> None:
        if self._ballast is None:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            self._ballast = torch.empty(_BALLAST, dtype=torch.uint8)
            leave(0)

    def launch_step(self, late: bool) -> LaunchedStep:
        """See motley.engines.protocol.Engine."""
        if self._ballast is not None:
            self._ballast = torch.empty(0)
        return super().launch_step(late)


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _SMALL)
    # A thread that comes and goes leaves an arena of malloc's, 64 MiB of addresses that are within
    # the limit: where memory is to end, it would not.
    messages.get_on = lambda _: None
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--stage", type=int)
    own.add_argument("--no-overlap", action="store_true")
    own.add_argument("--late", action="store_true")
    given, rest = own.parse_known_args()
    config = read_config(training_parser(str(__doc__)), rest)
    if given.stage is not None:
        Squeezed.traits = TRAITS[given.stage]
    run(lambda world: train(world, config, Squeezed))

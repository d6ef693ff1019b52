"""The processes of one launch, whoever started them."""

import os
from collections.abc import Mapping
from typing import TypeVar

from motley.cluster.launcher import Launcher, launch_of
from motley.launch.mpi import Launched, MpiRanks
from motley.launch.tcp_ranks import TcpRanks

T = TypeVar("T")


class OneRank:
    """Implements :class:`Launched` for a process that nobody launched, as in a notebook."""

    rank, size = 0, 1

    def allgather(self, value: T) -> list[T]:
        """See Launched."""
        return [value]

    def on_this_machine(self) -> list[int]:
        """See Launched."""
        return [0]


def ranks_of_launch(environ: Mapping[str, str] = os.environ) -> Launched:
    """Meet the others; all ranks call it."""
    launch = launch_of(environ)
    if launch.by is Launcher.MPI:
        return MpiRanks()
    if launch.size == 1:
        return OneRank()
    return TcpRanks(launch, environ)

"""The processes of one launch, as MPI knows them. The only user of mpi4py.

Ranks are started by ``mpirun`` (Open MPI 4.1 or 5) or ``srun --mpi=pmix``.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from motley.errors import MotleyError

T = TypeVar("T")
_AT_ONCE = 50  # looks whether a message has come, without a rest; then with these between:
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3


class Launched(Protocol):
    """The processes of one launch, seen from one of them: :class:`MpiRanks`.

    Attributes:
        rank, size: 0-based number of this process, of how many.
    """

    rank: int
    size: int

    def allgather(self, value: T) -> list[T]:
        """Every rank's value, by rank. All ranks must call it."""

    def on_this_machine(self) -> list[int]:
        """The ranks of this machine, in order. All ranks must call it."""


class MpiRanks:
    """Implements :class:`Launched` for mpirun and srun."""

    def __init__(self) -> None:
        # Where Open MPI 5 has no use for libfabric's one-sided transport, it sleeps for a second
        # when it closes it; what ranks say to each other here has none either.
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
        from mpi4py import MPI  # importing it starts MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    def allgather(self, value: T) -> list[T]:
        """See :class:`Launched`. In round k each sends all that it knows to who is 2^k before it,
        so that after log2(size) rounds all know all (Bruck et al. 1997)."""
        known = {self.rank: value}
        distance = 1
        while distance < self.size:
            sent = self._comm.isend(known, (self.rank - distance) % self.size)
            sender = (self.rank + distance) % self.size
            came = _wait_for(partial(self._comm.improbe, source=sender))
            known = known | came.recv()
            _wait_for(sent.Test)
            distance *= 2
        return [known[rank] for rank in range(self.size)]

    def on_this_machine(self) -> list[int]:
        """See :class:`Launched`; by shared memory, since host names may be all alike."""
        self.allgather(None)  # it is over soon where all have come
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        ranks: list[int] = node.allgather(self.rank)
        return ranks


def _wait_for(look: Callable[[], Any]) -> Any:
    """What ``look`` finds, once it does. MPI's own waiting never sleeps, and so takes the processor
    from those that are waited for, where ranks share one, or from other users."""
    looks, pause_s = 0, _SHORTEST_S
    while not (found := look()):
        looks += 1
        if looks < _AT_ONCE:
            os.sched_yield()
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
    return found


def finalize_mpi() -> None:
    """Leave MPI, if this process is in it; all ranks do."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def check_size(size: int, environ: Mapping[str, str]) -> None:
    """Raise MotleyError if the launcher started several ranks that cannot see each other."""
    if size > 1 or "OMPI_COMM_WORLD_SIZE" in environ:
        return
    tasks, ranks = (_several(environ, name) for name in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE"))
    if tasks:
        raise MotleyError(
            f"Slurm started {tasks} tasks but MPI sees one: its PMIx and that of MPI do not fit; "
            "start them with srun --mpi=none, or with mpirun inside the allocation"
        )
    if ranks:
        raise MotleyError(
            f"the launcher started {ranks} ranks but MPI sees one: the launcher is of another MPI "
            "(MPICH, Intel MPI) than mpi4py; start them with the mpirun of setup/make_env.sh, or "
            "with torchrun"
        )


def _several(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable if it is more than 1, else 0."""
    digits = environ.get(name, "")
    return int(digits) if digits.isdigit() and int(digits) > 1 else 0

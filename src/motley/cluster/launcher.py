"""Who started this process, and as which rank of how many: the variables that launchers set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Launcher(Enum):
    """By what this process knows the others."""

    MPI = "mpirun, or srun with PMIx"
    SLURM = "srun without PMIx"
    TORCHRUN = "torchrun"
    ALONE = "nobody"


# Names of the processes that start a job of Open MPI's.
MPIRUN = frozenset({
    "mpirun", "mpiexec", "prterun", "orterun", "mpirun.openmpi", "mpiexec.openmpi",
})  # fmt: skip
# In the order in which they count: torchrun may be started by srun, and mpirun in an allocation.
_TORCHRUN, _MPI, _SLURM = "ROLE_RANK", ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), "SLURM_PROCID"
_OTHER_MPI = ("PMI_RANK", "PMI_ID", "MPI_LOCALRANKID")  # of MPICH and its kin
RANKS = (_TORCHRUN, *_MPI, _SLURM, _OTHER_MPI[0])
SIZES = ("ROLE_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
# Slurm's PMIx plugin ends the step when a process dies that is in MPI. keep_training.sh sets this
# variable, and the ranks of srun meet without MPI.
WITHOUT_MPI = "MOTLEY_WITHOUT_MPI"


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        rank, size: 0-based number of this process, of how many, as the launcher says.
        local_rank, local_size: the same on this machine; None where it does not say.
    """

    by: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def launch_of(environ: Mapping[str, str] = os.environ) -> Launch:
    """Needs no MPI, so that a script can print its help or a usage error once."""
    torchrun = _number(environ, (_TORCHRUN,)) is not None
    size = _number(environ, SIZES)
    several = _SLURM in environ and (size or 1) > 1
    if torchrun:
        by = Launcher.TORCHRUN
    elif several and WITHOUT_MPI in environ and _MPI[0] not in environ:
        by = Launcher.SLURM
    elif any(name in environ for name in (*_MPI, *_OTHER_MPI)):
        by = Launcher.MPI
    else:
        by = Launcher.SLURM if several else Launcher.ALONE
    return Launch(
        by, _number(environ, RANKS) or 0, size or 1,
        None if torchrun else _number(environ, _LOCAL_RANKS),
        None if torchrun else _number(environ, _LOCAL_SIZES),
    )  # fmt: skip


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        digits = environ.get(name, "").partition("(")[0]  # Slurm writes 3(x2)
        if digits.isdigit():
            return int(digits)
    return None

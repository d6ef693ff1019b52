"""The rank and the CPU cores that a launcher gives to this process.

The rank and the number of ranks are read from the variables that launchers set. A rank uses the
cores of the memory (NUMA) node to which its GPU is attached.

A core that accesses a GPU or memory through another processor's memory node is slower. On a machine
with one node, all cores are equal. Linux allocates memory on the node of the core that first writes
to it.
"""

import contextlib
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Launcher(Enum):
    """The program that started this process together with the other ranks."""

    MPI = "mpirun, or srun with PMIx"
    SLURM = "srun without PMIx"
    TORCHRUN = "torchrun"
    ALONE = "nobody"


# Names of the processes that start a job of Open MPI's.
MPIRUN = frozenset({
    "mpirun", "mpiexec", "prterun", "orterun", "mpirun.openmpi", "mpiexec.openmpi",
})  # fmt: skip
# In the order of precedence: torchrun may be started by srun, and mpirun in an allocation.
_TORCHRUN, _MPI, _SLURM = "ROLE_RANK", ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), "SLURM_PROCID"
_OTHER_MPI = ("PMI_RANK", "PMI_ID", "MPI_LOCALRANKID")  # variables of MPICH and related MPIs
RANKS = (_TORCHRUN, *_MPI, _SLURM, _OTHER_MPI[0])
SIZES = ("ROLE_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
# Slurm's PMIx plugin ends the step when a process that uses MPI dies. keep_training.sh sets this
# variable, so that the ranks of srun are joined without MPI.
WITHOUT_MPI = "MOTLEY_WITHOUT_MPI"


@dataclass(frozen=True)
class Launch:
    """The start of this process, as the launcher's environment variables describe it.

    Attributes:
        by: the launcher.
        rank: 0-based number of this process.
        size: number of processes.
        local_rank: number of this process among those of this machine; None: unknown.
        local_size: number of processes of this machine; None: unknown.
    """

    by: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the launch that the launcher's variables describe.

    The function does not start MPI. A script can thus print its help on one rank alone.
    """
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


_ROOT = Path("/")
_LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte"}
_ANCESTORS = 4  # most processes between a rank and its launcher
_BINDING_OPTIONS = {
    "bind-to", "bind-to-core", "bind-to-socket", "bind-to-none", "cpu-set", "cpu-list", "rankfile",
    "rf", "cpus-per-proc", "cpus-per-rank",
}  # fmt: skip
# Open MPI 4 passes an option on in the first variable. The user or a configuration sets the others.
_BINDING_VARIABLES = {
    "OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_hwloc_default_binding_policy", "PMIX_MCA_hwloc_default_binding_policy",
}  # fmt: skip
_BUS_ID = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


@dataclass(frozen=True)
class MemoryNode:
    """A memory (NUMA) node, and the cores that are attached to it."""

    number: int
    cores: frozenset[int]

    def words(self) -> str:
        """Return a description, for example ``cores 0-15,64-79 of memory node 1``."""
        return f"cores {core_list(self.cores)} of memory node {self.number}"


def memory_nodes(root: Path = _ROOT) -> tuple[MemoryNode, ...]:
    """Return all memory nodes that have cores, in order; () if Linux does not list them."""
    result = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cores = read_core_list((path / "cpulist").read_text())
            if cores:
                result.append(MemoryNode(int(path.name.removeprefix("node")), cores))
    return tuple(sorted(result, key=lambda node: node.number))


def node_of_device(bus_id: str, root: Path = _ROOT) -> int | None:
    """Return the number of the memory node to which a PCI device is attached, or None.

    Args:
        bus_id: the device's address in the form of NVML, for example ``00000000:3B:00.0``.
        root: root of the file system.
    """
    match = _BUS_ID.fullmatch(bus_id.lower())
    if match is None:
        return None
    try:
        number = int((root / "sys/bus/pci/devices" / match[1] / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None  # -1: unknown to the firmware


def choose_node(
    nodes: Sequence[MemoryNode],
    near: int | None,
    has_gpu: bool,
    local_rank: int,
    local_size: int,
    allowed: Collection[int],
) -> MemoryNode | None:
    """Return the memory node to which to bind a rank; None: leave the rank's cores unchanged.

    A rank with a GPU gets the node of that GPU. Ranks without a GPU are spread over the nodes if
    each node gets equally many ranks. A single rank needs the cores of all nodes.

    Args:
        nodes: memory nodes of this machine.
        near: number of the memory node to which the rank's GPU is attached; None: unknown.
        has_gpu: True if the rank has a GPU.
        local_rank: number of the rank among the ranks of this machine.
        local_size: number of ranks on this machine.
        allowed: cores that this process may use. If these are not all cores of the machine, the
            user or the launcher has chosen them, and the result is None.
    """
    everything = frozenset[int]().union(*(node.cores for node in nodes))
    if len(nodes) < 2 or frozenset(allowed) != everything:
        return None
    if has_gpu:
        return next((node for node in nodes if node.number == near), None)
    if local_size % len(nodes):
        return None
    return nodes[local_rank * len(nodes) // local_size]


def bind_process(cores: Collection[int]) -> None:
    """Bind this process to these cores, with all its threads and later child processes."""
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(path.name), cores)


def leave_default_binding(environ: Mapping[str, str] = os.environ) -> bool:
    """Bind this process to all cores of its launcher, if Open MPI has bound it by default.

    If there are one or two ranks, Open MPI binds each rank to one core. If there are more ranks,
    Open MPI binds each rank to one memory node. The configuration of Open MPI, or the user, may set
    another binding. Open MPI counts from the machine's first core, even if the launcher may not use
    that core: ``taskset -c 16-31 mpirun`` starts a rank on core 0. On one core a rank shares its
    time with its own loader processes: an H100 then reached 0.65 to 0.73 of its unbound images/s.

    A binding that the user requested stays. The request is an environment variable, or an option of
    the launcher on this host. The launcher has the cores of its container or job.

    Returns:
        True if the process may use other cores now.
    """
    launcher = _find_launcher()
    if launcher is None or not _BINDING_VARIABLES.isdisjoint(environ):
        return False
    wanted = os.sched_getaffinity(launcher)
    if os.sched_getaffinity(0) >= wanted or _asks_for_binding(_command_line(launcher)):
        return False
    bind_process(wanted)
    return True


def cores_per_rank(ranks: int) -> int:
    """Return the number of cores for each rank if ``ranks`` ranks share this machine; at least 1.

    Ranks share the cores of their launcher. If the launcher has bound this process to a few cores,
    the result is at most the number of these cores.
    """
    own, launcher, nodes = os.sched_getaffinity(0), _find_launcher(), memory_nodes()
    shared = len(own)
    if launcher is not None:
        shared = len(own | os.sched_getaffinity(launcher))
    elif len(nodes) > 1 and any(node.cores == own for node in nodes):  # see bind_process
        shared = sum(len(node.cores) for node in nodes)
    return max(1, min(len(own), shared // ranks))


def few_cores_note(ranks: int) -> str:
    """Return a warning if the ranks' binding leaves cores of this machine idle; else "".

    Args:
        ranks: number of ranks of this machine.
    """
    own, launcher = os.sched_getaffinity(0), _find_launcher()
    shared = os.sched_getaffinity(launcher) if launcher is not None else own
    if len(own) * ranks >= len(shared):
        return ""
    return (
        f"mpirun binds each rank on {socket.gethostname()}, and its loader processes, to "
        f"{len(own)} of {len(shared)} cores; mpirun --bind-to none gives each rank all cores"
    )


def _find_launcher() -> int | None:
    """Return the process id of the Open MPI launcher that started this process, or None.

    The launcher may have started this process through a script.
    """
    pid = os.getppid()
    for _ in range(_ANCESTORS):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            if name.partition(".")[0] in _LAUNCHERS:
                os.sched_getaffinity(pid)  # it may end meanwhile
                return pid
            pid = int(stat[stat.rindex(")") + 1 :].split()[1])
        except (OSError, ValueError):
            return None
    return None


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _asks_for_binding(words: Sequence[str]) -> bool:
    return any(
        word.lstrip("-") in _BINDING_OPTIONS if word.startswith("-") else ":pe=" in word.lower()
        for word in words
    )


def read_core_list(text: str) -> frozenset[int]:
    """Return the cores of a list as Linux writes it, such as ``0-15,64``.

    Raises:
        ValueError: the text is no list of cores.
    """
    result: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        result.update(range(int(first), int(last or first) + 1))
    return frozenset(result)


def core_list(cores: Collection[int]) -> str:
    """Return the cores as text that :func:`read_core_list` parses."""
    parts: list[tuple[int, int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1] = parts[-1][0], core
        else:
            parts.append((core, core))
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in parts)

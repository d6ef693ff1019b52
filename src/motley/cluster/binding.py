"""Which cores are next to a GPU, and what keeps a process on them; as Linux tells under /sys.

A core that reaches a GPU, or memory, through another processor's memory node is slower at it. On a
machine with one node there is nothing to choose. Memory follows the cores: Linux takes it from the
node of the core that first writes to it.
"""

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_BUS_ID = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


@dataclass(frozen=True)
class MemoryNode:
    """Memory, and the cores that are next to it."""

    number: int
    cores: frozenset[int]

    def words(self) -> str:
        """As in ``cores 0-15,64-79 of memory node 1``."""
        return f"cores {core_list(self.cores)} of memory node {self.number}"


def memory_nodes(root: Path = _ROOT) -> tuple[MemoryNode, ...]:
    """All that have cores, in order; () where Linux does not tell."""
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cores = read_core_list((path / "cpulist").read_text())
            if cores:
                found.append(MemoryNode(int(path.name.removeprefix("node")), cores))
    return tuple(sorted(found, key=lambda node: node.number))


def node_of_device(bus_id: str, root: Path = _ROOT) -> int | None:
    """The number of the memory node that a device on the PCI bus is next to; None: unknown.

    Args:
        bus_id: as NVML writes it, for example ``00000000:3B:00.0``.
    """
    match = _BUS_ID.fullmatch(bus_id.lower())
    if match is None:
        return None
    try:
        number = int((root / "sys/bus/pci/devices" / match[1] / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None  # -1 where the firmware does not tell


def choose_node(
    nodes: Sequence[MemoryNode],
    near: int | None,
    has_gpu: bool,
    local_rank: int,
    local_size: int,
    allowed: Collection[int],
) -> MemoryNode | None:
    """Where a rank is to stay; None: anywhere, as it is.

    With a GPU, next to that. Without one, ranks are spread over the nodes if each gets as many;
    one rank alone needs the cores of all.

    Args:
        near: the number of the node next to its GPU; None: unknown.
        local_rank, local_size: among the ranks of this machine.
        allowed: cores that this process may use. If these are not all, somebody has chosen them.
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
    """Keep this process on these cores, with the threads that it has and all that it starts."""
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(path.name), cores)


def cores_here() -> int:
    """How many the ranks of this machine share: this process's, or all where it is kept on a node's
    by :func:`bind_process`."""
    allowed, nodes = os.sched_getaffinity(0), memory_nodes()
    if len(nodes) > 1 and any(node.cores == allowed for node in nodes):
        return sum(len(node.cores) for node in nodes)
    return len(allowed)


def read_core_list(text: str) -> frozenset[int]:
    """Of ``0-15,64``, as Linux writes it; ValueError for what is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def core_list(cores: Collection[int]) -> str:
    """What :func:`read_core_list` reads."""
    parts: list[tuple[int, int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1] = parts[-1][0], core
        else:
            parts.append((core, core))
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in parts)

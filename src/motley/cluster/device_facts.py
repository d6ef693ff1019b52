"""What is known of a GPU, whoever made it, and of the processes on it."""

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    Attributes:
        index: number on its machine, in PCI order as nvidia-smi counts.
        capability: CUDA compute capability, for example (8, 6).
        memory_total_mib, memory_used_mib: of everybody.
        others_mib: held by other users' processes; None where the driver does not tell.
        others: their names, for example ("alice",).
        memory_node: the number of the memory node next to it; None: unknown.
        load: 0 to 1. temperature_c: degrees Celsius. power_w: watts.
    """

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    load: float | None
    temperature_c: float | None
    power_w: float | None
    others_mib: float | None
    others: tuple[str, ...]
    memory_node: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        gpu, uuid: of the GPU, as in :class:`DeviceFacts`.
        user: its owner; "?" where that is hidden.
        mib: memory that it holds there; None where the driver does not tell.
    """

    gpu: int
    uuid: str
    pid: int
    user: str
    mib: float | None


def others_among(
    processes: Iterable[tuple[int, float | None]] | None,
) -> tuple[float | None, tuple[str, ...]]:
    """Memory (MiB) and names of the users, other than this one, with processes on a GPU.

    Args:
        processes: number and memory, MiB, of each.
    """
    if processes is None:
        return None, ()
    used, names = 0.0, set()
    for pid, mib in processes:
        uid = _owner(pid)
        if uid != os.getuid():
            used += mib or 0.0
            names.add(_user_name(uid))
    return used, tuple(sorted(names))


def user_of(pid: int) -> str:
    """The name of a process's owner; "?" where that is hidden."""
    return _user_name(_owner(pid))


def _owner(pid: int) -> int | None:
    """User id of a process; None where this machine hides it (another container's, say)."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _user_name(uid: int | None) -> str:
    if uid is None:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

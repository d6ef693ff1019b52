"""Processor and memory limits of a host, and the freezer: cgroup v1, or v2 where that is."""

import os
from pathlib import Path

from lab_change import Changes

from motley.errors import MotleyError

# Below 10 ms a quota makes the scheduler's own grain visible; 100 ms, the default, lets a
# host run ahead for a long time and then stand still.
PERIOD_US = 20_000


class Cgroups:
    """The cgroups of one lab, ``motley-lab.LAB.HOST`` under each controller.

    Args:
        lab: the lab's name.
        root: where the machine has its cgroups.
    """

    def __init__(self, change: Changes, lab: str, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._change = change
        self._root = root
        self._prefix = f"motley-lab.{lab}."
        self.unified = (root / "cgroup.controllers").exists()
        self._parents = (
            dict.fromkeys(("cpu", "memory", "freezer"), root)
            if self.unified
            else {n: root / n for n in ("cpu", "memory", "freezer") if (root / n).is_dir()}
        )

    def _of(self, controller: str, host: str) -> Path:
        if controller not in self._parents:
            raise MotleyError(
                f"{host} needs the cgroup controller {controller}, which this machine does not "
                f"have under {self._root}; mount it, or remove the limit from the profile"
            )
        return self._parents[controller] / f"{self._prefix}{host}"

    def all_of(self, host: str) -> list[Path]:
        """Return the folders that hold the host's processes."""
        return sorted({parent / f"{self._prefix}{host}" for parent in self._parents.values()})

    def make(self, host: str, cpus: float | None, memory_mib: float | None) -> None:
        """Make the host's cgroups with its limits; None is no limit."""
        try:
            for folder in self.all_of(host):
                self._change.folder(folder)
            if self.unified and (cpus is not None or memory_mib is not None):
                self._change.put(self._root / "cgroup.subtree_control", "+cpu +memory")
        except (OSError, MotleyError) as error:
            raise MotleyError(
                f"a cgroup cannot be created here ({error}); in a container, run it privileged "
                f"with {self._root} writable, or remove cpus and memory_mib from the profile"
            ) from None
        if cpus is not None:
            self.set_cpus(host, cpus)
        if memory_mib is not None:
            name = "memory.max" if self.unified else "memory.limit_in_bytes"
            self._change.put(self._of("memory", host) / name, str(round(memory_mib * 2**20)))

    def set_cpus(self, host: str, cpus: float | None) -> None:
        """Let the host use so many processors; None is no limit."""
        quota = None if cpus is None else max(round(cpus * PERIOD_US), 1000)  # the kernel's least
        folder = self._of("cpu", host)
        if self.unified:
            self._change.put(folder / "cpu.max", f"{quota or 'max'} {PERIOD_US}")
        else:
            self._change.put(folder / "cpu.cfs_period_us", str(PERIOD_US))
            self._change.put(folder / "cpu.cfs_quota_us", str(quota or -1))

    def join(self, host: str) -> None:
        """Put this process into the host's cgroups."""
        for folder in self.all_of(host):
            self._change.put(folder / "cgroup.procs", str(os.getpid()))

    def freeze(self, host: str) -> None:
        """Stop all processes of the host, wherever they are."""
        self._set_frozen(host, True)

    def thaw(self, host: str) -> None:
        """Undo :meth:`freeze`."""
        self._set_frozen(host, False)

    def _set_frozen(self, host: str, frozen: bool) -> None:
        folder = self._of("freezer", host)
        if self.unified:
            self._change.put(folder / "cgroup.freeze", str(int(frozen)))
        else:
            self._change.put(folder / "freezer.state", "FROZEN" if frozen else "THAWED")

    def frozen(self, host: str) -> bool:
        """Whether the host is frozen."""
        folder = self._of("freezer", host)
        path, thawed = (
            (folder / "cgroup.freeze", "0")
            if self.unified
            else (folder / "freezer.state", "THAWED")
        )
        return path.exists() and path.read_text().strip() != thawed

    def left(self) -> list[Path]:
        """All cgroups of this lab that exist."""
        result = {
            path for parent in self._parents.values() for path in parent.glob(f"{self._prefix}*")
        }
        return sorted(result)

    def remove_all(self) -> None:
        """Remove what there is, whoever made it; its processes are being killed."""
        for folder in self.left():
            self._change.remove_cgroup(folder)

    def thaw_all(self) -> None:
        """Thaw what there is: under v1 a killed process ends only when it is thawed."""
        for host in {path.name.removeprefix(self._prefix) for path in self.left()}:
            if "freezer" in self._parents and self.frozen(host):
                self.thaw(host)

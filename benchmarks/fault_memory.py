"""A process that the kernel's out-of-memory killer ends: in a cgroup that has no memory to give."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fault_job import until

_CGROUPS = Path("/sys/fs/cgroup")
_LEAST = str(64 << 10)  # bytes; what it holds already is counted where it was


@contextmanager
def starve(pid: int) -> Iterator[Callable[[], bool]]:
    """Whatever memory a process asks for from now on, the kernel kills it for; needs root.

    Yields:
        Whether the kernel has.
    """
    v2 = (_CGROUPS / "cgroup.controllers").exists()
    if v2:
        (_CGROUPS / "cgroup.subtree_control").write_text("+memory")
    group = (_CGROUPS if v2 else _CGROUPS / "memory") / f"motley-faults.{pid}"
    group.mkdir()
    limit = "memory.max" if v2 else "memory.limit_in_bytes"
    counted = group / ("memory.events" if v2 else "memory.oom_control")

    def killed() -> bool:
        pairs = dict(line.split() for line in counted.read_text().splitlines())
        return int(pairs.get("oom_kill", 0)) > 0

    try:
        (group / limit).write_text(_LEAST)
        (group / "cgroup.procs").write_text(str(pid))
        yield killed
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), 10)
        group.rmdir()

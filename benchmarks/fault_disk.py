"""A small disk that hosts of a lab share, so that it can be full."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # system calls, the same on all machines since Linux 5.2
_CLONE, _EMPTY_PATH, _HERE, _NEWNS = 1, 4, -100, 0x20000


def small_disk(path: Path, kib: int) -> Path:
    """Mount one; needs root. ``umount -l`` ends it."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=1777", "none", str(path)]
    subprocess.run(mount, check=True)
    return path


def fill(disk: Path) -> None:
    """Leave no room; remove ``filler`` to have it back."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"0" * 4096)
        except OSError:
            return


def share(disk: Path, process: int, target: str) -> None:
    """Let those who share a process's mounts see a disk at ``target`` too; a process of its own
    does it, for whoever has threads cannot enter other mounts."""
    command = [sys.executable, __file__, str(disk), str(process), target]
    subprocess.run(command, check=True)


def _main() -> None:
    disk, process, target = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(_OPEN_TREE, _HERE, disk.encode(), _CLONE)
    with Path(f"/proc/{process}/ns/mnt").open() as mounts:
        entered = libc.setns(mounts.fileno(), _NEWNS)
    if tree < 0 or entered or libc.syscall(
        _MOVE_MOUNT, tree, b"", _HERE, target.encode(), _EMPTY_PATH
    ):  # fmt: skip
        sys.exit(f"{disk} cannot be shared: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    _main()

"""Has a thread leave a collective that waits for a rank which is gone; from another thread.

Gloo frees nobody from a peer that is silent; but it does where this process's own connections end.
NCCL has an abort of its own, after which what was queued on the device computes with anything.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

import torch.distributed as dist

_ABORT = getattr(dist.distributed_c10d, "_abort_process_group")  # noqa: B009  # torch: experimental


def connections() -> frozenset[int]:
    """The TCP connections of this process, by their inodes."""
    return frozenset(map(_inode, _connections()))


def abandon_group(
    since: Collection[int], others: Collection[socket.socket], hosts: Collection[str]
) -> None:
    """Break the process group, so that whoever waits in it is free.

    Args:
        since: :func:`connections` before it was made; these stay.
        others: they stay too.
        hosts: addresses of the machines that compute; connections to others stay.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _ABORT()
    stay = {*since, *(_inode(each) for each in others if each.fileno() >= 0)}
    for each in _connections():
        peer, *_ = each.getpeername()
        if _inode(each) not in stay and peer in hosts:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _inode(each: socket.socket) -> int:
    return os.fstat(each.fileno()).st_ino


def _connections() -> Iterator[socket.socket]:
    """A descriptor of its own for each, open until the next."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as each:
            inet = each.family in (socket.AF_INET, socket.AF_INET6)
            if inet and each.type == socket.SOCK_STREAM and _is_connected(each):
                yield each


def _is_connected(each: socket.socket) -> bool:
    try:
        each.getpeername()
    except OSError:
        return False
    return True

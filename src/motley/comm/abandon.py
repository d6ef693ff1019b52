"""Has a thread leave a collective that waits for a rank which is gone; from another thread.

Gloo frees nobody from a peer that is silent; but it does where this process's own connections end,
save where two end within a moment: there it forgot one wait in some sixty, which would have lasted
for its half an hour. So a gradient on a CPU is waited for by way of :func:`leavable`. NCCL has an
abort of its own, after which what was queued on the device computes with anything.
"""

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

_ABORT = getattr(dist.distributed_c10d, "_abort_process_group")  # noqa: B009  # torch: experimental

_NOTICE_S = 1.0  # in which gloo should notice that its connections have ended; usual: 0.06
_GATES: dict[Future[None], Future[Any]] = {}  # of what is waited for
_FORGOTTEN: list[Future[Any]] = []


def leavable(sent: Future[Any], device: torch.device) -> Future[Any]:
    """The same, but :func:`abandon_group` ends the wait, whatever the process group does.

    Args:
        device: where its value is; of a GPU's the future stays as it is.
    """
    if device.type != "cpu":
        return sent
    gate: Future[None] = Future()
    _GATES[gate] = sent

    def found(_: Future[None]) -> Any:
        if not sent.done():
            raise RuntimeError("the process group was abandoned")
        return sent.wait()

    sent.add_done_callback(lambda _: _open(gate))
    return gate.then(found)


def has_forgotten() -> bool:
    """Whether a thread of gloo's may wait for ever; who lets go of its group waits for it."""
    return not all(sent.done() for sent in _FORGOTTEN)


def _open(gate: Future[None]) -> None:
    _GATES.pop(gate, None)
    with contextlib.suppress(RuntimeError):  # it is open
        gate.set_result(None)


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
    deadline = time.monotonic() + _NOTICE_S
    while _GATES and time.monotonic() < deadline:
        time.sleep(_NOTICE_S / 100)
    for gate, sent in list(_GATES.items()):
        _FORGOTTEN.append(sent)
        _open(gate)


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

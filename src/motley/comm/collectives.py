"""Collectives of numbers and values over the process group, and a way to end a wait in them.

A rank must end its wait in a collective if another rank is lost.

Gloo does not end a wait for a silent peer. A wait usually ends when this process closes its own
connections. If two connections ended at nearly the same time, about one wait in sixty continued
until Gloo's timeout of half an hour. Waits for gradients on a CPU therefore use :func:`leavable`.
NCCL can abort its own waits. Work that was queued on the device then computes with undefined
values.
"""

import contextlib
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_ABORT = getattr(dist.distributed_c10d, "_abort_process_group")  # noqa: B009  # torch: experimental

_NOTICE_S = 1.0  # limit for gloo to notice closed connections; usual: 0.06
_GATES: dict[Future[None], Future[Any]] = {}  # collectives that threads wait for, by their gate
_FORGOTTEN: list[Future[Any]] = []  # collectives that may never end


def leavable(sent: Future[Any], device: torch.device) -> Future[Any]:
    """Return a future whose ``wait()`` always ends when :func:`abandon_group` is called.

    Args:
        sent: future of the collective.
        device: device of the future's value. For a GPU, the result is ``sent`` itself.
    """
    if device.type != "cpu":
        return sent
    gate: Future[None] = Future()
    _GATES[gate] = sent

    def get_result(_: Future[None]) -> Any:
        if not sent.done():
            raise RuntimeError("the process group was abandoned")
        return sent.wait()

    sent.add_done_callback(lambda _: _open(gate))
    return gate.then(get_result)


def has_forgotten() -> bool:
    """Return True if a collective was abandoned in this process and has not ended.

    A thread of gloo, or the destruction of the process group, may then block forever.
    """
    return not all(sent.done() for sent in _FORGOTTEN)


def _open(gate: Future[None]) -> None:
    _GATES.pop(gate, None)
    with contextlib.suppress(RuntimeError):  # the gate is open already
        gate.set_result(None)


def connections() -> frozenset[int]:
    """Return the inode numbers of this process's TCP connections."""
    return frozenset(map(_inode, _connections()))


def abandon_group(
    since: Collection[int], others: Collection[socket.socket], hosts: Collection[str]
) -> None:
    """Close the process group's connections, so that each thread that waits in it continues.

    Args:
        since: result of :func:`connections` before the group was made. These connections stay open.
        others: other connections that stay open.
        hosts: addresses of the hosts of all ranks. Connections to other hosts stay open.
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
    """Yield a duplicate of each TCP connection of this process, and close it afterwards."""
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


# Torch 2.14 gave it another name, and warns of the one before.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_LEFT: deque[tuple[float, Any]] = deque()  # time of leaving, and the group


def leave_group(group: Any = None) -> None:
    """Leave a process group and destroy it. All of its ranks call this function.

    Args:
        group: the group; None: the default group, which is destroyed with all other groups.
    """
    groups = [group or dist.group.WORLD]
    if has_forgotten():
        groups += dist.distributed_c10d._world.pg_map
    by_gloo = dist.get_backend(group) == "gloo"
    dist.destroy_process_group(group)
    # A callback of torch's PowerSGD may still hold the group in one of gloo's own threads. If that
    # thread released it last, the thread would have to join itself, and abort the process.
    if by_gloo:
        _LEFT.append((time.monotonic(), groups))
    release_groups()


def release_groups() -> None:
    """Free the threads and files of process groups that this rank left more than a second ago."""
    if has_forgotten():
        return
    while _LEFT and time.monotonic() - _LEFT[0][0] > 1.0:
        _LEFT.popleft()


def all_gather(values: Sequence[Tensor | float], can_leave: bool = False) -> Tensor:
    """Gather every rank's numbers, fp64 [ranks, numbers]. All ranks must call it.

    Over NCCL the result is on the GPU, and the host does not wait for it.

    Args:
        values: numbers of this rank.
        can_leave: see :func:`gather_parts`.
    """
    wire = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.stack(
        [
            value.to(wire, torch.float64)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=torch.float64, device=wire)  # a copy would wait
            for value in values
        ]
    )
    return gather_parts(own, can_leave).view(-1, len(own))


def gather_parts(part: Tensor, can_leave: bool = False) -> Tensor:
    """Gather every rank's part, concatenated, [ranks * numbers]. All ranks must call it.

    Args:
        part: numbers of this rank, [numbers], the same count on each rank.
        can_leave: True: :func:`abandon_group` always ends the wait. The call takes 0.1 ms longer.
    """
    whole = part.new_empty(dist.get_world_size() * len(part))
    if part.is_cuda or not can_leave:
        _all_gather(whole, part)
    else:
        leavable(_all_gather(whole, part, async_op=True).get_future(), part.device).wait()
    return whole


def broadcast_object(value: Any, device: torch.device, source: int = 0) -> Any:
    """Return one rank's value, of any type, on all ranks. All ranks must call it.

    Args:
        value: the value; ignored on other ranks than ``source``.
        device: device of this rank.
        source: the rank that has the value.
    """
    wire = device if dist.get_backend() == "nccl" else torch.device("cpu")
    content = torch.zeros(0, dtype=torch.uint8)
    if dist.get_rank() == source:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = broadcast(torch.tensor([len(content)], device=wire), source)
    content = content.to(wire) if dist.get_rank() == source else content.new_empty(
        int(size), device=wire
    )  # fmt: skip
    return pickle.loads(broadcast(content, source).cpu().numpy().tobytes())


def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Copy one rank's tensor to all ranks, in place, and return it. All ranks must call it.

    Args:
        tensor: this rank's tensor, on the device on which ranks communicate.
        source: the rank that has the value.
    """
    work: Any = dist.broadcast(tensor, src=source, async_op=True)
    if tensor.is_cuda:
        work.wait()
    else:
        leavable(work.get_future(), tensor.device).wait()
    return tensor


@dataclass(frozen=True)
class Copy:
    """A copy to the CPU that may still be running.

    Attributes:
        table: the copy. Read it only when the copy is done.
        wait: function that waits for the copy, but not for later work of the GPU.
        is_done: function that returns True if the copy is done, without a wait.
    """

    table: Tensor
    wait: Callable[[], object] = lambda: None
    is_done: Callable[[], bool] = lambda: True


def begin_copy(table: Tensor) -> Copy:
    """Start to copy a table to the CPU, in parallel with the host's work."""
    copy = table.to("cpu", non_blocking=True)
    if not table.is_cuda:
        return Copy(copy)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return Copy(copy, event.synchronize, event.query)


def mark_now(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until the device has done all work that is queued now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def all_gather_object(value: Any, can_leave: bool = False) -> list[Any]:
    """Gather every rank's value, of any type, by rank. All ranks must call it.

    Args:
        value: value of this rank.
        can_leave: see :func:`gather_parts`.
    """
    if not can_leave:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for (size,) in all_gather_floats([float(len(content))], can_leave)]
    wire = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    part = torch.zeros(max(sizes), dtype=torch.uint8, device=wire)
    part[: len(content)] = content.to(wire)
    parts = gather_parts(part, can_leave).cpu().view(len(sizes), -1)
    return [
        pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(parts, sizes, strict=True)
    ]


def all_gather_floats(
    values: Sequence[Tensor | float], can_leave: bool = False
) -> list[list[float]]:
    """Gather every rank's numbers into lists, by rank. All ranks must call it.

    Args:
        values: numbers of this rank.
        can_leave: see :func:`gather_parts`.
    """
    rows: list[list[float]] = all_gather(values, can_leave).tolist()
    return rows

"""Gathers numbers and values over the process group, and leaves groups safely."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.abandon import has_forgotten

# Torch 2.14 gave it another name, and warns of the one before.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_LEFT: deque[tuple[float, Any]] = deque()  # when, and the group


def leave_group(group: Any = None) -> None:
    """Destroy a process group; all of its ranks call it.

    Args:
        group: None: the default one, and with it all others.
    """
    kept = [group or dist.group.WORLD]
    if has_forgotten():
        kept += dist.distributed_c10d._world.pg_map
    by_gloo = dist.get_backend(group) == "gloo"
    dist.destroy_process_group(group)
    # A callback of torch's PowerSGD may still hold the group in one of gloo's own threads. If that
    # were the last to let go, the thread would have to join itself, and abort the process.
    if by_gloo:
        _LEFT.append((time.monotonic(), kept))
    release_groups()


def release_groups() -> None:
    """Let go of groups that were left a second ago, and of their threads and files."""
    if has_forgotten():
        return
    while _LEFT and time.monotonic() - _LEFT[0][0] > 1.0:
        _LEFT.popleft()


def all_gather(values: Sequence[Tensor | float]) -> Tensor:
    """Every rank's numbers, fp64 [ranks, numbers]. All ranks must call it.

    Over NCCL the result is on the GPU, and nothing waits for it here.
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
    return gather_parts(own).view(-1, len(own))


def gather_parts(part: Tensor) -> Tensor:
    """Every rank's part, one behind the other, [ranks * numbers]. All ranks must call it.

    Args:
        part: [numbers], as many on each rank.
    """
    whole = part.new_empty(dist.get_world_size() * len(part))
    _all_gather(whole, part)
    return whole


@dataclass(frozen=True)
class Copy:
    """A copy on the CPU, under way.

    Attributes:
        table: may be read once it is done.
        wait: waits for it, but for no later work of the GPU.
        is_done: asks without waiting.
    """

    table: Tensor
    wait: Callable[[], object] = lambda: None
    is_done: Callable[[], bool] = lambda: True


def begin_copy(table: Tensor) -> Copy:
    """Copy a table to the CPU, beside what the host does meanwhile."""
    copy = table.to("cpu", non_blocking=True)
    if not table.is_cuda:
        return Copy(copy)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return Copy(copy, event.synchronize, event.query)


def mark_now(device: torch.device) -> Callable[[], object]:
    """Return what waits until a device has done all that it was given so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, of any type, by rank. All ranks must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_gather_floats(values: Sequence[Tensor | float]) -> list[list[float]]:
    """Every rank's numbers, by rank. All ranks must call it."""
    rows: list[list[float]] = all_gather(values).tolist()
    return rows

"""Measures how long ranks take to add up their gradients: all of them together, for real."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from motley.comm.reducer import Bucket, buckets_of
from motley.measure.device import wait_for
from motley.plan.wire import AllReduceCost, WireMode

_PIECE_MIB = 25.0  # sent at once at most, and
_TINY = 8  # high and wide is a matrix of next to nothing
_PIECES = 8  # so many, if that is less: what is to hide behind a backward pass goes in several
TRIES = 3  # of which the median counts
_ENOUGH_S = 0.25  # of tries that took so long, none is repeated: the longer, the less noise
_PART_S = 1.0  # that sending a part of the gradient should take at most


def measure_wire(
    parameters: Sequence[torch.Tensor], mode: WireMode, tries: int = TRIES
) -> AllReduceCost:
    """Time what it takes to add up next to nothing, and the gradient of these parameters; of a
    wire so slow that this takes seconds, a part of it.

    All ranks of the process group must call it, and get the same answer.

    Args:
        tries: of each, at most.
    """
    device = parameters[0].device
    total = sum(parameter.numel() for parameter in parameters)
    pieces = buckets_of(parameters, min(int(_PIECE_MIB * 2**18), total // _PIECES))
    # As many small ones as pieces: a GPU is told of the next while it works on one.
    side = max(_TINY, mode.least_side)
    tiny = [torch.empty(side, side, device=device) for _ in pieces]
    # Who comes last did not wait for others.
    nothing_s = _send_s(mode, buckets_of(tiny, side**2), tries, dist.ReduceOp.MIN, warm=True)
    latency_s = nothing_s / len(pieces)
    first_s = _send_s(mode, pieces[:1], tries)
    part = pieces[: max(1, min(len(pieces), int(_PART_S / first_s)))]
    part_s = _send_s(mode, part, tries) if len(part) > 1 else first_s
    size = mode.bytes_of([tuple(parameter.shape) for parameter in parameters])
    first, share = (
        mode.bytes_of([tuple(g.shape) for bucket in sent for g in bucket.grads]) / size
        for sent in (pieces[:1], part)
    )
    # What was not sent would take as long as what was after the first: that fills a pipeline.
    rest_s = (1 - share) * (
        (part_s - first_s) / (share - first) if len(part) > 1 else part_s / share
    )
    transfer_s = max(0.0, part_s + rest_s - latency_s * len(part) / share)
    return cost_of(parameters, mode, latency_s, transfer_s)


def cost_of(
    parameters: Sequence[torch.Tensor], mode: WireMode, latency_s: float, transfer_s: float
) -> AllReduceCost:
    """What adding up the gradient of these parameters costs, where it took so long."""
    size = mode.bytes_of([tuple(parameter.shape) for parameter in parameters])
    return AllReduceCost(
        latency_s, transfer_s, dist.get_backend() == "nccl",
        size=float(size), sync_every=mode.sync_every, tensors=_tensors(parameters, mode),
    )  # fmt: skip


def _tensors(parameters: Sequence[torch.Tensor], mode: WireMode) -> tuple[tuple[float, float], ...]:
    """See AllReduceCost.tensors: the last layer's gradients come first."""
    shapes = [tuple(parameter.shape) for parameter in reversed(parameters)]
    numbers, size = sum(map(math.prod, shapes)), mode.bytes_of(shapes)
    return tuple((math.prod(shape) / numbers, mode.bytes_of([shape]) / size) for shape in shapes)


def _send_s(
    mode: WireMode,
    buckets: Sequence[Bucket],
    tries: int,
    whose: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX,
    warm: bool = False,
) -> float:
    """Seconds of adding up buckets, the same on all ranks.

    Args:
        whose: the rank whose time counts. MAX: the slowest rank's, since ranks behind fast links
            are done before what they sent has come through a slow one. MIN: the fastest rank's,
            which excludes waiting for the others to begin.
        warm: once before it is timed, to make the connections.
    """
    device = buckets[0].flat.device
    reducer = mode.reducer(device)
    reducer.begin_at_once()

    def send() -> None:
        for future in [reducer.send(bucket) for bucket in buckets]:
            future.wait()

    if warm:
        send()
    seconds = _together_s(send, tries, device, whose)
    reducer.close()
    return seconds


def _together_s(
    run: Callable[[], None], most: int, device: torch.device, whose: dist.ReduceOp.RedOpType
) -> float:
    """Seconds of what all ranks do together: the median of some tries, the same on all ranks.

    Args:
        most: tries. whose: MAX or MIN; see :func:`_send_s`.
    """
    tries: list[float] = []
    while len(tries) < most and sum(tries) < _ENOUGH_S:
        dist.all_reduce(torch.zeros(1, device=device))  # they begin together
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(spent, whose)
        tries.append(spent.item())
    return statistics.median(tries)

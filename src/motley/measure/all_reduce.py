"""Measures how long ranks take to add up their gradients: all of them together, for real."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from motley.comm.collectives import leave_group
from motley.comm.modes.numbers import EXACT
from motley.comm.reducer import Bucket, Reducer, buckets_of
from motley.measure.device import wait_for
from motley.plan.wire import Addition, AllReduceCost, FewerCost, WireMode

_PIECE_MIB = 25.0  # sent at once at most, and
_TINY = 8  # high and wide is a matrix of next to nothing
_MOST = 2**30  # numbers that are sent to time a wire, of a gradient that no device need hold
_PIECES = 8  # so many, if that is less: what is to hide behind a backward pass goes in several
TRIES = 3  # of which the median counts
_ENOUGH_S = 0.25  # of tries that took so long, none is repeated: the longer, the less noise
_PART_S = 3.0  # that sending a part of the gradient should take at most, if it is no pair


def measure_wire(
    parameters: Sequence[torch.Tensor], mode: WireMode, tries: int = TRIES, group: Any = None
) -> AllReduceCost:
    """Time what it takes to add up next to nothing, and the gradient of these parameters; of a
    wire so slow that this takes seconds, a part of it.

    All ranks of the process group must call it, and get the same answer.

    Args:
        tries: of each, at most. group: whose ranks alone do it, in the exact mode; None: all.
    """
    device = parameters[0].device
    send_s = _Sender(mode, tries, device, group).seconds
    total = sum(parameter.numel() for parameter in parameters)
    some = _first(parameters, _MOST)
    pieces = buckets_of(some, min(int(_PIECE_MIB * 2**18), total // _PIECES))
    # As many small ones as pieces: a GPU is told of the next while it works on one.
    side = max(_TINY, mode.least_side)
    tiny = [torch.empty(side, side, device=device) for _ in pieces]
    # Who comes last did not wait for others.
    nothing_s = send_s(buckets_of(tiny, side**2), dist.ReduceOp.MIN, warm=True)
    latency_s = nothing_s / len(pieces)
    first_s = send_s(pieces[:1])
    part = pieces[: max(2, min(len(pieces), int(_PART_S / first_s)))]  # one alone has no slope
    part_s = send_s(part) if len(part) > 1 else first_s
    first, more, whole = (_bytes_of(mode, sent) for sent in (pieces[:1], part, pieces))
    all_s = _all_s(first, more, whole, first_s, part_s)
    count = len(pieces)
    del part, pieces  # memory of theirs is needed
    computes = mode.addition is Addition.BUCKETS
    if first < more == whole and (computes or dist.get_backend() == "nccl"):
        # A bucket with matrices that are computed with costs more than one of next to nothing
        # does; and one of NCCL's less, which begins with it while another is on its way.
        each_s = (all_s - send_s(buckets_of(some, total))) / (count - 1)
        latency_s = max(latency_s if computes else 0.0, each_s)
    transfer_s = max(0.0, all_s - latency_s * count) * total / sum(p.numel() for p in some)
    return cost_of(parameters, mode, latency_s, transfer_s)


def _bytes_of(mode: WireMode, buckets: Sequence[Bucket]) -> float:
    return mode.bytes_of([tuple(grad.shape) for bucket in buckets for grad in bucket.grads])


def _all_s(first: float, part: float, whole: float, first_s: float, part_s: float) -> float:
    """What all would take, of which a part was sent: the rest as long as what was after the first,
    that fills a pipeline.

    Args:
        first, part, whole: bytes. first_s, part_s: what was measured.
    """
    if part == first:
        return part_s * whole / part
    return part_s + (whole - part) * (part_s - first_s) / (part - first)


def _first(parameters: Sequence[torch.Tensor], numbers: int) -> Sequence[torch.Tensor]:
    """As many as have so many numbers, two at least."""
    ends = accumulate(parameter.numel() for parameter in parameters)
    return parameters[: max(2, sum(end <= numbers for end in ends))]


def measure_fewer(parameters: Sequence[torch.Tensor], ranks: Sequence[int]) -> FewerCost:
    """Time what the gradient of these parameters takes among some ranks alone, exactly.

    All ranks of the process group must call it, and get the same answer.
    """
    device, group = parameters[0].device, dist.new_group(list(ranks))
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() in ranks:
        seconds += measure_wire(parameters, EXACT, TRIES, group).transfer_s
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() in ranks:
        leave_group(group)
    return FewerCost(tuple(ranks), seconds.item())


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


@dataclass(frozen=True)
class _Sender:
    """Times how long buckets take to be added up. See :func:`measure_wire`."""

    mode: WireMode
    tries: int
    device: torch.device
    group: Any

    def seconds(
        self,
        buckets: Sequence[Bucket],
        whose: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX,
        warm: bool = False,
    ) -> float:
        """The same on all ranks.

        Args:
            whose: the rank whose time counts. MAX: the slowest rank's, since ranks behind fast
                links are done before what they sent has come through a slow one. MIN: the fastest
                rank's, which excludes waiting for the others to begin.
            warm: once before it is timed, to make the connections.
        """
        reducer = self.mode.reducer(self.device) if self.group is None else Reducer(self.group)
        reducer.begin_at_once()

        def send() -> None:
            for future in [reducer.send(bucket) for bucket in buckets]:
                future.wait()

        if warm:
            send()
        seconds = self._together_s(send, whose)
        reducer.close()
        return seconds

    def _together_s(self, run: Callable[[], None], whose: dist.ReduceOp.RedOpType) -> float:
        """Seconds of what all ranks do together: the median of some tries."""
        tries: list[float] = []
        while len(tries) < self.tries and sum(tries) < _ENOUGH_S:
            # They begin together.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            wait_for(self.device)
            start = time.perf_counter()
            run()
            wait_for(self.device)
            spent = torch.tensor(
                time.perf_counter() - start, dtype=torch.float64, device=self.device
            )
            dist.all_reduce(spent, whose, group=self.group)
            tries.append(spent.item())
        return statistics.median(tries)

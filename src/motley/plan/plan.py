"""The plan of a run: which ranks train, and how many samples of a batch each computes.

The module reads no file, clock or hardware.

The user sets the global batch N, which does not change by itself. Rank i takes n_i of its samples,
where the n_i sum to N. The rank computes them in micro-batches of similar size, with at most m_i
samples. Every rank derives the same plan from the same facts, so nothing here may read a clock, the
environment or hardware.

In a time T, rank i can compute a certain number of samples (see motley.plan.speeds). The split uses
the smallest T in which all ranks together can compute the batch, and gives each rank its number for
this T. Such a split minimises the time of the slowest rank. The arithmetic is vectorised over the
ranks. A thousand ranks are split in milliseconds, and monitored in each step.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.plan.speeds import SpeedTable
from motley.plan.wire import WireMode

Floats = NDArray[np.float64]

_BISECTIONS = 45


class Speeds:
    """The speed tables of all ranks, as arrays of shape [ranks].

    Args:
        tables: speed tables of all ranks. All have the same grain, which is the number of samples
            that stay together.

    Attributes:
        step_s: for each rank, the seconds per step that do not depend on the batch.
    """

    def __init__(self, tables: Sequence[SpeedTable]) -> None:
        longest = max(len(table.sizes) for table in tables)
        seconds = np.array([_filled(table.seconds, longest) for table in tables])
        self._ranks = np.arange(len(tables))
        self._last = np.array([len(table.sizes) - 1 for table in tables])
        self._sizes = np.array([_filled(table.sizes, longest) for table in tables])
        before = np.array([0.0 if table.reads_ahead else table.input_s for table in tables])
        self._beside = np.array([table.input_s if table.reads_ahead else 0.0 for table in tables])
        self._m = np.array([float(table.micro_batch) for table in tables])
        self._seconds = _rising(self._sizes, seconds, self._m)
        self._m_s = self._micro_s(self._m) + before * self._m
        self._seconds += before[:, None] * np.where(np.isinf(self._sizes), 0.0, self._sizes)
        self.step_s = np.array([table.step_s for table in tables])
        self._grain = tables[0].grain

    def computed_s(self, samples: Floats) -> Floats:
        """Return the seconds that each rank takes for all its micro-batches; shape [ranks].

        This is the slow part of :meth:`ready_s`. The result depends on the samples alone.
        """
        parts: Floats = np.maximum(1.0, np.ceil(samples / self._m))
        computed: Floats = parts * self._micro_s(samples / parts)
        return computed

    def ready_s(
        self, samples: Floats, slowdown: Floats | float = 1.0, computed_s: Floats | None = None
    ) -> Floats:
        """Return :meth:`SpeedTable.compute_seconds` minus ``step_s`` of all ranks; shape [ranks].

        Args:
            samples: samples of each rank in a step.
            slowdown: factor by which each rank is slower than its table.
            computed_s: result of :meth:`computed_s` for these samples; None: not computed yet.
        """
        computed = self.computed_s(samples) if computed_s is None else computed_s
        read = slowdown * self._beside * samples - self.step_s
        ready: Floats = np.maximum(slowdown * computed, read)
        return ready

    def compute_seconds(self, samples: Floats, slowdown: Floats | float = 1.0) -> Floats:
        """Return :meth:`SpeedTable.compute_seconds` of all ranks; shape [ranks].

        Args:
            samples: samples of each rank in a step.
            slowdown: factor by which each rank computes slower than in its table. The fixed time
                ``step_s`` of a step is not multiplied.
        """
        return self.step_s + self.ready_s(samples, slowdown)

    def samples_in(self, seconds: float, slowdown: Floats | float = 1.0) -> Floats:
        """Return the most samples that each rank can compute in ``seconds``; shape [ranks].

        This is the inverse of :meth:`compute_seconds`.
        """
        remaining = np.maximum(0.0, seconds - self.step_s) / slowdown
        full = np.floor(remaining / self._m_s)
        more = (full + 1) * self._size_in(remaining / (full + 1))
        computed = np.where(remaining > 0, np.maximum(more, full * self._m), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            read = np.where(self._beside > 0, seconds / (slowdown * self._beside), np.inf)
        result: Floats = np.minimum(computed, read)
        return result

    def count_whole_samples(
        self, seconds: float, slowdown: Floats | float = 1.0
    ) -> NDArray[np.int64]:
        """Return :meth:`samples_in` rounded down to multiples of the grain; shape [ranks].

        A result that is below a whole number only by a rounding error is rounded up.
        """
        grains = self.samples_in(seconds, slowdown) / self._grain
        return (grains + 1e-8).astype(np.int64) * self._grain

    def _micro_s(self, samples: Floats) -> Floats:
        right = np.clip((self._sizes <= samples[:, None]).sum(axis=1), 1, np.maximum(1, self._last))
        result = self._between(samples, self._sizes, self._seconds, np.minimum(right, self._last))
        first, shortest = self._sizes[:, 0], self._seconds[:, 0]
        alone = (samples <= first) | (self._last == 0)
        result = np.where(alone, shortest * np.maximum(1.0, samples / first), result)
        return np.where(samples > 0, result, 0.0)

    def _size_in(self, seconds: Floats) -> Floats:
        """Return the largest micro-batch, at most m, that each rank computes in ``seconds``."""
        place = (self._seconds <= seconds[:, None]).sum(axis=1) - 1
        right = np.minimum(place + 1, self._last)
        result = self._between(seconds, self._seconds, self._sizes, right)
        result = np.where(self._sizes[self._ranks, place] >= self._m, self._m, result)
        return np.where(place >= 0, result, 0.0)

    def _between(self, at: Floats, x: Floats, y: Floats, right: NDArray[np.int64]) -> Floats:
        """Interpolate ``y`` linearly at the point ``at`` on the axis ``x``, for each rank.

        The line goes through the columns ``right`` - 1 and ``right``.
        """
        left = np.maximum(right - 1, 0)
        low, high = x[self._ranks, left], x[self._ranks, right]
        start, end = y[self._ranks, left], y[self._ranks, right]
        width = np.where(high > low, high - low, 1.0)
        return start + (end - start) * (at - low) / width


def _filled(values: Sequence[float], length: int) -> Sequence[float]:
    return values if len(values) == length else [*values, *[math.inf] * (length - len(values))]


def _rising(sizes: Floats, seconds: Floats, m: Floats) -> Floats:
    """Return :attr:`SpeedTable.rising` of all tables, [ranks, sizes].

    Computing the tables one by one would take half of the time of a plan.
    """
    shortest = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    at_m = np.where(sizes == m[:, None], shortest, np.inf).min(axis=1)
    least = (at_m / m)[:, None] * np.where(np.isinf(sizes), 0.0, sizes)
    rising: Floats = np.where(sizes < m[:, None], np.maximum(least, shortest), shortest)
    return rising


def split(global_batch: int, tables: Sequence[SpeedTable]) -> tuple[int, ...]:
    """Return the number of samples for each rank that minimises the time of the slowest rank.

    The samples sum to the batch. Each rank's number is a multiple of the tables' grain, the number
    of samples that stay together. The batch must be a multiple of the grain, too.

    The algorithm is fast for thousands of ranks. First the time is found by bisection. Then surplus
    samples are removed one by one, each from the rank that would finish last.
    """
    speeds = Speeds(_some(tables))
    whole = speeds.count_whole_samples(_time_for(global_batch, speeds, len(tables)))
    counts, surplus = whole.tolist(), int(whole.sum() - global_batch) // tables[0].grain
    took = np.where(whole > 0, speeds.compute_seconds(whole.astype(float)), 0.0)
    last = [  # among equal times, the largest share is first: equal may be within clock noise
        (-tables[rank].compute_seconds(counts[rank]), -counts[rank], rank)
        for rank in _slowest(surplus, took) if counts[rank]
    ]  # fmt: skip
    heapq.heapify(last)
    for _ in range(surplus):
        *_, rank = heapq.heappop(last)
        counts[rank] -= tables[0].grain
        if n := counts[rank]:
            heapq.heappush(last, (-tables[rank].compute_seconds(n), -n, rank))
    return tuple(counts)


def _slowest(count: int, seconds: Floats) -> Sequence[int]:
    """Return the ``count`` slowest ranks. Include all ranks that tie with the fastest of them."""
    if not 0 < count < len(seconds):
        return range(len(seconds) if count else 0)
    least = (1 - 1e-9) * np.partition(seconds, -count)[-count]
    result: list[int] = np.flatnonzero(seconds >= least).tolist()
    return result


def limit_s(global_batch: int, speeds: Sequence[SpeedTable]) -> float:
    """Return the seconds of a step in which no rank waits and no data is sent.

    The limit assumes that samples can be divided, and that every rank computes at its best rate.
    The result is the smallest T for which the sum of rate_i * (T - step_s_i) equals N. The sum is
    over the ranks with step_s_i < T.
    """
    rate, lost, shortest = 0.0, 0.0, math.inf
    for speed in sorted(_some(speeds), key=lambda speed: speed.step_s):
        rate, lost = rate + speed.rate, lost + speed.rate * speed.step_s
        shortest = min(shortest, (global_batch + lost) / rate)
    return shortest


def _time_for(global_batch: int, speeds: Speeds, ranks: int) -> float:
    """Return the smallest time in which the ranks together compute the batch.

    The relative error is 1e-12. The result may be longer than the smallest time if the ranks
    compute no further sample in the difference. This happens when the shares are equal.
    """
    low = 0.0
    high = 1.000001 * float(speeds.compute_seconds(np.full(ranks, float(global_batch))).max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        done = speeds.count_whole_samples(middle).sum()
        if done == global_batch:
            return middle
        low, high = (low, middle) if done > global_batch else (middle, high)
    return high


def _some(tables: Sequence[SpeedTable]) -> Sequence[SpeedTable]:
    if not tables:
        raise MotleyError(
            "all ranks were left out, so none can train; see the reason given for each"
        )
    return tables


@dataclass(frozen=True)
class Rank:
    """A rank of the launch. Its fields are filled in while a run starts.

    The number of the rank's samples in a batch is ``Plan.counts[group_rank]``.

    Attributes:
        rank: number in the launch, from 0, which never changes. Errors and file names use it.
        host: name of the rank's host.
        machine: lowest rank on the same host. The number identifies the host, because two hosts may
            have the same name.
        local_rank: number among the ranks of that host, from 0.
        gpus: UUIDs of the GPUs that are visible to the rank, in the order of their indices in the
            rank.
        gpu: index of the rank's GPU in ``gpus``; None for the CPU. :func:`choose_participants` sets
            this field and ``reason``.
        reason: reason why the rank does not train; empty if it trains.
        group_rank: number in the process group. This field and all fields after it are set once a
            rank that trains has opened its device.
        device: for example ``cuda:0 NVIDIA H200`` or ``cpu``.
        uuid: UUID of the GPU; empty without one.
        precision: precision in which the rank computes.
        why: reason for the choice of the precision, in words.
        cores: cores to which the rank is bound, in words; empty if the rank may use any core.
        maker: maker of the GPU, NVIDIA or AMD; empty without one.
    """

    rank: int
    host: str
    machine: int = 0
    local_rank: int = 0
    gpus: tuple[str, ...] = ()
    gpu: int | None = None
    reason: str = ""
    group_rank: int = 0
    device: str = ""
    uuid: str = ""
    precision: str = ""
    why: str = ""
    cores: str = ""
    maker: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the rank's entry in ``ranks`` or ``left_out`` of run.json."""
        if self.reason:
            return {"rank": self.rank, "host": self.host, "reason": self.reason}
        return {
            "rank": self.rank, "group_rank": self.group_rank, "host": self.host,
            "device": self.device, "uuid": self.uuid, "precision": self.precision,
            "why": self.why, "cores": self.cores, "maker": self.maker,
        }  # fmt: skip


def choose_participants(
    launched: Sequence[Rank], hosts: Collection[str] | None = None
) -> tuple[Rank, ...]:
    """Choose the launched ranks that train, and the GPU of each; return all ranks.

    On a host with GPUs, one rank per GPU trains. NCCL refuses two ranks on one GPU, and two models
    on one GPU only slow each other down. On a host without GPUs all ranks train. A launcher may
    make all GPUs visible to every rank, or only one GPU to each rank.

    Args:
        launched: the ranks of the job.
        hosts: names of the hosts that may train; None: all.

    Returns:
        All ranks, by number, each with its ``gpu`` or the ``reason`` why it does not train.
    """
    chosen = []
    taken: set[tuple[int, str]] = set()
    for rank in sorted(launched, key=lambda rank: (rank.machine, rank.local_rank)):
        gpu, reason = None, ""
        free = [each for each in rank.gpus if (rank.machine, each) not in taken]
        if hosts is not None and rank.host not in hosts:
            reason = "not named in --hosts"
        elif free:
            taken.add((rank.machine, free[0]))
            gpu = rank.gpus.index(free[0])
        elif rank.gpus:
            reason = (
                f"{rank.host} has {_count(len(rank.gpus), 'GPU')}, and rank {rank.rank} is rank "
                f"number {rank.local_rank + 1} on it"
            )
        chosen.append(replace(rank, gpu=gpu, reason=reason))
    return tuple(sorted(chosen, key=lambda rank: rank.rank))


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide ``total`` into integers in proportion to ``shares`` (largest remainder).

    The counts sum to ``total``, each is within 1 of its exact quota, and a share of 0 gets 0. Ties
    go to the lower rank.
    """
    whole = sum(shares)
    quotas = [total * share / whole for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(
        (rank for rank, share in enumerate(shares) if share > 0),
        key=lambda rank: (counts[rank] - quotas[rank], rank),
    )
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def cut(count: int, size: int) -> tuple[int, ...]:
    """Divide ``count`` samples into the fewest micro-batches of at most ``size`` samples.

    The sizes of the micro-batches differ by one at most. Equal sizes avoid a small last
    micro-batch, which would take more time per sample.
    """
    parts = -(-count // size)
    if parts == 0:
        return ()
    least, more = divmod(count, parts)
    return (least + 1,) * more + (least,) * (parts - more)


@dataclass(frozen=True)
class Plan:
    """The division of one global batch among the ranks.

    Attributes:
        global_batch: N, samples in one optimizer step over all ranks.
        shares: one number per rank, in proportion to the samples that the rank takes.
        max_micro_batch: m_i, the most samples that rank i holds in memory at once.
        wire: wire mode, the form in which gradients travel between ranks and are added up.
        equal_micro_steps: True if every rank takes the same number of micro-batches. A rank that
            needs fewer computes empty micro-batches in addition. Engines that communicate at every
            micro-batch need this.
        buckets: number of gradient buckets whose all-reduces overlap the backward pass, if the
            engine supports it. 1: one all-reduce after the backward pass. None: torch DDP's
            default.
        grain: number of consecutive samples that stay together, in one micro-batch of one rank. If
            the grain does not divide the batch, the remaining samples form a shorter group, in a
            micro-batch of their own.
    """

    global_batch: int
    shares: tuple[float, ...]
    max_micro_batch: tuple[int, ...]
    wire: WireMode
    equal_micro_steps: bool = False
    buckets: int | None = None
    grain: int = 1

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        """Number of each rank's groups of ``grain`` samples, including the short group."""
        return apportion(-(-self.global_batch // self.grain), self.shares)

    @cached_property
    def _short(self) -> int:
        """Number of samples in the short group; 0 without a short group."""
        return self.global_batch % self.grain

    @cached_property
    def _last(self) -> int:
        """Rank that has the last samples of the batch."""
        return max(rank for rank, groups in enumerate(self._groups) if groups)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """n_i, the number of samples of each rank. The sum is N, the global batch."""
        counts = [groups * self.grain for groups in self._groups]
        if self._short:
            counts[self._last] += self._short - self.grain
        return tuple(counts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index at which each rank's slice of the global batch starts."""
        return (0, *accumulate(self.counts))[:-1]

    @cached_property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of each rank's micro-batches. Every rank has at least one, which may be empty."""
        grain = self.grain
        cuts = [
            tuple(grain * groups for groups in cut(n // grain, max(1, m // grain)))
            for n, m in zip(self.counts, self.max_micro_batch, strict=True)
        ]
        if self._short:
            cuts[self._last] += (self._short,)
        longest = max(map(len, cuts))
        least = longest if self.equal_micro_steps else 1
        return tuple(sizes + (0,) * (least - len(sizes)) for sizes in cuts)

    def for_batch(self, n: int) -> "Plan":
        """Return this plan for a global batch of ``n`` samples, such as an epoch's last batch."""
        return self if n == self.global_batch else replace(self, global_batch=n)

    def by_cost(self, costs: Sequence[float]) -> "Plan":
        """Return this plan with a split that divides the cost of the samples among the ranks.

        Each rank's fraction of the total cost equals its fraction of the shares, as closely as
        whole samples allow.

        Args:
            costs: cost of each sample of the global batch, in the order of the samples.
        """
        starts = range(0, len(costs), self.grain)
        costs = [sum(costs[start : start + self.grain]) for start in starts]
        reached = (0.0, *accumulate(costs))
        ends = [0]
        for share in accumulate(self.shares):
            due = reached[-1] * share / sum(self.shares)
            after = bisect_left(reached, due, hi=len(costs))
            late = reached[after] - due < due - reached[max(0, after - 1)]
            ends.append(max(ends[-1], after if late else after - 1))
        return replace(self, shares=tuple(float(end - start) for start, end in pairwise(ends)))

    def halved(self, ranks: Sequence[int]) -> "Plan":
        """Return the plan with micro-batches of half the size on ranks that ran out of memory.

        Raises:
            ValueError: a rank's micro-batch is one sample, or one group, and cannot be halved.
        """
        most = list(self.max_micro_batch)
        for rank in ranks:
            most[rank] = max(self.micro_batches[rank]) // self.grain // 2 * self.grain
        if min(most) < 1:
            raise ValueError(f"rank {most.index(min(most))} cannot use smaller micro-batches")
        return replace(self, max_micro_batch=tuple(most))

    def sentence(self, rank: int) -> str:
        """Return a sentence for the log that describes the work of one rank in a step."""
        count, steps = self.counts[rank], _count(len(self.micro_batches[rank]), "micro-step")
        groups = "" if count or self.grain == 1 else f" (a rank takes whole groups of {self.grain})"
        return f"{_count(count, 'sample')} in {steps}{groups}"


def whole_share_pieces(
    global_batch: int, shares: Sequence[float], grain: int = 1
) -> tuple[int, ...]:
    """Return for each rank the size of a micro-batch that holds the rank's whole share.

    Each size is at least the grain, the number of samples that stay together.
    """
    return tuple(grain * max(1, groups) for groups in apportion(global_batch // grain, shares))


def make_plan(
    global_batch: int,
    shares: Sequence[float],
    max_micro_batch: Sequence[int],
    wire: WireMode,
    buckets: int | None = None,
    grain: int = 1,
) -> Plan:
    """Return the plan for a global batch.

    Args:
        global_batch: samples in one optimizer step over all ranks.
        shares: one number per rank, in proportion to its samples.
        max_micro_batch: most samples of each rank in one micro-batch.
        wire: the wire mode.
        buckets: number of gradient buckets; see :class:`Plan`.
        grain: number of consecutive samples that stay together.

    Raises:
        MotleyError: the global batch or a micro-batch is too small.
    """
    working = sum(share > 0 for share in shares)
    if global_batch < working * grain:
        least = "one sample" if grain == 1 else f"one group of {grain} samples"
        raise MotleyError(
            f"--batch-size {global_batch} is the global batch, and needs at least {least} for "
            f"each of the {working} ranks that compute; raise it, start fewer ranks, or give a "
            "rank the share 0"
        )
    if min(max_micro_batch) < grain:
        raise MotleyError(
            f"--micro-batch {min(max_micro_batch)} is less than the {grain} samples of this task "
            f"that have to stay together in a micro-batch; give {grain} or more"
        )
    return Plan(
        int(global_batch),  # the largest of a growing batch
        tuple(shares), tuple(max_micro_batch), wire, buckets=buckets, grain=grain,
    )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

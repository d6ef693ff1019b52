"""Forecasts of the seconds of a step for a split, computed from measured speeds.

The module reads no file, clock or hardware.

A split is the number of samples that each rank takes in a step.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from motley.plan.plan import Speeds, apportion, limit_s, split
from motley.plan.speeds import Links, SpeedTable
from motley.plan.wire import AllReduceCost
from motley.text import format_rate

_WORTH = 0.01  # fraction of a step that larger micro-batches must save
_WORTH_A_BUCKET = 0.002  # fraction that more buckets must save; forecasts are this accurate
_WORTH_ON_GPU = 0.03  # more with NCCL, whose kernels occupy the GPU for 2 to 6 % of a step
_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # numbers that are tried
WORTH_IT = 0.03  # fraction of a step that leaving out hosts, or a rounding wire, must save
_WELL = 0.8  # fraction of the limit, below which the losses are listed
_FEW_MACHINES = 6  # these have 62 subsets


@dataclass(frozen=True)
class Forecast:
    """The expected times of a step.

    Attributes:
        global_batch: samples in a step.
        compute_s: for each rank, the seconds in which it computes in a step.
        wire_s: seconds that the all-reduce of the whole gradient would take without overlap. In
            Local SGD: seconds of an averaging round, divided by the steps of the round.
        buckets: number of gradient buckets whose all-reduces overlap the backward pass. 1: one
            all-reduce after the backward pass.
        exposed_s: seconds of the all-reduce that the backward pass does not hide.
        limit_s: seconds of an ideal step, in which no rank waits and no data is sent. All hosts
            take part, including hosts that the plan leaves out.
        input_s: seconds in which the rank with the longest ``compute_s`` waits for samples. These
            seconds are part of its ``compute_s``.
    """

    global_batch: int
    compute_s: tuple[float, ...]
    wire_s: float
    buckets: int
    exposed_s: float
    limit_s: float
    input_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Expected seconds of a step."""
        return max(self.compute_s) + self.exposed_s

    @property
    def samples_per_s(self) -> float:
        """Expected samples per second."""
        return self.global_batch / self.step_s

    @property
    def fraction(self) -> float:
        """Expected samples per second as a fraction of the ideal rate; 1 if no time is lost."""
        return min(1.0, self.limit_s / self.step_s)

    @property
    def losses(self) -> dict[str, float]:
        """Seconds by which a step takes longer than an ideal step (``limit_s``), by cause."""
        lost = {"the wire": self.exposed_s, "input": self.input_s}
        lost["shares and micro-batches of other than the best sizes"] = (
            self.step_s - self.limit_s - sum(lost.values())
        )
        return lost

    def sentence(self, unit: str, weight: float) -> str:
        """Return the forecast as a sentence for the log.

        Args:
            unit: unit in which rates count, such as images or tokens.
            weight: number of units in a sample.
        """
        rate, most = weight * self.samples_per_s, weight * self.global_batch / self.limit_s
        causes = ", ".join(
            f"{seconds:.3g} s to {cause}"
            for cause, seconds in sorted(self.losses.items(), key=lambda pair: -pair[1])
            if seconds > _WORTH * self.step_s
        )
        lost = f". A step loses {causes}" if causes and self.fraction < _WELL else ""
        return (
            f"expected: {self.step_s:.3g} s per step, {format_rate(rate)} {unit}/s, "
            f"{self.fraction:.0%} of the limit of {format_rate(most)}; the wire takes "
            f"{self.wire_s:.3g} s per step{lost}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the forecast for run.json; :meth:`from_json` reads it."""
        derived = {"step_s": self.step_s, "fraction": self.fraction}
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Forecast":
        """Read the result of :meth:`as_json`."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: content[name] for name in names if name in content}
        return cls(**{**known, "compute_s": tuple(content["compute_s"])})


def forecast(
    counts: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    buckets: int | None = None,
) -> Forecast:
    """Forecast the seconds of a step in which each rank takes the given number of samples.

    Gradients may be sent while the backward pass of the last micro-batch still computes. This
    function assumes that the backward pass takes two thirds of a micro-batch's time.

    Args:
        counts: samples of each rank in a step.
        speeds: speed of each rank.
        wire: cost of an all-reduce.
        buckets: number of gradient buckets. None: the smallest number that is about as fast as the
            fastest number.
    """
    total = sum(counts)
    compute = tuple(Speeds(speeds).compute_seconds(np.array(counts, dtype=float)).tolist())
    last = max(range(len(counts)), key=lambda rank: compute[rank])
    input_s = 0.0
    if any(speed.input_s for speed in speeds):
        pairs = zip(speeds, counts, strict=True)
        input_s = max(compute) - max(speed.computing().compute_seconds(n) for speed, n in pairs)
    parts = [max(1, math.ceil(n / s.micro_batch)) for n, s in zip(counts, speeds, strict=True)]
    backward_s = speeds[last].micro_s(counts[last] / parts[last]) * 2 / 3
    choices = [buckets] if buckets else _BUCKETS
    exposed = {
        each: wire.exposed(each, backward_s, max(compute), max(parts)) for each in choices
    }  # fmt: skip
    worth = _WORTH_ON_GPU if wire.on_gpu else _WORTH_A_BUCKET
    enough = min(exposed.values()) + worth * max(compute)
    buckets = next(each for each in choices if exposed[each] <= enough)
    return Forecast(
        total,
        compute,
        wire.seconds(micro_steps=max(parts)) / wire.sync_every,
        buckets,
        exposed[buckets],
        limit_s(total, speeds),
        max(0.0, input_s),
    )


def split_and_forecast(
    global_batch: int, speeds: Sequence[SpeedTable], wire: AllReduceCost
) -> tuple[tuple[SpeedTable, ...], tuple[int, ...], Forecast]:
    """Split a batch among the ranks, choose the size of micro-batches, and forecast a step.

    Each rank takes the size at which it computes fastest. Two cases differ. If the backward pass is
    to hide the all-reduce, each rank takes its whole share as one micro-batch. If the engine
    communicates in each micro-batch, all ranks take the number of micro-batches that gives the
    shortest step.

    Returns:
        The speed tables with the chosen micro-batches, the samples of each rank, and the forecast.
    """
    speeds = tuple(speeds)
    counts = split(global_batch, speeds)
    result = forecast(counts, speeds, wire)
    waits = wire.likes_long_batches and result.exposed_s > _WORTH * result.step_s
    # A share may need fast micro-batches and one that is small and slow.
    pairs = zip(speeds, counts, strict=True)
    if waits or any(speed.micro_batch < min(n, speed.sizes[-1]) for speed, n in pairs):
        best = speeds, counts, result
        for long in _longer(speeds, counts, wire):
            others = split(global_batch, long)
            other = forecast(others, long, wire)
            if other.step_s < best[2].step_s:
                best = long, others, other
        if best[2].step_s < (1 - _WORTH) * result.step_s:
            return best
    return speeds, counts, result


def _longer(
    speeds: Sequence[SpeedTable], counts: Sequence[int], wire: AllReduceCost
) -> Iterator[tuple[SpeedTable, ...]]:
    """Yield speed tables with larger micro-batches, so that each rank needs fewer micro-batches.

    In the first candidate, each rank's share is one micro-batch. If the engine communicates in each
    micro-batch, further candidates follow. Each of these candidates has an equal number of
    micro-batches on all ranks. The rank with the most micro-batches sets this number by one of its
    timed sizes.
    """
    pairs, few, mores = list(zip(speeds, counts, strict=True)), {1}, {0}
    if wire.allreduces_per_micro_step > 0:
        last, n = max(pairs, key=lambda pair: pair[1] / pair[0].micro_batch)
        few |= {math.ceil(n / size) for size in last.sizes if last.micro_batch < size < n}
        # The next split may give a rank one more grain than these micro-steps would hold.
        mores = {0, last.grain}
    for parts, more in product(sorted(few), sorted(mores)):
        yield tuple(
            speed.in_one(n and max(math.ceil((n + more) / parts), min(n, speed.micro_batch)))
            for speed, n in pairs
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A choice of the ranks that should train, with the forecasts on which it is based.

    Attributes:
        ranks: numbers of the chosen ranks, ascending.
        idle: numbers of the ranks that would get no sample.
        with_all: forecast with all ranks.
        chosen: forecast with ``ranks``.
    """

    ranks: tuple[int, ...]
    idle: frozenset[int]
    with_all: Forecast
    chosen: Forecast


def choose_machines(
    global_batch: int,
    machines: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    links: Links | None = None,
    needed: int | None = None,
    fixed: bool = False,
) -> Choice:
    """Return the set of ranks that makes a step shortest.

    Ranks without samples are left out. Some hosts are left out too if this shortens the step by
    more than the error of the clocks. Every subset of a few hosts is tried. If there are many
    hosts, only subsets of the fastest hosts and of the hosts with the best links are tried.

    Args:
        global_batch: samples in a step.
        machines: number of each rank's host.
        speeds: speed of each rank.
        wire: cost of an all-reduce among all ranks.
        links: measured links between the hosts; None: not measured.
        needed: number of a host that has to train; None: no such host.
        fixed: True if all hosts have to train.
    """
    everyone = tuple(range(len(speeds)))

    def choice(some: Sequence[int]) -> Choice:
        ranks = some
        while True:
            less = wire.among(machines, ranks, links)
            _, counts, result = split_and_forecast(
                global_batch, [speeds[rank] for rank in ranks], less
            )
            able = [r for r, n in zip(ranks, counts, strict=True) if n or machines[r] == needed]
            if len(able) == len(ranks):
                return Choice(tuple(ranks), frozenset(some) - set(ranks), whole, result)
            ranks = able

    rates = compute_rates(machines, speeds)
    *_, whole = split_and_forecast(global_batch, speeds, wire)
    if fixed:
        return Choice(everyone, frozenset(), whole, whole)
    best = most = choice(everyone)
    some_s = {
        some: global_batch / sum(rates[machine] for machine in some)
        for some in _subsets(rates, links)
    }
    for some in sorted(some_s, key=some_s.__getitem__):
        # The time without communication is a bound, which rules out most subsets.
        if some_s[some] < best.chosen.step_s and (needed is None or needed in some):
            result = choice([rank for rank in everyone if machines[rank] in some])
            best = min(best, result, key=lambda each: each.chosen.step_s)
    return best if best.chosen.step_s < (1 - WORTH_IT) * most.chosen.step_s else most


def compute_rates(machines: Sequence[int], speeds: Sequence[SpeedTable]) -> dict[int, float]:
    """Return the samples per second of each host: the sum of its ranks' best rates."""
    rates: dict[int, float] = {}
    for machine, speed in zip(machines, speeds, strict=True):
        rates[machine] = rates.get(machine, 0.0) + speed.rate
    return rates


def _subsets(rates: Mapping[int, float], links: Links | None) -> list[frozenset[int]]:
    """Return sets of hosts that might be faster than all hosts together."""
    if len(rates) <= _FEW_MACHINES:
        sizes = range(1, len(rates))
        return [frozenset(some) for size in sizes for some in combinations(rates, size)]
    orders = [sorted(rates, key=lambda machine: -rates[machine])]
    if links is not None:
        orders.append(sorted(rates, key=links.carries, reverse=True))
    return [frozenset(order[:count]) for order in orders for count in _fewer_than(len(rates))]


def _fewer_than(all_of_them: int) -> list[int]:
    """Return the numbers below ``all_of_them`` to try: all numbers, or only powers of two."""
    if all_of_them <= _FEW_MACHINES:
        return list(range(1, all_of_them))
    doubled = (2**power for power in range(all_of_them.bit_length()))
    return sorted({*(count for count in doubled if count < all_of_them), all_of_them - 1})


def forecast_alternatives(
    global_batch: int,
    names: Sequence[str],
    machines: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    links: Links | None = None,
) -> dict[str, Forecast]:
    """Forecast other ways to train, for comparison with the plan.

    Args:
        global_batch: samples in a step.
        names: host of each rank, for the names of the rows.
        machines: number of each rank's host.
        speeds: speed of each rank.
        wire: cost of the exact mode among all ranks in a ring.
        links: measured links between the hosts; None: not measured.

    Returns:
        A forecast for each way, by a description of the way: the fastest rank alone, equal shares,
        the fastest few ranks, and a doubled batch.
    """
    ranks = range(len(speeds))
    best = min(ranks, key=lambda rank: speeds[rank].compute_seconds(global_batch))
    alone = wire.among(machines, [best], links)
    rows = {f"{names[best]} alone": forecast([global_batch], [speeds[best]], alone)}
    if len(speeds) == 1:
        return rows
    grain = speeds[0].grain
    equal = apportion(global_batch // grain, (1.0,) * len(speeds))
    rows["equal shares"] = forecast([grain * groups for groups in equal], speeds, wire)
    fast = sorted(ranks, key=lambda rank: speeds[rank].compute_seconds(global_batch))
    for count in _fewer_than(len(speeds))[1:]:
        few = [speeds[rank] for rank in sorted(fast[:count])]
        less = wire.among(machines, fast[:count], links)
        *_, rows[f"the fastest {count}"] = split_and_forecast(global_batch, few, less)
    twice = 2 * global_batch
    *_, rows[f"--batch-size {twice}"] = split_and_forecast(twice, speeds, wire)
    return rows

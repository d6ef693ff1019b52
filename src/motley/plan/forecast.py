"""Forecasts of a split, and of other ways beside it, from measured speeds. Pure."""

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

_WORTH = 0.01  # of a step, that larger micro-batches must save
_WORTH_A_BUCKET = 0.002  # of a step, that more buckets must save; seen: forecasts are that good
_WORTH_ON_GPU = 0.03  # as NCCL's kernels hold processors; seen to cost 2 to 6 % of a step
_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # that are tried
WORTH_IT = 0.03  # of a step, that hosts must save by their absence, or a wire that rounds
_WELL = 0.8  # of the limit: below it the losses are listed
_FEW_MACHINES = 6  # have 62 subsets


@dataclass(frozen=True)
class Forecast:
    """The expected step of a plan.

    Attributes:
        compute_s: of each rank in a step.
        wire_s: time of the all-reduce of the whole gradient without overlap; in Local SGD, of an
            averaging round, divided by its steps.
        buckets: number of gradient buckets whose all-reduces overlap the backward pass; 1: one
            all-reduce after it.
        exposed_s: the part of the all-reduce that the backward pass does not hide.
        limit_s: time of a step in which no rank waits and nothing is sent, on all machines, with
            those that the plan leaves out.
        input_s: the part of the longest ``compute_s`` in which its rank waits for samples.
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
        """A step, predicted."""
        return max(self.compute_s) + self.exposed_s

    @property
    def samples_per_s(self) -> float:
        """Predicted."""
        return self.global_batch / self.step_s

    @property
    def fraction(self) -> float:
        """Expected samples per second over the limit's; 1 if nothing is lost."""
        return min(1.0, self.limit_s / self.step_s)

    @property
    def losses(self) -> dict[str, float]:
        """Seconds of a step beyond the limit's, by cause; they add up to all of them."""
        lost = {"the wire": self.exposed_s, "input": self.input_s}
        lost["shares and micro-batches of other than the best sizes"] = (
            self.step_s - self.limit_s - sum(lost.values())
        )
        return lost

    def sentence(self, unit: str, weight: float) -> str:
        """Return the forecast in words, for the log.

        Args:
            unit: unit that rates count.
            weight: weight of a sample in this unit.
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
        """For run.json; :meth:`from_json` reads it."""
        derived = {"step_s": self.step_s, "fraction": self.fraction}
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Forecast":
        """Read :meth:`as_json`."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: content[name] for name in names if name in content}
        return cls(**{**known, "compute_s": tuple(content["compute_s"])})


def forecast(
    counts: Sequence[int],
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
    buckets: int | None = None,
) -> Forecast:
    """Predict a plan.

    The wire may work while the last micro-batch's backward pass (two thirds of its time) still
    produces gradients.

    Args:
        counts: samples of each rank in a step.
        speeds: speed of each rank.
        wire: cost of an all-reduce.
        buckets: number of buckets to send the gradient in. None: the fewest that do about as well
            as any.
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
    """Split the batch in micro-batches that make a step short.

    Each rank takes its fastest micro-batch; or its whole share, where the wire is to hide behind a
    backward pass. Where each micro-step has its part of the wire, all take as many as make the step
    shortest.

    Returns:
        The speeds, with the chosen m; the samples of each rank; and the forecast.
    """
    speeds = tuple(speeds)
    counts = split(global_batch, speeds)
    result = forecast(counts, speeds, wire)
    waits = wire.likes_long_batches and result.exposed_s > _WORTH * result.step_s
    # A share may take the fastest micro-batch and a slow small rest.
    pairs = zip(speeds, counts, strict=True)
    if waits or any(speed.micro_batch < n <= speed.sizes[-1] for speed, n in pairs):
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
    """Yield the speeds with larger micro-batches, with which each share needs few of them.

    The first entries have one micro-batch per share. If each micro-step has its part of the wire,
    there are more entries. These have as many micro-batches as the rank with most of them needs at
    each of its sizes.
    """
    pairs, few, mores = list(zip(speeds, counts, strict=True)), {1}, {0}
    if wire.allreduces_per_micro_step > 0:
        last, n = max(pairs, key=lambda pair: pair[1] / pair[0].micro_batch)
        few |= {math.ceil(n / size) for size in last.sizes if last.micro_batch < size < n}
        # Or the next split gives a sample more to who would then need another micro-step.
        mores = {0, last.grain}
    for parts, more in product(sorted(few), sorted(mores)):
        yield tuple(
            speed.in_one(n and max(math.ceil((n + more) / parts), min(n, speed.micro_batch)))
            for speed, n in pairs
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The ranks that should train.

    Attributes:
        ranks: ascending.
        idle: those that would get no sample.
        with_all, chosen: forecasts with all, and with ``ranks``.
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
    """Return all ranks that get a sample, or those of the machines with which a step is shortest.

    Some machines are left out only if this shortens the step by more than the error of the clocks.
    Every subset of a few machines is tried. With many machines, the subsets of the fastest and of
    the best links are tried.

    Args:
        global_batch: samples in a step.
        machines: machine of each rank, by number.
        speeds: speed of each rank.
        wire: cost of an all-reduce among all ranks.
        links: measured links between the machines; None: not measured.
        needed: a machine that has to stay; None: no such machine.
        fixed: True if all machines have to stay.
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
        # With no wire it would take so long: of most subsets no more need be known.
        if some_s[some] < best.chosen.step_s and (needed is None or needed in some):
            result = choice([rank for rank in everyone if machines[rank] in some])
            best = min(best, result, key=lambda each: each.chosen.step_s)
    return best if best.chosen.step_s < (1 - WORTH_IT) * most.chosen.step_s else most


def compute_rates(machines: Sequence[int], speeds: Sequence[SpeedTable]) -> dict[int, float]:
    """Return samples a second of each machine, all of its ranks together, at their best."""
    rates: dict[int, float] = {}
    for machine, speed in zip(machines, speeds, strict=True):
        rates[machine] = rates.get(machine, 0.0) + speed.rate
    return rates


def _subsets(rates: Mapping[int, float], links: Links | None) -> list[frozenset[int]]:
    """Machines that might do better without the others; never all of them."""
    if len(rates) <= _FEW_MACHINES:
        sizes = range(1, len(rates))
        return [frozenset(some) for size in sizes for some in combinations(rates, size)]
    orders = [sorted(rates, key=lambda machine: -rates[machine])]
    if links is not None:
        orders.append(sorted(rates, key=links.carries, reverse=True))
    return [frozenset(order[:count]) for order in orders for count in _fewer_than(len(rates))]


def _fewer_than(all_of_them: int) -> list[int]:
    """How many of something to try: each number, or of many twice as many each time."""
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
    """Predict other ways to train, for comparison with the plan.

    Args:
        global_batch: samples in a step.
        names: host of each rank, for the names of the rows.
        machines: machine of each rank, by number.
        speeds: speed of each rank.
        wire: cost of the exact mode among all ranks in a ring.
        links: measured links between the machines; None: not measured.

    Returns:
        Forecasts by a description of each way.
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

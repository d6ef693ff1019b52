"""Shares by measured speed: pure arithmetic, by property."""

import json
import math
import random
import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.plan.advice import bound_by_input
from motley.plan.forecast import (
    Forecast,
    choose_machines,
    forecast,
    forecast_alternatives,
    split_and_forecast,
)
from motley.plan.plan import Speeds, cut, limit_s, split
from motley.plan.speeds import SpeedTable
from motley.plan.wire import AllReduceCost

CLOSE = 1 + 1e-9


@st.composite
def speeds(draw: st.DrawFn) -> SpeedTable:
    """As measured: doubling from 1, an overhead, a noisy clock, and any length."""
    sizes = [2**power for power in range(draw(st.integers(1, 8)))]
    if draw(st.booleans()):
        sizes.append(sizes[-1] + draw(st.integers(1, sizes[-1])))
    overhead, sample = draw(st.floats(0, 0.05)), draw(st.floats(1e-4, 0.1))
    noise = draw(st.lists(st.floats(0.7, 1.4), min_size=len(sizes), max_size=len(sizes)))
    times = [(overhead + sample * s) * n for s, n in zip(sizes, noise, strict=True)]
    table = SpeedTable(tuple(sizes), tuple(times), draw(st.floats(0, 0.05)))
    if draw(st.booleans()):
        return table
    return replace(table, input_s=draw(st.floats(1e-4, 0.2)), reads_ahead=draw(st.booleans()))


groups = st.lists(speeds(), min_size=1, max_size=6)


def linear(samples_per_s: float, step_s: float = 0.0) -> SpeedTable:
    sizes = (1, 2, 4, 8, 16)
    return SpeedTable(sizes, tuple(size / samples_per_s for size in sizes), step_s)


def samples_in(speed: SpeedTable, seconds: float) -> float:
    """Of one rank alone."""
    (most,) = Speeds([speed]).samples_in(seconds)
    return float(most)


@given(speeds(), st.integers(0, 600))
def test_the_time_is_that_of_the_micro_batches_that_the_plan_cuts(
    speed: SpeedTable, n: int
) -> None:
    parts = cut(n, speed.micro_batch) or (0,)
    computed = speed.step_s + sum(map(speed.micro_s, parts))
    read = n * speed.input_s
    taken = max(computed, read) if speed.reads_ahead else computed + read
    assert speed.compute_seconds(n) == pytest.approx(taken)
    assert speed.waits_s(n) == pytest.approx(taken - computed, abs=1e-12)
    assert speed.compute_seconds(n) <= speed.compute_seconds(n + 1) * CLOSE


@given(speeds(), st.floats(0, 3))
def test_samples_in_is_the_most_that_seconds_of_allows(speed: SpeedTable, seconds: float) -> None:
    most = samples_in(speed, seconds)
    if most:
        assert speed.compute_seconds(most) <= seconds * CLOSE
    more = most * (1 + 1e-6) + 1e-6
    if speed.input_s and not speed.reads_ahead:  # whole samples are read
        more = math.floor(more) + 1
    assert speed.compute_seconds(more) >= seconds / CLOSE


@given(speeds(), st.integers(1, 600))
def test_samples_in_inverts_seconds_of(speed: SpeedTable, n: int) -> None:
    assert samples_in(speed, speed.compute_seconds(n) * CLOSE) >= n * (1 - 1e-6)


@given(groups, st.integers(0, 600), st.floats(0, 3), st.floats(0.5, 3))
def test_all_ranks_at_once_are_as_each_alone(
    group: list[SpeedTable], n: int, seconds: float, factor: float
) -> None:
    speeds = Speeds(group)
    samples = np.array([n + rank for rank in range(len(group))], dtype=float)
    slower = [speed.slower(factor) for speed in group]
    alone = [s.compute_seconds(each) for s, each in zip(slower, samples, strict=True)]
    assert speeds.compute_seconds(samples, factor).tolist() == pytest.approx(alone)
    most = speeds.count_whole_samples(seconds, factor)
    assert most.tolist() == [int(samples_in(s, seconds) + 1e-8) for s in slower]


@given(st.integers(1, 2000), groups)
def test_shares_sum_to_the_batch_and_nobody_could_be_relieved(
    n: int, group: list[SpeedTable]
) -> None:
    counts = split(n, group)
    assert sum(counts) == n and min(counts) >= 0
    slowest = max(s.compute_seconds(c) for s, c in zip(group, counts, strict=True) if c)
    for speed, count in zip(group, counts, strict=True):
        # One sample more on any rank would take as long as the slowest does now.
        assert speed.compute_seconds(count + 1) >= slowest / CLOSE


@given(st.integers(1, 12), st.lists(speeds(), min_size=1, max_size=3))
def test_shares_are_the_best_of_all(n: int, group: list[SpeedTable]) -> None:
    def slowest(counts: tuple[int, ...]) -> float:
        return max(s.compute_seconds(c) for s, c in zip(group, counts, strict=True) if c)

    every = product(range(n + 1), repeat=len(group))
    best = min(slowest(counts) for counts in every if sum(counts) == n)
    assert slowest(split(n, group)) <= best * CLOSE


def test_who_reads_slowly_gets_less_and_where_nobody_else_could_the_same() -> None:
    fast, ahead = linear(100.0), replace(linear(100.0), input_s=1 / 50, reads_ahead=True, readers=1)
    before = replace(ahead, reads_ahead=False, readers=0)
    assert split(150, [fast, ahead]) == (100, 50)  # 1 s each
    assert split(160, [fast, before]) == (120, 40)  # 1.2 s: computes 100 a second, reads 50
    assert split(80, [ahead, ahead]) == (40, 40)
    (advice,) = bound_by_input(["a", "b"], [fast, ahead], [100, 50], packs=False)
    assert "input limits b: 1 loader process can read 50 samples/s" in advice.text
    assert "the rank could compute 100" in advice.text
    assert "--" not in advice.text + advice.option  # it has processes already, and no image files
    (advice,) = bound_by_input(["a", "b"], [fast, before], [120, 40], packs=True)
    assert "reads 50 samples/s and does not read while the rank computes (100" in advice.text
    assert "--workers 1" in advice.text and "setup/stage_cn.sh" in advice.text
    # Reading that is faster than computing delays a rank only where both take turns.
    quick = replace(ahead, input_s=1 / 101)
    assert not bound_by_input(["a", "b"], [fast, quick], [100, 90], packs=True)
    turns = replace(quick, reads_ahead=False)
    (advice,) = bound_by_input(["a", "b"], [fast, turns], [100, 90], packs=True)
    assert "does not read while" in advice.text and "since they share its cores" in advice.text


@given(
    st.integers(1, 2000), groups, st.floats(0, 2), st.floats(0, 0.05), st.booleans(), st.booleans()
)
def test_a_forecast_is_one_fraction_of_one_limit_and_its_losses_add_up(
    n: int, group: list[SpeedTable], wire_s: float, input_s: float, ahead: bool, overlaps: bool
) -> None:
    reading = replace(group[0], input_s=input_s, reads_ahead=ahead, readers=1)
    *_, found = split_and_forecast(
        n, [reading, *group[1:]], AllReduceCost(0.001, wire_s, overlaps=overlaps)
    )
    rate, most = found.samples_per_s, n / found.limit_s
    assert 0 < found.fraction <= 1
    assert found.fraction == pytest.approx(min(1.0, rate / most))
    assert sum(found.losses.values()) == pytest.approx(found.step_s - found.limit_s)
    said = found.sentence("images", 1.0)
    assert ("A step loses" in said) <= (found.fraction < 0.8)
    assert Forecast.from_json(json.loads(json.dumps(found.as_json()))) == found


@given(st.integers(1, 2000), groups)
def test_nothing_beats_the_limit(n: int, group: list[SpeedTable]) -> None:
    counts = split(n, group)
    slowest = max(s.compute_seconds(c) for s, c in zip(group, counts, strict=True) if c)
    assert limit_s(n, group) <= slowest * CLOSE
    assert limit_s(n, group) <= limit_s(n, group[:1]) * CLOSE


def test_the_limit_of_linear_machines_is_the_sum_of_their_rates() -> None:
    group = [linear(rate, 0.1) for rate in (700, 500, 300, 200, 100)]
    assert limit_s(180, group) == pytest.approx(180 / 1800 + 0.1)
    assert split(180, group) == (70, 50, 30, 20, 10)
    # A rank whose optimizer alone takes longer than the step does not help, nor hurt.
    assert limit_s(180, [*group, linear(1e6, 9.0)]) == limit_s(180, group)


def test_a_share_that_is_no_multiple_is_cut_evenly_and_stays_fast() -> None:
    # A GPU: a launch-bound floor of 8 ms, then 400 samples a second.
    sizes = (1, 2, 4, 8, 16, 32, 64)
    speed = SpeedTable(sizes, tuple(max(0.008, size / 400) for size in sizes), 0.0)
    assert speed.micro_batch == 64
    assert speed.compute_seconds(66) == pytest.approx(66 / 400)


@given(speeds(), st.integers(1, 600))
def test_at_most_keeps_what_is_below(speed: SpeedTable, size: int) -> None:
    less = speed.at_most(size)
    assert less.micro_batch <= max(less.sizes) <= max(size, 1)
    assert less.step_s == speed.step_s and len(less.sizes) == len(less.seconds)
    assert less.rate <= speed.rate * CLOSE
    assert SpeedTable.from_json(json.loads(json.dumps(less.as_json()))) == less


def test_a_thousand_ranks_are_planned_in_under_a_second() -> None:
    dice = random.Random(0)
    sizes = tuple(2**power for power in range(9))
    rates = [dice.uniform(50, 3000) for _ in range(1000)]
    group = [SpeedTable(sizes, tuple(0.01 + s / rate for s in sizes), 0.002) for rate in rates]
    machines, names = range(1000), [f"host{number}" for number in range(1000)]
    wire = AllReduceCost(0.001, 0.1)
    start = time.process_time()
    choice = choose_machines(100_000, machines, group, wire)
    rows = forecast_alternatives(100_000, names, machines, group, wire)
    assert time.process_time() - start < 1
    assert sum(split(100_000, group)) == 100_000
    assert rows["the fastest 512"].step_s >= choice.chosen.step_s / CLOSE


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": []}, {"sizes": [1, 2]}, {"sizes": [2, 1, 4]}, {"sizes": [0, 1, 2]},
        {"input_s": -1}, {"input_s": math.nan}, {"readers": -1}, {"readers": "x"},
        {"sizes": "abc"}, {"seconds": [1, 2, 0]}, {"seconds": [1, 2, math.nan]},
        {"seconds": [1, 2, math.inf]}, {"seconds": None}, {"step_s": -1}, {"step_s": math.nan},
        {"step_s": "soon"}, {"memory_mib": [1]}, {"memory_mib": 3},
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(change: dict[str, object]) -> None:
    good = {"sizes": [1, 2, 4], "seconds": [1, 1.5, 2], "step_s": 0.1, "memory_mib": []}
    assert SpeedTable.from_json(good).micro_batch == 4
    with pytest.raises((ValueError, TypeError, KeyError)):
        SpeedTable.from_json({**good, **change})
    for name in good:
        with pytest.raises(KeyError):
            SpeedTable.from_json({key: value for key, value in good.items() if key != name})


def test_no_ranks_are_refused() -> None:
    for function in (split, limit_s):
        with pytest.raises(MotleyError, match="all ranks were left out"):
            function(10, [])


wires = st.builds(
    AllReduceCost, st.floats(0, 0.02), st.floats(0, 0.5), st.booleans(), st.booleans()
)


@given(st.integers(1, 500), groups, wires, st.integers(1, 20))
def test_a_forecast_is_within_its_bounds(
    n: int, group: list[SpeedTable], wire: AllReduceCost, buckets: int
) -> None:
    predicted = forecast(split(n, group), group, wire, buckets)
    assert predicted.step_s >= max(predicted.compute_s)
    assert 0 < predicted.fraction <= CLOSE
    assert wire.seconds() / buckets <= CLOSE * predicted.exposed_s
    assert predicted.exposed_s <= CLOSE * wire.seconds(buckets)
    assert forecast(split(n, group), group, wire).step_s <= 1.03 * CLOSE * predicted.step_s
    assert Forecast.from_json(json.loads(json.dumps(predicted.as_json()))) == predicted


def test_what_if_shows_that_equal_shares_wait_for_the_slowest() -> None:
    group = [linear(700), linear(100)]
    rows = forecast_alternatives(80, ["fast", "slow"], [0, 1], group, AllReduceCost(0.0, 0.0))
    planned = forecast(split(80, group), group, AllReduceCost(0.0, 0.0))
    assert rows["fast alone"].samples_per_s == pytest.approx(700)
    assert rows["equal shares"].samples_per_s == pytest.approx(200)
    assert planned.samples_per_s == pytest.approx(800)


def test_buckets_are_as_few_as_hide_the_wire() -> None:
    group = [linear(100), linear(100)]  # 80 samples take 0.4 s, their backward pass 0.27 s

    def buckets(wire: AllReduceCost) -> int:
        return forecast((40, 40), group, wire).buckets

    assert buckets(AllReduceCost(0.0, 0.0008)) == 1  # not worth it
    assert buckets(AllReduceCost(0.0, 0.1)) > 8
    assert buckets(AllReduceCost(0.02, 0.1)) < 8  # each costs
    assert buckets(AllReduceCost(0.0, 0.1, overlaps=False)) == 1
    assert (
        buckets(AllReduceCost(0.0, 0.011)) == 10
        and buckets(AllReduceCost(0.0, 0.011, on_gpu=True)) == 1
    )


@example(  # whose fastest micro-batches leave a slow rest, and two of the largest size do not
    ([SpeedTable((1, 2, 4, 8, 16, 32, 49),
                 (0.046875, 0.0625, 0.09375, 0.15625, 0.3515625, 0.3818359375, 0.59765625),
                 0.0, input_s=0.125)], [0], 97, 0.0, 0.5, False)
)  # fmt: skip
@example(  # whose fastest micro-batch leaves a slow rest
    ([SpeedTable((1, 2, 4), (0.0195, 0.0168, 0.0352), 0.0, input_s=0.125)], [0], 3, 0.0, 0.0156,
     False)
)  # fmt: skip
@given(
    groups.flatmap(
        lambda group: st.tuples(
            st.just(group),
            st.lists(st.integers(0, 2), min_size=len(group), max_size=len(group)),
            st.integers(1, 300), st.floats(0, 0.01), st.floats(0, 0.5), st.booleans(),
        )
    )
)  # fmt: skip
def test_who_is_left_out_makes_no_step_longer(case: tuple) -> None:
    group, machines, n, latency_s, transfer_s, must = case
    needed = machines[0] if must else None
    choice = choose_machines(
        n, machines, group, AllReduceCost(latency_s, transfer_s), needed=needed
    )
    kept = choice.ranks
    assert list(kept) == sorted(set(kept)) and kept and not choice.idle & set(kept)
    # A forecast takes fewer buckets for 0.2 % of a step.
    assert choice.chosen.step_s <= 1.01 * choice.with_all.step_s * CLOSE
    assert len(choice.chosen.compute_s) == len(kept) and choice.chosen.global_batch == n
    if must:
        assert {r for r, machine in enumerate(machines) if machine == needed} <= set(kept)


def test_a_time_that_was_disturbed_does_not_lose_samples() -> None:
    # 129 are the fastest; the time of 128 before them was longer, and none takes longer than 129.
    speed = SpeedTable((1, 64, 128, 129), (0.0625, 3.0, 8.0, 6.046875), 0.0)
    assert split(130, [speed]) == (130,)
    assert speed.micro_s(128) == pytest.approx(6.0, abs=0.05)


def test_hosts_are_left_out_for_a_slow_wire_and_for_a_slow_host() -> None:
    group = [linear(100), linear(90), linear(80)]

    def kept(*given: Any, **more: int) -> tuple[int, ...]:
        return choose_machines(90, *given, **more).ranks

    assert kept([0, 1, 2], group, AllReduceCost(0.0, 0.01)) == (0, 1, 2)
    assert kept([0, 1, 2], group, AllReduceCost(0.0, 2.0)) == (0,)
    assert kept([0, 1, 2], group, AllReduceCost(0.0, 2.0), needed=2) == (2,)
    # Ranks of one machine stay together, for their wire is not the one that was measured.
    assert kept([0, 0, 0], group, AllReduceCost(0.0, 2.0)) == (0, 1, 2)
    # One sample of the second would take longer than all of them on the others.
    group = [linear(100), linear(1), linear(80)]
    choice = choose_machines(90, [0, 1, 2], group, AllReduceCost(0.0, 0.01))
    assert choice.ranks == (0, 2) and choice.idle == {1}

"""In how many micro-steps a share is computed, where each has its part of the wire."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from motley.plan.forecast import forecast, split_and_forecast
from motley.plan.plan import split
from motley.plan.speeds import SpeedTable
from motley.plan.wire import AllReduceCost

# A GPT of 13 billion parameters on three H200s, in bf16: the sizes that were timed, and 8.
H200 = SpeedTable((1, 2, 8), (0.386, 0.726, 2.8), 0.068)


def each_step(seconds: float, once: float = 0.0) -> AllReduceCost:
    """A wire that each micro-step takes so many seconds of."""
    return AllReduceCost(
        0.0, 1.0, on_gpu=True, overlaps=False, allreduces_per_step=once,
        allreduces_per_micro_step=seconds,
    )  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> SpeedTable:
    """Faster to some size, and slower from there; memory ends anywhere."""
    sizes = tuple(2**power for power in range(draw(st.integers(1, 7))))
    best = draw(st.integers(0, len(sizes)))
    sample = draw(st.lists(st.floats(0.01, 0.03), min_size=len(sizes), max_size=len(sizes)))
    sample = [*sorted(sample[:best], reverse=True), *sorted(sample[best:])]
    times = tuple(size * each for size, each in zip(sizes, sample, strict=True))
    return SpeedTable(sizes, times, draw(st.floats(0, 0.05)))


@given(tables(), st.integers(1, 4), st.integers(1, 300), st.floats(0.001, 0.5), st.floats(0, 0.5))
def test_no_larger_size_for_all_makes_the_step_shorter(
    table: SpeedTable, ranks: int, batch: int, seconds: float, once: float
) -> None:
    wire, group = each_step(seconds, once), [table] * ranks
    plain = forecast(split(batch, group), group, wire)
    assume(plain.exposed_s > 0.01 * plain.step_s)  # else the fastest sizes are taken unseen
    chosen, counts, found = split_and_forecast(batch, group, wire)
    assert sum(counts) == batch and found == forecast(counts, chosen, wire)
    assert all(speed.sizes == table.sizes for speed in chosen)
    for size in table.sizes[table.sizes.index(table.micro_batch) :]:
        same = [replace(table, preferred=size)] * ranks
        other = forecast(split(batch, same), same, wire)
        assert found.step_s <= 1.02 * other.step_s, size


@given(st.lists(tables(), min_size=1, max_size=4), st.integers(1, 300), st.floats(0, 0.5))
def test_nothing_is_lost_by_asking_for_fewer_micro_steps(
    group: list[SpeedTable], batch: int, seconds: float
) -> None:
    wire = each_step(seconds)
    plain = forecast(split(batch, group), group, wire)
    assert split_and_forecast(batch, group, wire)[2].step_s <= plain.step_s


@given(tables(), st.integers(1, 4), st.integers(1, 300))
@example(SpeedTable((1, 2, 4), (0.0234375, 0.02734375, 0.0625), 0.0), 1, 3)  # 3 at once: quicker
def test_a_wire_that_is_taken_once_changes_no_size(
    table: SpeedTable, ranks: int, batch: int
) -> None:
    """But where computing alone is shorter for it."""
    group, nothing = (table,) * ranks, each_step(0.0)
    shares = split(batch, group)
    chosen, counts, _ = split_and_forecast(batch, group, each_step(0.0, 0.3))
    plain, found = forecast(shares, group, nothing), forecast(counts, chosen, nothing)
    assert (chosen, counts) == (group, shares) or found.step_s < plain.step_s


@pytest.mark.parametrize(("wire_s", "steps"), [(0.0, 6), (0.225, 2), (0.49, 2)])
def test_three_h200s_take_two_micro_steps_and_not_six(wire_s: float, steps: int) -> None:
    """0.225 s are what was measured of NCCL; 0.49 s what a micro-step really took besides."""
    two = replace(H200, seconds=(0.386, 0.726, 2.96))  # of 8 a little slower than of 2
    chosen, counts, found = split_and_forecast(32, [two] * 3, each_step(wire_s))
    assert sorted(counts) == [10, 11, 11]
    assert -(-11 // chosen[0].micro_batch) == steps
    assert found.exposed_s == pytest.approx(steps * wire_s)


def test_neither_the_smallest_nor_the_largest_may_be_best() -> None:
    table = SpeedTable((1, 4, 16), (0.1, 0.42, 2.4), 0.0)
    chosen, *_, found = split_and_forecast(16, [table], each_step(0.05))
    assert chosen[0].micro_batch == 4
    assert found.step_s == pytest.approx(4 * (0.42 + 0.05))

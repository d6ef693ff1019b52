"""The mean by the clock has in it what a median of steps hides."""

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.records.costs import lead, mean_rate, pauses, without_pauses
from motley.records.json_files import JsonDict


def lines(ends: list[float], n: int = 10) -> list[dict[str, float]]:
    return [{"step": step, "n_global": n, "weight": 3.0 * n, "time": end}
            for step, end in enumerate(ends)]  # fmt: skip


def test_a_stall_is_in_the_mean_and_not_in_the_median() -> None:
    steps = lines([100.0, 101.0, 102.0, 112.0, 113.0])  # nine seconds of evaluation
    assert mean_rate(steps) == pytest.approx(40 / 13)
    assert mean_rate(steps, "weight") == pytest.approx(120 / 13)
    between = [after["time"] - before["time"] for before, after in pairwise(steps)]
    assert 10 / statistics.median(between) == 10


def test_the_pause_before_a_run_is_continued_is_left_out() -> None:
    steps = lines([100.0, 101.0, 9000.0, 9001.0])
    assert mean_rate(steps, starts=[8990.0]) == 10
    assert mean_rate(steps, starts=[50.0]) == pytest.approx(30 / 8901)


def test_one_step_has_no_mean() -> None:
    assert mean_rate(lines([1.0])) is mean_rate([]) is None
    assert mean_rate(lines([1.0, 1.0])) is None, "a clock that stood still"
    assert [*lead({})] == [] and lead({0: [{}], 3: [{}, {}]}) == [{}, {}]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_a_clock_that_stands_still_in_pauses_has_the_steps_own_time(kinds: list[int]) -> None:
    """Steps of a second; before some of them the run was stopped for 100 seconds."""
    now, steps, starts, ran = 1e9, list[JsonDict](), list[float](), list[float]()
    for number, kind in enumerate(kinds):
        if number and kind == 0:
            now += 100.0
            starts.append(now)
        now += 1.0
        steps.append({"time": now, "n_global": 8, "samples_per_s": 8.0})
        ran.append(number)
    paused = pauses(steps, starts)
    assert [seconds for _, seconds in paused] == pytest.approx([100.0] * len(starts))
    begun = without_pauses(steps[0]["time"], paused)
    assert [without_pauses(step["time"], paused) - begun for step in steps] == pytest.approx(ran)

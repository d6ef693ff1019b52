"""Whether a job is ended to take hosts back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.provision.keep_returns import ReadmissionEstimate, step_with

RATES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=5)


@given(st.integers(1, 10_000), st.floats(1e-3, 100), RATES)
def test_rates_add_up_whichever_host_comes_first(
    batch: int, step_s: float, rates: list[float]
) -> None:
    together = step_with(batch, step_s, rates)
    assert together < step_s
    one_by_one = step_s
    for rate in reversed(rates):
        one_by_one = step_with(batch, one_by_one, [rate])
    assert together == pytest.approx(one_by_one)


def test_as_fast_a_host_as_the_one_that_trains_halves_the_step() -> None:
    assert step_with(96, 2.0, [48.0]) == pytest.approx(1.0)
    assert step_with(96, 2.0, []) == 2.0


@pytest.mark.parametrize(("batch", "step_s", "rates"), [(0, 1, [1]), (8, 0, [1]), (8, 1, [0])])
def test_what_is_no_speed_is_refused(batch: int, step_s: float, rates: list[float]) -> None:
    with pytest.raises(MotleyError):
        step_with(batch, step_s, rates)


def test_it_pays_while_enough_steps_are_left() -> None:
    assert ReadmissionEstimate(steps=61, step_s=1.0, with_s=0.5, cost_s=30.0).worth_it
    last = ReadmissionEstimate(steps=60, step_s=1.0, with_s=0.5, cost_s=30.0)
    assert not last.worth_it and last.saves_s == 30.0
    assert last.sentence() == (
        "that saves 30 s of the 60 s left (60 steps of 1 s now, or 0.5 s afterwards), and a new "
        "start costs 30 s"
    )
    assert "saves nothing" in ReadmissionEstimate(60, 1.0, 1.5, 30.0).sentence()

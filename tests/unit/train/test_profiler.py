"""Clocks of ranks are put right by what no exchange can do: end before it has begun elsewhere."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.config.option import StepSpan, profiled, step_span
from motley.train.profiler import estimate_offset

DELAYS = st.floats(0.0, 0.2)


@given(
    offset=st.floats(-100, 100),
    exchanges=st.lists(st.tuples(DELAYS, DELAYS, DELAYS, DELAYS), min_size=1, max_size=20),
)
def test_the_offset_is_within_its_error(
    offset: float, exchanges: list[tuple[float, float, float, float]]
) -> None:
    first, own, now = [], [], 0.0
    for late, later, end, ending in exchanges:
        both = now + max(late, later)  # nothing is known of the other before
        first.append((now + late, both + end))
        own.append((now + later + offset, both + ending + offset))
        now = both + max(end, ending)
    clock = estimate_offset(first, own)
    assert abs(clock.offset_s - offset) <= clock.error_s + 1e-9
    least = min(max(late, later) - min(late, later) + max(end, ending)
                for late, later, end, ending in exchanges)  # fmt: skip
    assert clock.error_s <= least + 1e-9


def test_a_span_of_steps_is_read_and_written() -> None:
    assert step_span("20:40") == StepSpan(20, 40) and str(step_span("20:40")) == "20:40"
    assert profiled("slowest") == "slowest" and profiled("1,4") == (1, 4)


@pytest.mark.parametrize("text", ["20", "40:20", "20:20", "a:b", "-1:4", "1:2:3", ":", ""])
def test_what_is_no_span_of_steps_is_said(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        step_span(text)

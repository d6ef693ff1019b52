"""Numbers in the words that a user reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.text import format_rate, format_step


@given(st.floats(1e-4, 1e9))
def test_a_rate_is_told_to_two_digits_however_slow(rate: float) -> None:
    assert float(format_rate(rate).replace(",", "")) == pytest.approx(rate, rel=0.051)


def test_rates_and_steps_as_people_write_them() -> None:
    assert [format_rate(rate) for rate in (0.0, 0.034, 9.6, 9.99, 1036.2)] == [
        "0", "0.034", "9.6", "10", "1,036"
    ]  # fmt: skip
    assert (format_step(None), format_step(0)) == ("before the first step", "step 1")

"""Checkpoints by the clock: soon after they are due, and seldom asked for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.config.option import Duration
from motley.train import loop
from motley.train.loop import ClockTimer


class Clock:
    """Rank 0's, which this rank asks."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def gather(self, own: list[float]) -> list[list[float]]:
        self.asked += 1
        return [own, [-1.0]]


@given(st.integers(0, 2**32), st.floats(0.01, 20))
def test_each_comes_within_a_step_or_a_tenth_of_its_time(seed: int, step_s: float) -> None:
    clock, dice = Clock(), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.time, "monotonic", clock.monotonic)
        patch.setattr(loop, "all_gather_floats", clock.gather)
        timer, last, saves = ClockTimer(Duration("1m", 60), 0), 0.0, 0
        for step in range(1, 2001):
            clock.now += step_s * dice.uniform(0.8, 1.25)
            if timer.due(step):
                assert 60 - 2.6 * step_s <= clock.now - last <= 1.1 * 60 + 1.3 * step_s
                timer.restart(step)
                last, saves = clock.now, saves + 1
    assert clock.asked <= min(2000, 20 * (saves + 1))
    assert saves >= 2000 * 0.8 * step_s / (66 + 1.3 * step_s) - 2


@pytest.mark.parametrize("every", [None, 10])
def test_without_a_time_nobody_is_asked(every: object) -> None:
    timer = ClockTimer(every, 0)
    assert not any(timer.due(step) for step in range(1, 100))

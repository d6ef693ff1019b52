"""Shares follow the ranks' speeds from the first steps of a loop on, and leave noise alone."""

from collections.abc import Sequence

import numpy as np
import pytest

from motley.library.loop_shares import RankTime, ShareFollower, make_table
from motley.plan.replan import Device

ROWS = 180


def simulate(
    rates: Sequence[float], fixed_s: float, noise: float, steps: int, slower_at: int = 10**9
) -> list[tuple[int, ...]]:
    """Return the rows of each rank in each step; rank 0 halves its speed at a step."""
    random = np.random.default_rng(0)
    follower = ShareFollower([Device(rank, rank) for rank in range(len(rates))])
    counts = tuple(ROWS // len(rates) for _ in rates)
    taken = []
    for step in range(steps):
        taken.append(counts)
        now = [rate / (1 + (step >= slower_at and rank == 0)) for rank, rate in enumerate(rates)]
        times = [
            RankTime(n, (fixed_s + n / rate) * float(random.normal(1, noise)))
            for n, rate in zip(counts, now, strict=True)
        ]
        better = follower.step(step, times, counts)
        if better is not None:
            counts = better
            follower.change(step + 1)
    return taken


@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_shares_fit_the_speeds_after_some_steps(fixed_s: float) -> None:
    rates = [7.0, 5.0, 3.0, 2.0, 1.0]
    taken = simulate([100 * rate for rate in rates], fixed_s, 0.01, 40)
    assert taken[0] == (36,) * 5
    for counts in taken[20:]:
        assert sum(counts) == ROWS
        seconds = [fixed_s + n / (100 * rate) for n, rate in zip(counts, rates, strict=True)]
        assert max(seconds) < 1.06 * (fixed_s + ROWS / 1800)


def test_equal_ranks_keep_their_shares() -> None:
    assert set(simulate([100.0] * 4, 0.01, 0.03, 200)) == {(45,) * 4}


def test_a_rank_that_becomes_slower_gets_fewer_rows() -> None:
    taken = simulate([100.0] * 4, 0.0, 0.02, 120, slower_at=40)
    assert taken[39] == (45,) * 4
    assert taken[-1][0] == pytest.approx(ROWS / 7, abs=3)


def test_two_numbers_of_rows_show_the_fixed_seconds() -> None:
    table = make_table([RankTime(10, 0.3), RankTime(30, 0.5)], 100)
    assert table.compute_seconds(20) == pytest.approx(0.4)
    alike = make_table([RankTime(10, 0.3), RankTime(11, 0.31)], 100)  # tells nothing apart
    assert alike.compute_seconds(22) == pytest.approx(0.62)

"""The split follows the ranks' speeds while it runs, and does not tremble."""

import random
import time
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from motley.plan.plan import limit_s, split, whole_share_pieces
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import SpeedTable

SIZES = (1, 2, 4, 8, 16, 32)


def speed(sample_s: float) -> SpeedTable:
    return SpeedTable(SIZES, tuple(0.002 + sample_s * size for size in SIZES), 0.001)


class Lab:
    """Ranks that compute as long as their speed, now, says, give or take some noise."""

    def __init__(self, samples_s: list[float], noise: float, seed: int) -> None:
        self.measured = [speed(each) for each in samples_s]
        self.now, self.noise = list(self.measured), noise
        self.random = random.Random(seed)
        self.counts = split(180, self.measured)
        self.watch = ReplanMonitor(self.measured, range(len(samples_s)))
        self.replans = 0

    def run(self, steps: int) -> float:
        """Take some steps; the last one's speed, without noise, as a part of the limit."""
        return self._take(180 for _ in range(steps))

    def grow(self, steps: int) -> float:
        """The same, of a batch that grows; the speed is that of a full one."""
        return self._take(90 + 5 * (step * 17 // steps) for step in range(steps))

    def _take(self, batches: Iterable[int]) -> float:
        for batch in batches:
            counts = whole_share_pieces(batch, self.counts)
            ready = [
                (s.compute_seconds(n) - s.step_s)
                * self.random.uniform(1 - self.noise, 1 + self.noise)
                for s, n in zip(self.now, counts, strict=True)
            ]
            if proposal := self.watch.step(ready, counts, self.counts):
                assert sum(proposal.counts) == 180
                self.counts, self.replans = proposal.counts, self.replans + 1
                self.watch.reset()
        last = max(s.compute_seconds(n) for s, n in zip(self.now, self.counts, strict=True))
        return limit_s(180, self.now) / last


@given(st.integers(0, 4), st.floats(1.5, 3.0), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_a_host_at_half_speed_and_back(rank: int, factor: float, seed: int) -> None:
    lab = Lab([0.001, 0.0014, 0.0023, 0.0035, 0.007], 0.03, seed)
    assert lab.run(20) >= 0.93
    for now in (factor, 1.0):
        lab.replans = 0
        lab.now[rank] = speed(lab.measured[rank].seconds[0] * now - 0.002)
        assert lab.run(20) >= 0.90
        assert lab.replans <= 2


@given(st.integers(0, 4), st.floats(1.5, 3.0), st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_a_growing_batch_tells_of_a_slow_host_too(rank: int, factor: float, seed: int) -> None:
    lab = Lab([0.001, 0.0014, 0.0023, 0.0035, 0.007], 0.03, seed)
    lab.grow(20)
    assert lab.replans == 0
    lab.now[rank] = speed(lab.measured[rank].seconds[0] * factor - 0.002)
    assert lab.grow(20) >= 0.90 and lab.replans <= 2


def test_a_plan_made_by_hand_stays() -> None:
    watch = ReplanMonitor((), ())
    assert all(watch.step((1.0, 9.0), (5, 5)) is None for _ in range(50))


def test_a_rank_short_of_memory_hands_on_what_it_is_slower_by() -> None:
    lab = Lab([0.001] * 3, 0.02, 1)
    lab.now[0] = lab.measured[0].at_most(1)
    lab.watch.limit([1, 32, 32])
    lab.run(20)
    best = split(180, [lab.now[0], *lab.measured[1:]])
    assert lab.replans == 1 and sorted(lab.counts) == sorted(best) and lab.counts[0] == best[0]


def test_equal_ranks_of_one_machine_stay_equal() -> None:
    watch = ReplanMonitor([speed(0.001), speed(0.001)], ["a", "a"])
    assert all(watch.step((0.1, 0.2), (90, 90)) is None for _ in range(50))


def lab_of(ranks: int) -> Lab:
    dice = random.Random(0)
    lab = Lab([dice.uniform(0.001, 0.008) for _ in range(ranks)], 0.02, 1)
    lab.counts = split(40 * ranks, lab.measured)
    return lab


def ready_s(lab: Lab) -> list[float]:
    return [s.compute_seconds(n) - s.step_s for s, n in zip(lab.now, lab.counts, strict=True)]


def watched_s(lab: Lab, ready_s: list[float]) -> float:
    """Seconds of this process in a step in which nothing is proposed, the least of some."""
    took = []
    for _ in range(60):
        start = time.process_time()
        assert lab.watch.step(ready_s, lab.counts) is None
        took.append(time.process_time() - start)
    return min(took)


def test_to_watch_a_thousand_ranks_takes_a_thousand_times_one() -> None:
    """0.6 ms where nothing else runs; with their square it was 200."""
    few, many = lab_of(125), lab_of(1000)
    assert watched_s(many, ready_s(many)) < 16 * watched_s(few, ready_s(few))


def test_a_rank_whose_one_sample_takes_longest_costs_no_split_a_step() -> None:
    """It keeps that sample, to be seen if it recovers, so no split could be faster."""
    lab = lab_of(1000)
    counts = list(lab.counts)
    counts[1] += counts[0] - 1
    lab.counts = (1, *counts[1:])
    usual = watched_s(lab_of(1000), ready_s(lab_of(1000)))
    assert watched_s(lab, [30.0, *ready_s(lab)[1:]]) < 4 * usual

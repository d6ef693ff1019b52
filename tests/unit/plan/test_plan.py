"""Splitting a batch: pure arithmetic, by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.comm.modes.numbers import EXACT
from motley.errors import MotleyError
from motley.plan.plan import (
    Plan,
    Rank,
    apportion,
    choose_participants,
    cut,
    make_plan,
)
from motley.plan.precision import named_hosts, read_micro_batches, read_named_hosts, read_shares

shares = st.lists(
    st.one_of(st.just(0.0), st.floats(0.01, 100), st.integers(1, 9).map(float)),
    min_size=1,
    max_size=40,
).filter(lambda values: sum(values) > 0)


@given(st.integers(0, 10_000), shares)
def test_apportion_sums_and_stays_within_one_of_the_quota(total: int, values: list[float]) -> None:
    counts = apportion(total, values)
    assert sum(counts) == total
    for count, share in zip(counts, values, strict=True):
        assert abs(count - total * share / sum(values)) < 1 + 1e-6
        assert share > 0 or count == 0


def test_apportion_follows_whole_shares_exactly() -> None:
    assert apportion(150, (5, 4, 3, 2, 1)) == (50, 40, 30, 20, 10)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_cut_makes_few_parts_of_like_size(count: int, size: int) -> None:
    cuts = cut(count, size)
    assert sum(cuts) == count
    assert all(0 < part <= size for part in cuts)
    assert (len(cuts) - 1) * size < max(count, 1)
    assert not cuts or max(cuts) - min(cuts) <= 1


@given(st.integers(1, 500), shares, st.integers(1, 64), st.booleans())
def test_a_plan_covers_the_batch_once(n: int, values: list[float], m: int, equal: bool) -> None:
    plan = Plan(n, tuple(values), (m,) * len(values), EXACT, equal_micro_steps=equal)
    covered = []
    for start, sizes in zip(plan.starts, plan.micro_batches, strict=True):
        assert len(sizes) >= 1 and max(sizes) <= m
        covered += range(start, start + sum(sizes))
    assert covered == list(range(n))
    assert not equal or len({len(sizes) for sizes in plan.micro_batches}) == 1


@given(st.integers(5, 500), st.integers(1, 500))
def test_a_ragged_batch_keeps_the_shares(n: int, rest: int) -> None:
    plan = Plan(n, (3.0, 2.0, 0.0), (7, 7, 7), EXACT).for_batch(rest)
    assert sum(plan.counts) == rest == plan.global_batch
    assert plan.counts == apportion(rest, (3, 2, 0))


@given(st.integers(4, 500), st.lists(st.integers(1, 64), min_size=3, max_size=3))
def test_less_memory_cuts_smaller_and_shares_alike(n: int, most: list[int]) -> None:
    plan = Plan(n, (3.0, 2.0, 1.0), tuple(most), EXACT)
    before = [max(sizes) for sizes in plan.micro_batches]
    if min(before[0], before[2]) < 2:
        with pytest.raises(ValueError, match="cannot use smaller"):
            plan.halved((0, 2))
        return
    smaller = plan.halved((0, 2))
    assert smaller.counts == plan.counts
    assert smaller.micro_batches[1] == plan.micro_batches[1]
    assert all(max(smaller.micro_batches[rank]) <= before[rank] / 2 for rank in (0, 2))


def test_ranks_beyond_the_gpus_of_their_machine_are_left_out() -> None:
    two = ("GPU-x", "GPU-y")
    candidates = [
        Rank(0, "a", 0, 0, two), Rank(1, "a", 0, 2, two), Rank(2, "a", 0, 1, two),
        Rank(3, "b", 3, 0, ()), Rank(4, "b", 3, 1, ()),
    ]  # fmt: skip
    chosen = choose_participants(candidates)
    assert [rank.rank for rank in chosen] == [0, 1, 2, 3, 4]
    assert [rank.gpu for rank in chosen if not rank.reason] == [0, 1, None, None]
    assert [rank.rank for rank in chosen if rank.reason] == [1] and "2 GPUs" in chosen[1].reason


def test_ranks_that_see_one_gpu_each_all_take_part() -> None:
    candidates = [Rank(rank, "a", 0, rank, (f"GPU-{rank}",)) for rank in range(3)]
    assert [(rank.gpu, rank.reason) for rank in choose_participants(candidates)] == [(0, "")] * 3
    same = [Rank(rank, "a", 0, rank, ("GPU-0",)) for rank in range(2)]
    first, second = choose_participants(same)
    assert first.gpu == 0 and not first.reason and second.reason


def test_hosts_are_named_as_they_were_started() -> None:
    known = ["tesla0", "tesla0", "tesla1"]
    assert named_hosts("auto", known) is None and named_hosts("all", known) is None
    assert named_hosts(read_named_hosts("tesla1, tesla1"), known) == ("tesla1",)
    for text, name in (("tesla2", "tesla2"), ("", ""), ("tesla0,", ""), ("tesla0 x", "tesla0 x")):
        with pytest.raises(MotleyError, match=f"'{name}' is not among .* tesla0, tesla1"):
            named_hosts(read_named_hosts(text), known)
    candidates = [Rank(rank, name, rank, 0, ()) for rank, name in enumerate(("tesla0", "tesla1"))]
    first, second = choose_participants(candidates, ("tesla1",))
    assert "--hosts" in first.reason and not second.reason


@pytest.mark.parametrize("text", ["1,2", "a,b,c", "1,-1,1", "0,0,0", "nan,1,1", "inf,1,1", ""])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(MotleyError, match="--shares"):
        read_shares(text).for_ranks(3)


def test_a_batch_smaller_than_the_working_ranks_is_refused() -> None:
    with pytest.raises(MotleyError, match=r"--batch-size 2 .* 3 ranks"):
        make_plan(2, (1, 1, 1), (1, 1, 1), EXACT)
    assert make_plan(2, (1, 0, 1), (1, 1, 1), EXACT).counts == (1, 0, 1)


@pytest.mark.parametrize("text", ["0", "1,2", "x", "-3", "4,4,0"])
def test_wrong_micro_batches_are_refused(text: str) -> None:
    with pytest.raises(MotleyError, match="--micro-batch"):
        read_micro_batches(text).for_ranks(3)


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
)
def test_samples_of_unequal_cost_are_cut_by_it(costs: list[float], shares: list[int]) -> None:
    n = len(costs)
    plan = Plan(n, tuple(map(float, shares)), (7,) * len(shares), EXACT).by_cost(costs)
    assert sum(plan.counts) == n
    start = 0
    for share, count in zip(shares, plan.counts, strict=True):
        own = sum(costs[start : start + count])
        assert count == 0 or share, "who is to do nothing does nothing"
        assert abs(own - sum(costs) * share / sum(shares)) <= max(costs) * (1 + 1e-9)
        start += count


def test_a_rank_for_which_no_group_is_left_says_why() -> None:
    plan = make_plan(64, (5.0, 1.0), (64, 64), EXACT, grain=32)
    assert plan.sentence(0) == "64 samples in 1 micro-step"
    assert plan.sentence(1) == "0 samples in 1 micro-step (a rank takes whole groups of 32)"

"""What a rank is going to hold of a model: the sums, and what follows from them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.engines.strategies.fsdp import RESHARDS, TRAITS
from motley.engines.strategies.zero import TRAITS as ZERO
from motley.plan.memory import STATE, ModelSize, enough_ranks, estimate_rank_memory
from motley.plan.speeds import SpeedTable
from motley.plan.wire import EngineTraits

# 13 B parameters: 40 blocks of 315 M, and embeddings.
LARGE = ModelSize(12_853_626_880, 12_853_626_880, 314_613_760, 268_057_600, 2.0)
GIB = 1024


def test_13_billion_parameters_on_four_gpus() -> None:
    need = estimate_rank_memory(LARGE, RESHARDS, 4, narrow=True, wire_bytes=2)
    assert need.state / GIB == pytest.approx(16 * 12.8536e9 / 4 / 2**30, rel=1e-4)
    assert need.gathered / GIB == pytest.approx(3.9, abs=0.1)
    kept = estimate_rank_memory(LARGE, TRAITS, 4, narrow=True, wire_bytes=2)
    assert kept.gathered / GIB == pytest.approx(26.2, abs=0.2)  # all of it, in 16 bits
    whole = estimate_rank_memory(LARGE, EngineTraits(), 4, narrow=True)
    assert whole.state == pytest.approx(4 * need.state) and whole.gathered == 0
    away = estimate_rank_memory(
        LARGE, replace(RESHARDS, state_in_host=STATE), 4, narrow=True, wire_bytes=2
    )
    assert away.peak == away.gathered == need.gathered and away.host == need.state


def test_deepspeed_keeps_a_copy_and_lets_go_of_what_is_not_needed_soon() -> None:
    need = estimate_rank_memory(LARGE, ZERO[3], 4, narrow=False)
    fsdp = estimate_rank_memory(LARGE, RESHARDS, 4, narrow=False)
    assert need.state - fsdp.state == pytest.approx(need.parameters)
    live = 4 * (1e9 + 314_613_760 + 268_057_600) + 12 * 314_613_760 + 2e8
    assert need.gathered * 2**20 == pytest.approx(live)
    small = replace(LARGE, parameters=10**8, trained=10**8, largest=10**7, outside=10**6)
    assert (
        estimate_rank_memory(small, ZERO[3], 4, narrow=False).gathered * 2**20
        == 4.04e8 + 1.2e8 + 2e8
    )
    away = estimate_rank_memory(LARGE, replace(ZERO[3], state_in_host=STATE[1:]), 4, narrow=False)
    assert away.peak == pytest.approx(need.gathered + need.parameters)
    assert away.host == pytest.approx(need.gradients + need.optimizer)
    assert away.words().endswith("; gradients, optimizer in the host's memory")


def test_activations_and_gradients_are_not_both_at_their_most() -> None:
    need = estimate_rank_memory(LARGE, RESHARDS, 4, narrow=True)
    small = replace(need, activations=GIB, accumulates=False)
    assert small.peak == need.gathered + need.state  # gradients, at the end
    large = replace(need, activations=20.0 * GIB, accumulates=False)
    assert large.peak == pytest.approx(need.gathered + 0.75 * need.state + 20 * GIB)
    assert replace(large, accumulates=True).peak == need.gathered + need.state + 20 * GIB


SIZES = st.builds(
    lambda parameters, part, pieces, slots: ModelSize(
        parameters, int(part * parameters), parameters // (pieces + 1), parameters // 10, slots
    ),
    st.integers(10**6, 10**12), st.floats(0.01, 1), st.integers(1, 100), st.floats(0, 3),
)  # fmt: skip


@given(SIZES, st.integers(1, 64), st.booleans(), st.booleans(), st.floats(1e3, 1e6))
def test_as_many_ranks_as_are_said_do_and_one_less_does_not(
    size: ModelSize, ranks: int, narrow: bool, reshards: bool, room: float
) -> None:
    traits = RESHARDS if reshards else TRAITS
    need = estimate_rank_memory(size, traits, ranks, narrow)
    enough = enough_ranks(need, ranks, room)
    if enough is None:
        assert estimate_rank_memory(size, traits, 10**9, narrow).peak > 0.999 * room
    else:
        assert estimate_rank_memory(size, traits, enough, narrow).peak <= 1.001 * room
        if enough > ranks + 1:
            assert estimate_rank_memory(size, traits, enough - 1, narrow).peak > 0.999 * room


@given(st.integers(1, 64), st.floats(1, 1e4), st.floats(0, 1e4))
def test_activations_are_what_grows_with_the_batch(n: int, each: float, rest: float) -> None:
    sizes = (1, 2, 8)
    memory = tuple(rest + each * size for size in sizes)
    table = SpeedTable(sizes, (1.0, 2.0, 8.0), 0.0, memory, rest_mib=rest)
    assert table.activations_mib(n) == pytest.approx(n * each, rel=1e-6)
    first = SpeedTable((1,), (1.0,), 0.0, memory[:1], rest_mib=rest)
    assert first.activations_mib(n) == pytest.approx(n * each, rel=1e-6)
    assert replace(table, rest_mib=None).activations_mib(n) is None
    assert SpeedTable.from_json(table.as_json()) == table

"""Batch norm over groups: a sample's loss is of its group alone, whoever else is in the batch."""

import copy
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from motley.comm.modes.numbers import EXACT
from motley.data.order import slices
from motley.errors import MotleyError
from motley.plan.plan import make_plan
from motley.tasks.ghost_batch_norm import GroupStatistics, batch_norms, keep_frozen

CHANNELS = 3


def network(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, CHANNELS, 2), nn.BatchNorm2d(CHANNELS, momentum=momentum), nn.SiLU(),
              nn.Flatten(), nn.Linear(CHANNELS * 9, 4), nn.BatchNorm1d(4)]  # fmt: skip
    return nn.Sequential(*layers).double()


def gradient(net: nn.Module) -> Tensor:
    found = torch.cat([each.grad.flatten() for each in net.parameters()])
    net.zero_grad(set_to_none=True)
    return found


SAMPLES = torch.randn(60, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.sampled_from([2, 3, 8]),
       st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3),
       st.integers(0, 7))  # fmt: skip
def test_any_cut_gives_the_same_gradient_and_statistics(
    groups: int, grain: int, shares: list[int], most: int, ragged: int
) -> None:
    n = min(60, groups * grain + ragged % grain)
    shares = [*shares, 1]
    plan = make_plan(1000 * grain, shares, [most * grain] * len(shares), EXACT, grain=grain)
    found = []
    for each in (make_plan(1000 * grain, (1,), (1000 * grain,), EXACT, grain=grain), plan):
        net = network()
        seen = GroupStatistics(net, grain)
        cuts = [cut for rank in range(len(each.shares))
                for cut in slices(range(n), each.of_batch(n), rank)]  # fmt: skip
        assert sorted(chain.from_iterable(cuts)) == list(range(n))
        for cut in filter(None, cuts):
            (net(SAMPLES[cut]) ** 2).sum().backward()
            seen.take(len(cut), n)
        seen.end_step(taken=True)
        found.append((gradient(net), seen._own, seen._share))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert float(found[0][2][0]) == pytest.approx(0.1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose sums are its own."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda told: told)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_group_is_a_plain_batch_norm_and_a_step_that_is_dropped_counts_nothing(
    momentum: float | None,
) -> None:
    plain, net = network(momentum), network(momentum)
    seen = GroupStatistics(net, 20)
    for step in range(6):
        part = SAMPLES[20 * (step // 2) : 20 * (step // 2 + 1)]
        out = net(part)
        seen.take(20, 20)
        taken = step % 2 == 0
        seen.end_step(taken)
        if taken:
            torch.testing.assert_close(out, plain(part))
    seen.unite()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_those_who_are_left_stand_for_a_lost_rank(
    momentum: float | None,
) -> None:
    whole, net = network(momentum), network(momentum)
    all_of_it, left = GroupStatistics(whole, 10), GroupStatistics(net, 10)
    for step in range(4):  # two groups of ten, of which the rank that is lost had the second
        part = SAMPLES[10 * step : 10 * step + 10]
        whole(torch.cat([part, part])[torch.arange(20).view(2, 10).T.reshape(-1)])
        all_of_it.take(20, 20)
        all_of_it.end_step(taken=True)
        net(part)
        left.take(10, 20)
        left.end_step(taken=True)
    all_of_it.unite()
    kept = left.state(torch.clone)
    left.forget()
    left.go_on(kept)
    left.go_on({})  # it is in there already
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, msg=name)


def test_what_is_frozen_keeps_its_statistics_and_what_cannot_be_grouped_is_refused() -> None:
    net = network()
    net[1].requires_grad_(False)
    assert list(batch_norms(net)) == ["5"]
    keep_frozen(net)
    before = copy.deepcopy(net[1].state_dict())
    net.train()
    net(SAMPLES)
    assert all(torch.equal(value, before[name]) for name, value in net[1].state_dict().items())
    with pytest.raises(MotleyError, match="1 is a SyncBatchNorm"):
        batch_norms(nn.SyncBatchNorm.convert_sync_batchnorm(network()))

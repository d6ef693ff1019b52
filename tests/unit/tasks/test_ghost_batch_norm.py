"""Batch norm over groups: a sample's loss is of its group alone, whoever else is in the batch."""

import copy
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from motley.comm.modes.numbers import EXACT
from motley.data.import_timm import timm
from motley.data.source import slices
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
                for cut in slices(range(n), each.for_batch(n), rank)]  # fmt: skip
        assert sorted(chain.from_iterable(cuts)) == list(range(n))
        for cut in filter(None, cuts):
            with seen.note_pass(len(cut)):
                out = net(SAMPLES[cut])
            (out**2).sum().backward()
            seen.take(len(cut), n)
        seen.end_step(taken=True)
        found.append((gradient(net), *seen._moved[:2]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert float(found[0][2][0]) == pytest.approx(0.1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose sums are its own."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, *_: values)
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
        with seen.note_pass(20):
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
        with all_of_it.note_pass(20):
            whole(torch.cat([part, part])[torch.arange(20).view(2, 10).T.reshape(-1)])
        all_of_it.take(20, 20)
        all_of_it.end_step(taken=True)
        with left.note_pass(10):
            net(part)
        left.take(10, 20)
        left.end_step(taken=True)
    all_of_it.unite()
    kept, estimated = left.state(torch.clone), left.estimate(torch.clone)
    left.reset()
    left.go_on(kept)
    left.go_on({})  # it is in there already
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, msg=name)
        if "running" in name or "tracked" in name:
            torch.testing.assert_close(estimated.pop(name), value, msg=name)
    assert not estimated


class Twice(nn.Module):
    """A siamese network: one batch norm sees both halves of a sample, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = nn.BatchNorm2d(1), nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, :, :2]) + 3 * self.norm(100 + 5 * x[:, :, 2:])


class Tokens(nn.Module):
    """Folds the tokens of a sample into the batch, before or (wrongly) behind the samples."""

    def __init__(self, samples_first: bool = True) -> None:
        super().__init__()
        self.samples_first = samples_first
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, 0] if self.samples_first else x[:, 0].transpose(0, 1)
        out = self.norm(tokens.flatten(0, 1)).view(tokens.shape)
        return out if self.samples_first else out.transpose(0, 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["siamese", "kept in eval mode", "tokens", "levit_128s"])
def test_a_group_of_all_samples_is_torchs_batch_norm(name: str) -> None:
    torch.manual_seed(0)
    makes: dict[str, Callable[[], nn.Module]] = {
        "siamese": Twice, "kept in eval mode": network, "tokens": Tokens,
        "levit_128s": lambda: timm.create_model("levit_128s", num_classes=3),
    }  # fmt: skip
    plain = makes[name]().double()
    net = copy.deepcopy(plain)
    samples = torch.randn(6, 3, 224, 224).double() if name == "levit_128s" else SAMPLES[:6]
    seen = GroupStatistics(net, 6)
    net.eval()
    seen.find_rows(lambda data: net(data["x"]), {"x": samples[:2]})
    for each in (net, plain):
        each.train()
        if name == "kept in eval mode":
            each[1].eval()
    for _ in range(1 if name == "levit_128s" else 3):
        with seen.note_pass(6):
            out = net(samples)
        seen.take(6, 6)
        seen.end_step(taken=torch.tensor(True))
        torch.testing.assert_close(out, plain(samples))
    seen.unite()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value, msg=key)


def test_tokens_are_cut_by_samples_or_refused() -> None:
    """Two groups of two samples are two batches of torch's; rows in another order have none."""
    net, plain = Tokens().double(), Tokens().double()
    seen = GroupStatistics(net, 2)
    seen.find_rows(lambda data: net.eval()(data["x"]), {"x": SAMPLES[:2]})
    net.train()
    out = net(SAMPLES[[0, 2, 1, 3]])  # interleaved
    torch.testing.assert_close(out[[0, 2]], plain(SAMPLES[:2]))
    torch.testing.assert_close(out[[1, 3]], plain(SAMPLES[2:4]))
    turned = Tokens(samples_first=False).double()
    with pytest.raises(MotleyError, match="norm gets 12 rows for 3 samples"):
        GroupStatistics(turned, 2).find_rows(
            lambda data: turned.eval()(data["x"]), {"x": SAMPLES[:2]}
        )


@pytest.mark.usefixtures("alone")
def test_a_compiled_batch_norm_is_the_plain_one() -> None:
    found = []
    for compiled in (False, True):
        net = network()
        seen = GroupStatistics(net, 2)
        compute = torch.compile(net, backend="aot_eager") if compiled else net
        layout = torch.channels_last if compiled else torch.contiguous_format
        for _ in range(2):
            with seen.note_pass(8):
                out = compute(SAMPLES[:8].contiguous(memory_format=layout))
            (out**3).sum().backward()
            seen.take(8, 8)
            seen.end_step(taken=True)
        seen.unite()
        found.append([out, gradient(net), *net.state_dict().values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


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

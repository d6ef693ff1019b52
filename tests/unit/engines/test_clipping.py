"""Clipping by value and by the norm of the weights, as in timm."""

import copy
from collections.abc import Callable

import pytest
import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn

from motley.engines.step import clip_adaptively, clip_values


def make_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5), nn.LayerNorm(6)).to(dtype)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) * 3
    net[1].weight.grad[2] = 0.0
    net[2].bias.grad = None
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "most"), [("value", 0.7), ("agc", 0.3)])
def test_it_is_timms(mode: str, most: float, dtype: torch.dtype) -> None:
    net = make_net(dtype)
    other = copy.deepcopy(net)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        two.grad = None if one.grad is None else one.grad.clone()
    dispatch_clip_grad(other.parameters(), most, mode)
    clip: Callable[..., None] = {"value": clip_values, "agc": clip_adaptively}[mode]
    clip(list(net.parameters()), most)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)


def test_all_ranks_take_the_factors_of_the_first() -> None:
    """Whatever this rank's gradients are, the factors have one form."""
    net = make_net(torch.float32)
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    seen: list[Tensor] = []

    def share(factors: Tensor) -> Tensor:
        seen.append(factors)
        return torch.full_like(factors, 0.5)

    clip_adaptively(list(net.parameters()), 0.1, share)
    for parameter, grad in zip(net.parameters(), before, strict=True):
        assert grad is None or torch.equal(parameter.grad, grad / 2)
    for parameter in net.parameters():
        parameter.grad = None
    clip_adaptively(list(net.parameters()), 0.1, share)
    assert seen[0].shape == seen[1].shape and bool((seen[1] == 1).all())

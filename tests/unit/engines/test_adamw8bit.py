"""AdamW in 8 bits: nearest codes, torchao's steps, any cut of rows, the same bits everywhere."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from motley.engines.optimizer import kept_numbers
from motley.engines.optimizers import adamw8bit
from motley.engines.optimizers.adamw8bit import BLOCK, AdamW8bit, pack, unpack
from motley.engines.strategies import ZERO, known_strategies, list_engines
from motley.errors import MotleyError
from motley.train.command_line import read_config, training_parser

Gradient = Callable[[tuple[int, ...], torch.Generator], Tensor]
SHAPES = (64, 512), (300,), (5, 40)
OPTIONS = {"lr": 1e-3, "weight_decay": 0.05}


def near_one(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=noise) + 0.5


def tiny(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return near_one(shape, noise) * 1e-7


def stepped(
    kind: type[torch.optim.Optimizer], steps: int, gradient: Gradient, device: str = "cpu"
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Parameters of all kinds of shapes, from the same gradients."""
    noise = torch.Generator().manual_seed(1)
    own = [torch.randn(shape, generator=noise).to(device).requires_grad_() for shape in SHAPES]
    optimizer = kind(own, **OPTIONS)  # type: ignore[call-arg]
    with torch.compiler.set_stance("force_eager"):
        for _ in range(steps):
            for each in own:
                each.grad = gradient(tuple(each.shape), noise).to(device)
            optimizer.step()
    return [each.detach() for each in own], optimizer


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    tables = adamw8bit._tables(signed, "cpu")
    numbers = tables.numbers.double()
    assert len(numbers.unique()) == 256 and bool((numbers.diff() > 0).all())
    noise = torch.Generator().manual_seed(0)
    values = torch.rand(100 * BLOCK, generator=noise) * 10 ** (
        -9 * torch.rand(100 * BLOCK, generator=noise)
    )
    edges = tables.edge[tables.edge.isfinite()].unique()
    around = [edges, *(torch.nextafter(edges, torch.full((), to)) for to in (-2.0, 2.0))]
    values = torch.cat([values, *around, torch.tensor([0.0, -0.0, 1.0])])
    values = torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
    if signed:
        values *= torch.randint(0, 2, values.shape, generator=noise) * 2 - 1
    rows = values.view(-1, BLOCK)
    rows[:, 0] = 1.0  # all scales are one
    codes, scale = pack(rows, signed)
    assert bool((scale == 1).all())
    found = numbers[codes.int()]
    nearest = (rows.double().unsqueeze(2) - numbers).abs()
    if not signed:
        nearest[..., 0] = math.inf  # nothing is rounded to zero
    # Halves of fp32 are where they are to its own rounding.
    assert torch.allclose((rows - found).abs(), nearest.amin(dim=2), rtol=0, atol=1e-7)
    assert torch.equal(unpack(codes, scale, signed), found.float())


@given(rows=st.integers(1, 4), numbers=st.integers(64, 700), power=st.integers(-120, 100))
def test_what_is_packed_is_within_a_code_of_what_it_was(
    rows: int, numbers: int, power: int
) -> None:
    values = torch.randn(rows, numbers, generator=torch.Generator().manual_seed(numbers))
    values *= 2.0**power
    codes, scale = pack(values, True)
    assert codes.shape == values.shape and scale.shape == (rows, -(-numbers // BLOCK))
    if 2.0**power > 1e-28:
        most = scale.repeat_interleave(BLOCK, dim=1)[:, :numbers]
        error = (unpack(codes, scale, True) - values).abs()
        assert bool((error <= 0.9 / 64 / 2 * 1.001 * most).all())  # the widest gap, by half


def test_it_steps_as_torchao_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit as Torchaos  # slow
    (ours, own), (others, their) = (stepped(k, 20, near_one) for k in (AdamW8bit, Torchaos))
    moved = 20 * OPTIONS["lr"]
    for one, other in zip(ours[:2], others[:2], strict=True):  # of the third it keeps 32 bits
        assert float((one - other).abs().max()) < 0.01 * moved
        assert float((one - other).abs().mean()) < 1e-4 * moved
    for name in ("exp_avg", "exp_avg_sq"):
        codes, kept = own.state_dict()["state"][0][name], their.state_dict()["state"][0][name]
        assert float((codes != kept.codes).float().mean()) < 0.01
        scale = own.state_dict()["state"][0][f"{name}_scale"]
        assert scale.flatten().numpy() == pytest.approx(kept.scale.numpy(), rel=1e-2)


@pytest.mark.parametrize("gradient", [near_one, tiny])
def test_it_goes_where_adamw_goes(gradient: Gradient) -> None:
    ours, _ = stepped(AdamW8bit, 20, gradient)
    others, _ = stepped(torch.optim.AdamW, 20, gradient)
    moved = 20 * OPTIONS["lr"]
    for one, other in zip(ours, others, strict=True):
        # A mean forgets a tenth a step, so ten roundings of 0.7 % of the largest add up at most.
        assert float((one - other).abs().max()) < 0.1 * moved
        assert float((one - other).abs().mean()) < 0.01 * moved


def test_a_gradient_that_stops_makes_no_step_without_a_bound() -> None:
    """A block's largest number a million times another's: that one's square would become zero."""
    value = torch.zeros(1, BLOCK, requires_grad=True)
    optimizer = AdamW8bit([value], lr=1e-3, weight_decay=0.0)
    for step in range(30):
        value.grad = torch.full((1, BLOCK), 1.0)
        value.grad[0, 1:] = 1e-6 if step < 10 else 0.0
        optimizer.step()
    assert float(value.detach().abs().max()) < 31 * 1e-3


def test_any_cut_of_rows_makes_the_same_bits() -> None:
    whole, optimizer = stepped(AdamW8bit, 5, near_one)
    noise = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=noise) for shape in SHAPES]
    parts = [part.clone().requires_grad_() for part in starts[0].split([1, 40, 0, 23])]
    cut = AdamW8bit(parts, **OPTIONS)
    for _ in range(5):
        grads = [near_one(shape, noise) for shape in SHAPES]
        for part, grad in zip(parts, grads[0].split([1, 40, 0, 23]), strict=True):
            part.grad = grad
        cut.step()
    assert torch.equal(torch.cat(parts), whole[0])
    for slot, kept in optimizer.state_dict()["state"][0].items():
        if kept.ndim:
            assert torch.equal(torch.cat([cut.state[part][slot] for part in parts]), kept), slot


def test_roots_are_the_nearest_numbers() -> None:
    noise = torch.Generator().manual_seed(0)
    values = torch.rand(1 << 16, generator=noise) * torch.exp2(
        torch.randint(-130, 60, (1 << 16,), generator=noise).float()
    )
    assert torch.equal(adamw8bit._root(values), torch.from_numpy(np.sqrt(values.numpy())))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_bits_of_a_processor() -> None:
    (here, own), (there, their) = (
        stepped(AdamW8bit, 20, near_one, device) for device in ("cpu", "cuda")
    )
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
    for one, other in zip(own.state.values(), their.state.values(), strict=True):
        assert all(torch.equal(value, other[slot].cpu()) for slot, value in one.items())


def test_its_memory_is_a_quarter_and_a_scale() -> None:
    of = {name: kept_numbers(read_config(training_parser(""), ["--opt", name]))
          for name in ("adamw", "adamw8bit")}  # fmt: skip
    assert of["adamw"] == pytest.approx(2, abs=1e-3)
    assert 4 * of["adamw8bit"] == pytest.approx(2 + 8 / BLOCK, abs=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_which_cuts_no_rows_refuses_it_at_once(stage: int) -> None:
    known = known_strategies(ZERO)
    words = ["--opt", "adamw8bit", "--stage", str(stage)]
    config = read_config(training_parser("", known), words)
    with pytest.raises(MotleyError, match=rf"ZeRO stage {stage} .* Take .*--strategy fsdp"):
        list_engines(config, known)

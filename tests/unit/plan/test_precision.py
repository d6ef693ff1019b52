"""Precision by rank, and the one loss scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import MotleyError
from motley.plan.precision import (
    LossScale,
    best_precision,
    best_precision_of_amd,
    read_loss_scale,
    read_precisions,
    start_scale,
)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_scale_moves_as_torchs_own(overflows: list[bool], interval: int) -> None:
    ours = LossScale(2.0**16, growth_interval=interval)
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    torchs.scale(torch.ones(()))  # creates its state
    for overflow in overflows:
        ours.update(overflow)
        torchs._found_inf_per_device  # noqa: B018  documents what update() reads
        torch._amp_update_scale_(
            torchs._scale, torchs._growth_tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval
        )
        assert ours.value == min(torchs.get_scale(), 2.0**32)


def test_a_scale_continues_from_its_state() -> None:
    first = LossScale(8.0, growth_interval=3)
    first.update(False)
    second = LossScale(1.0, growth_interval=3)
    second.load_state_dict(first.state_dict())
    for scale in (first, second):
        scale.update(False)
        scale.update(False)
    assert first.value == second.value == 16.0


def test_the_scale_of_an_fp32_run_is_not_taken_by_an_fp16_one() -> None:
    scale = LossScale(2.0**16)
    scale.load_state_dict(LossScale(1.0, dynamic=False).state_dict())
    assert scale.value == 2.0**16


@pytest.mark.parametrize(
    ("text", "precisions", "value", "dynamic"),
    [
        ("auto", ("fp32", "bf16"), 1.0, False),
        ("auto", ("fp32", "fp16"), 2.0**16, True),
        ("dynamic", ("fp32",), 2.0**16, True),
        ("2^24", ("fp32",), 2.0**24, True),
        ("2**10", ("fp32",), 2.0**10, True),
        ("512", ("fp16",), 512.0, True),
    ],
)
def test_reading_the_loss_scale(
    text: str, precisions: tuple[str, ...], value: float, dynamic: bool
) -> None:
    scale = start_scale(read_loss_scale(text), precisions)
    assert (scale.value, scale.dynamic) == (value, dynamic)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "2^99", "big"])
def test_a_wrong_loss_scale_is_refused(text: str) -> None:
    with pytest.raises(MotleyError, match="--loss-scale"):
        read_loss_scale(text)


def test_reading_precisions() -> None:
    assert read_precisions("bf16").for_ranks(2) == ("bf16", "bf16")
    assert read_precisions("fp16,fp32").for_ranks(2) == ("fp16", "fp32")
    with pytest.raises(MotleyError, match="nearest: fp16"):
        read_precisions("pf16")
    with pytest.raises(MotleyError, match="fp16,fp32 has 2 values, but 3 ranks take part"):
        read_precisions("fp16,fp32").for_ranks(3)


@pytest.mark.parametrize(
    ("capability", "name"),
    [(None, "fp32"), ((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 6), "bf16"), ((9, 0), "bf16")],
)
def test_the_best_precision_of_a_device(capability: tuple[int, int] | None, name: str) -> None:
    assert best_precision(capability)[0] == name


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("gfx803", "fp32"), ("gfx906:sramecc+:xnack-", "fp16"), ("gfx90c", "fp16"),
     ("gfx908", "bf16"), ("gfx90a:sramecc+:xnack-", "bf16"), ("gfx942", "bf16"),
     ("gfx1030", "fp16"), ("gfx1100", "bf16"), ("gfx1201", "bf16"), ("", "fp32")],
)  # fmt: skip
def test_what_amd_calls_a_gpu_is_no_compute_capability(architecture: str, name: str) -> None:
    assert best_precision_of_amd(architecture)[0] == name

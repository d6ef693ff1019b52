"""What a run is going to take is said before it starts, and refused if there is no room."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from motley.comm.modes.numbers import EXACT
from motley.errors import MotleyError
from motley.plan.plan import make_plan
from motley.train.command_line import read_config, training_parser
from motley.train.setup import Budget, checkpoint_bytes

BUDGET = Budget(360, 0.5, 2.0**30, 30, 2, 0, 4.0 * 2**30, Path("/logs/run/checkpoints"))


def test_time_and_disk_are_said() -> None:
    words = BUDGET.sentence()
    assert "360 steps should take 3:00" in words and "up to 3 GiB of the 4 GiB" in words
    assert "should take" not in replace(BUDGET, step_s=None).sentence()
    assert replace(BUDGET, saves=0).sentence().endswith("no checkpoints")


def test_what_does_not_fit_is_refused_with_the_options_that_help() -> None:
    BUDGET.check()
    with pytest.raises(MotleyError) as refused:
        replace(BUDGET, free=2.9 * 2**30).check()
    words = str(refused.value)
    assert "of 1 GiB each, will take 3 GiB" in words
    assert "2.9 GiB are free in /logs/run" in words
    assert "--keep 1" in words and "--logs DIR" in words
    with pytest.raises(MotleyError) as refused:
        replace(BUDGET, saves=1, free=1.5).check()  # to keep fewer would not help
    assert "--keep" not in str(refused.value) and "1.5 B are free" in str(refused.value)
    assert "1.8 TiB that are free" in replace(BUDGET, free=1.8 * 2**40).sentence()


@given(st.integers(0, 50), st.integers(1, 5), st.integers(0, 9))
def test_a_resumed_run_needs_no_room_for_what_is_there(saves: int, keep: int, there: int) -> None:
    """What is on the disk after each save, as Checkpoints.save does it."""
    now = most = min(there, keep)
    for _ in range(saves):
        most = max(most, now + 1)
        now = min(now + 1, keep)
    budget = replace(BUDGET, saves=saves, keep=keep, there=min(there, keep))
    assert budget.needed / budget.checkpoint == most - min(there, keep)


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), 3),
        (("--opt", "sgd"), 2),
        (("--wire", "powersgd:4"), 6),
        (("--opt", "lookahead_sgd"), 3),
    ],
    ids=["AdamW", "SGD", "PowerSGD", "Lookahead"],
)
def test_a_checkpoint_holds_what_the_optimizer_keeps(words: tuple[str, ...], copies: int) -> None:
    net = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
    config = read_config(training_parser(""), list(words))
    plan = make_plan(9, (1.0,) * 3, (3,) * 3, config.wire or EXACT)
    numbers = sum(torch.as_tensor(value).numel() for value in net.state_dict().values())
    found = checkpoint_bytes(numbers, numbers, config, plan)
    assert found == pytest.approx(4 * copies * numbers, rel=0.01)
    frozen = checkpoint_bytes(numbers, 0, config, plan)
    assert frozen == 4 * numbers, "nothing is kept of what is not trained"

"""Refining a split by timing what it would use."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley import speeds
from motley.balance import Speed, split
from motley.forecast import Wire
from motley.speeds import Measured, refine


@dataclass
class Alone:
    """A world in which the other rank's speed never changes."""

    other: Speed

    def allgather(self, own: Speed) -> list[Speed]:
        return [self.other, own]


def test_a_cliff_between_measured_sizes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a H200 in fp32: 57 images are four full waves of tiles, 58 begin a fifth one.
    def real(size: int) -> float:
        return size / 400 if size <= 57 else 0.160

    timed = []

    def time_micro_batch(_: object, size: int) -> tuple[float, None]:
        timed.append(size)
        return real(size), None

    monkeypatch.setattr(speeds, "time_micro_batch", time_micro_batch)
    fast = Speed((1, 512), (0.01, 512 / 2900), 0.0)
    slow = Speed((1, 32, 64), (0.01, real(32), 0.167), 0.0)
    members = [SimpleNamespace(uuid="a"), SimpleNamespace(uuid="b")]
    team: Any = SimpleNamespace(rank=1, members=members)
    world: Any = Alone(fast)
    before = Measured((fast, slow), Wire(0.0, 0.002, on_gpu=True))
    assert split(512, before.speeds)[1] == 62  # as a straight line has it
    after = refine(world, team, torch.nn.Linear(1, 1), 512, before)  # type: ignore[arg-type]
    counts = split(512, after.speeds)
    assert 1 <= len(timed) <= 4 and len(set(timed)) == len(timed)
    assert after.speeds[1].seconds_of(counts[1]) == pytest.approx(real(counts[1]), rel=0.05)
    assert after.speeds[0] is fast

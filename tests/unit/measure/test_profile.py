"""Refining a split by timing what it would use."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley.comm.modes.numbers import EXACT
from motley.measure import speed_cache as speeds
from motley.measure.measured_plan import refine
from motley.measure.profile import Measured
from motley.plan.plan import split
from motley.plan.speeds import SpeedTable
from motley.plan.wire import AllReduceCost


@dataclass
class Alone:
    """A world in which the other rank's speed never changes."""

    other: SpeedTable

    def allgather(self, own: SpeedTable) -> list[SpeedTable]:
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
    fast = SpeedTable((1, 512), (0.01, 512 / 2900), 0.0)
    slow = SpeedTable((1, 32, 64), (0.01, real(32), 0.167), 0.0)
    workers = [SimpleNamespace(uuid="a"), SimpleNamespace(uuid="b")]
    group: Any = SimpleNamespace(rank=1, workers=workers)
    world: Any = Alone(fast)
    before = Measured((fast, slow), {EXACT: AllReduceCost(0.0, 0.002, on_gpu=True)})
    assert split(512, before.speeds)[1] == 62  # as a straight line has it
    after = refine(world, group, torch.nn.Linear(1, 1), 512, before)  # type: ignore[arg-type]
    counts = split(512, after.speeds)
    assert 1 <= len(timed) <= 4 and len(set(timed)) == len(timed)
    assert after.speeds[1].compute_seconds(counts[1]) == pytest.approx(real(counts[1]), rel=0.05)
    assert after.speeds[0] is fast


def sizes_timed(monkeypatch: pytest.MonkeyPatch, rate: float) -> list[int]:
    """Micro-batches that are timed from now on, by a device of so many samples a second."""
    found = []

    def time_micro_batch(_: object, size: int) -> tuple[float, None]:
        found.append(size)
        return size / rate, None

    monkeypatch.setattr(speeds, "time_micro_batch", time_micro_batch)
    return found


@pytest.mark.parametrize(("largest", "timed"), [(64, []), (32, [40])])
def test_a_processors_share_is_timed_beyond_what_was_alone(
    monkeypatch: pytest.MonkeyPatch, largest: int, timed: list[int]
) -> None:
    found = sizes_timed(monkeypatch, rate=100)
    table = SpeedTable((1, largest), (0.01, largest / 100), 0.0)
    group: Any = SimpleNamespace(rank=1, workers=[SimpleNamespace(uuid="")] * 2)
    before = Measured((table, table), {EXACT: AllReduceCost(0.001, 1.0)})
    refine(Alone(table), group, torch.nn.Linear(1, 1), 80, before)  # type: ignore[arg-type]
    assert found == timed


@pytest.mark.parametrize(
    ("most", "sends", "timed"),
    [(8, 1.0, [6]), (None, 1.0, [11]), (8, 0.0, []), (1, 1.0, []), (None, 0.0, [11])],
    ids=["as few as allowed", "whole", "a part hides no more", "one each", "whole hides most"],
)
def test_where_each_micro_step_sends_a_share_is_timed_in_few(
    monkeypatch: pytest.MonkeyPatch, most: int | None, sends: float, timed: list[int]
) -> None:
    """Of 11 samples, 8 of which may be in one micro-batch: cut in two, 6 is the larger."""
    found = sizes_timed(monkeypatch, rate=3)
    table = SpeedTable((1, 2, 6)[: 2 if most else 3], (0.34, 0.67, 2.0)[: 2 if most else 3], 0.0)
    table = table.at_most(most or 6)
    monkeypatch.setattr("motley.measure.measured_plan.has_room", lambda _, speed, size: size <= 11)
    wire = AllReduceCost(0.0, 3.0, overlaps=not sends, allreduces_per_step=1.0 - sends,
                         allreduces_per_micro_step=sends)  # fmt: skip
    group: Any = SimpleNamespace(rank=1, workers=[SimpleNamespace(uuid="")] * 2)
    before = Measured((table, table), {EXACT: wire})
    model: Any = torch.nn.Linear(1, 1)
    after = refine(Alone(table), group, model, 22, before, most=most)  # type: ignore[arg-type]
    assert found == timed and set(timed) <= set(after.speeds[1].sizes)


@pytest.mark.parametrize(
    ("factors", "timed", "kept"),
    [
        ([1.2] * 5, [1, 1, 8, 8, 16], True),
        ([2.0] * 10, [1, 1, 8, 8, *[16] * 6], False),
        ([100.0] * 2, [1, 1], False),
        ([9.0, 1.2, 2.0, 2.0, 2.0, 1.1], [1, 1, 8, 8, 16, 16], True),
        ([0.5] * 10, [1, 1, 8, 8, *[16] * 6], False),
        # Remembered with a busy processor, one sample hides what each takes now.
        ([3.0, 3.0, 15.0, 15.0], [1, 1, 8, 8], False),
    ],
)  # fmt: skip
def test_a_remembered_speed_is_only_tried_where_that_cannot_take_long(
    monkeypatch: pytest.MonkeyPatch, factors: list[float], timed: list[int], kept: bool
) -> None:
    remembered = SpeedTable((1, 16, 64), (0.01, 0.08, 0.3), 0.0)
    anew = SpeedTable((1,), (1.0,), 0.0)
    tried = []

    def passes(_: object, size: int, count: int) -> Iterator[float]:
        for _ in range(count):
            tried.append(size)
            yield factors[len(tried) - 1] * remembered.micro_s(size)

    monkeypatch.setattr(speeds, "passes", passes)
    monkeypatch.setattr(speeds, "_place", lambda *_: (None, {}))
    monkeypatch.setattr(speeds, "read_speed", lambda *_: remembered)
    monkeypatch.setattr(speeds, "measure_speed", lambda *_: anew)
    for trial in ("try_optimizer", "try_types"):
        monkeypatch.setattr(speeds, trial, lambda *_: None)
    config: Any = SimpleNamespace(batch_size=128)
    group: Any = SimpleNamespace(device=torch.device("cpu"))
    net = torch.nn.Linear(1, 1)
    model: Any = SimpleNamespace(
        net=net, by_blocks=None, every_parameter=net.parameters, zero_grad=net.zero_grad
    )
    found = speeds.measure_own_speed(group, model, config, 1)
    assert tried == timed and found is (remembered if kept else anew)

"""The time of one rank by activity."""

import pytest
import torch

from motley.engines.step_timer import HOST, Clock


def test_an_evaluation_of_one_rank_is_no_work_that_a_share_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("motley.engines.step_timer.time.perf_counter", lambda: now)
    clock, own = Clock(torch.device("cpu")), list[float]()
    clock.at_once = True
    for step in range(12):
        for name, seconds in (
            (HOST, 2.0 if step % 5 == 4 else 0.02),
            ("data", 0.1),
            ("compute", 1.0),
        ):
            now += seconds
            clock.lap(name)
        own.append(clock.measure_own_s())
        clock.cut()
    assert max(own) < 1.2 and min(own) == pytest.approx(1.12)

"""Whether the first steps bear out what a plan expects of the wire."""

from typing import Any

import pytest

from motley.measure.speed_cache import WireFigures, WireMemory
from motley.plan.forecast import Forecast
from motley.records.training import StepRecord
from motley.train.recorder import FirstSteps

FORECAST = Forecast(8, (0.06, 0.05), 0.1, 1, 0.04, 0.05)  # 0.1 s a step


class KeptState:
    """In place of a cache."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def keep(self, figures: WireFigures) -> None:
        self.kept.append(figures.steps_took)


def record(comm_s: float | None, seconds: float = 0.1, n: int = 8) -> StepRecord:
    """A step in which ranks waited so long for the wire."""
    return StepRecord(
        0, 0, 1.0, 1.0, 1.0, False, 1.0, n, n, 0.0, 0.06, 0.0, comm_s, 0.0, None, n / seconds, n, 0
    )


def said_of(
    steps: list[StepRecord], is_old: bool, before: float = 1.0
) -> tuple[list[str], list[float]]:
    """What is said of these steps, and what is kept of the figures."""
    cache: Any = KeptState()
    memory = WireMemory(cache, WireFigures({}, {}, 1.7e9, before), is_old)
    watch = FirstSteps(memory, FORECAST)
    said = [watch.step(each) for each in steps] + [watch.end()]
    return [text for text in said if text], cache.kept


@pytest.mark.parametrize(
    ("comm_s", "before", "holds"),
    [(0.04, 1.0, True), (0.08, 1.0, True), (0.1, 1.0, False), (2.0, 1.0, False),
     (0.0, 1.0, False), (0.14, 2.0, True), (0.04, 2.0, False), (0.3, 2.0, False)],
)  # fmt: skip
def test_old_figures_are_kept_while_they_hold(comm_s: float, before: float, holds: bool) -> None:
    said, kept = said_of([record(comm_s)] * 12, True, before)
    assert kept == ([before] if holds else [])
    assert bool(said) != holds
    for text in said:
        assert "the links have changed since 2023-11-14" in text
        assert f"{0.06 + comm_s:.3g} s" in text and f"{0.1 * before:.3g} s" in text


@pytest.mark.parametrize(("comm_s", "kept"), [(0.04, [1.0]), (0.14, [2.0]), (0.3, []), (1.0, [])])
def test_new_figures_are_kept_with_what_steps_took(comm_s: float, kept: list[float]) -> None:
    said, found = said_of([record(comm_s)] * 12, False)
    assert found == pytest.approx(kept) and said == []


def test_slow_computing_is_no_slow_link() -> None:
    said, kept = said_of([record(0.04, seconds=3.0)] * 12, True)
    assert said == [] and kept == [1.0]


def test_where_an_engine_cannot_tell_the_step_tells() -> None:
    said, kept = said_of([record(None, seconds=0.3)] * 12, True)
    assert said and not kept
    said, kept = said_of([record(None, seconds=0.12)] * 12, True)
    assert not said and kept


def test_first_ragged_and_few_disturbed_steps_say_nothing() -> None:
    usual, odd = record(0.04), record(5.0)
    assert said_of([odd, odd, *[usual] * 5, odd, odd, odd, usual], True) == ([], [1.0])
    assert said_of([*[usual] * 2, *[record(5.0, n=3)] * 30], True) == ([], [1.0])


def test_a_short_run_that_ends_well_keeps_them() -> None:
    assert said_of([], True, before=1.7) == ([], [1.7])
    assert said_of([record(9.0)], False) == ([], [1.0])
    said, kept = said_of([record(9.0)] * 3, True)
    assert said and not kept


def test_after_the_first_steps_nothing_is_compared() -> None:
    said, kept = said_of([*[record(0.04)] * 10, *[record(9.0)] * 10], True)
    assert said == [] and kept == [1.0]


def test_without_figures_or_forecast_there_is_nothing_to_say() -> None:
    cache: Any = KeptState()
    for watch in (FirstSteps(), FirstSteps(WireMemory(cache, WireFigures(), True), None)):
        assert [watch.step(record(9.0)) for _ in range(12)] == [""] * 12
        assert watch.end() == "" and cache.kept == []

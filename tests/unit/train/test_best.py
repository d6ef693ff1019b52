"""The best evaluation: what is better, and when a run no longer is."""

import math
from collections.abc import Iterator

import pytest

from motley.config.option import Metric
from motley.records.training import EpochRecord
from motley.train import best
from motley.train.best import BestEvaluation


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank."""
    monkeypatch.setattr(best, "all_gather_floats", lambda own: [own])
    monkeypatch.setattr(best, "all_gather_object", lambda own: [own])
    yield


def record(step: int, score: float) -> EpochRecord:
    return EpochRecord(step, 0, 9, 1.0, 0.0, {"loss": score})


def test_less_or_more_is_better_and_equal_is_not() -> None:
    less, more = BestEvaluation(Metric("loss", "min"), 2), BestEvaluation(Metric("loss", "max"))
    gains = []
    for step, score in enumerate([2.0, 1.0, 1.0, 3.0]):
        gains.append((less.add(record(step, score)), more.add(record(step, score))))
        for each, gain in zip((less, more), gains[-1], strict=True):
            if gain:
                each.mark_saved()
    assert gains == [(True, True), (True, False), (False, False), (False, True)]
    assert less.step == 1 and less.stops and less.since == 2
    assert more.step == 3 and not more.stops and more.saved == 3.0


def test_nan_is_never_the_best_and_counts_as_no_gain() -> None:
    here = BestEvaluation(Metric("loss", "min"), 3)
    assert not here.add(record(1, math.nan)) and here.step is None and not here.stops
    assert "no evaluation had a value of loss" in here.describe()
    assert here.add(record(2, 5.0))
    here.mark_saved()
    assert not here.add(record(3, math.nan)) and here.step == 2 and here.since == 1
    assert not here.add(record(3, 6.0)) and here.since == 1, "the same step, evaluated again"


def test_it_is_restored_from_records_and_the_checkpoints_that_are_there() -> None:
    scores = {2: 3.0, 4: 1.0, 6: 2.0, 8: None, 10: 2.5}  # null: not finite
    records = [{"step": step, "loss": score} for step, score in scores.items()]
    here = BestEvaluation.restore(Metric("loss", "min"), 3, records, [6, 10])
    assert (here.step, here.since, here.saved_step) == (4, 3, 6) and here.stops
    assert here.add(record(12, 1.5)), "better than those whose checkpoints are there"

"""Progress is in samples: epochs and schedule are as asked, also where the batch changes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from motley.engines.schedule import explain_early_end, get_rate, make_schedule
from motley.plan.length import Length, Ramp, TrainState
from motley.train.command_line import read_config, training_parser


def walk(length: Length, start: TrainState, until: int | None = None) -> list[TrainState]:
    """The positions before each step, as the loop takes them, and the last one."""
    here, seen = start, []
    while not length.ended(here) and (until is None or here.step < until):
        seen.append(here)
        here = length.after(
            here, min(length.full_batch(here), length.epoch_samples - here.consumed)
        )
    return [*seen, here]


EPOCHS, SAMPLES, BATCH = st.integers(1, 5), st.integers(1, 60), st.integers(1, 70)
RAMP = st.builds(
    lambda first, by, times, over: Ramp(first, first + by * times, by, over),
    st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.integers(0, 200),
)  # fmt: skip


@given(EPOCHS, SAMPLES, BATCH, BATCH, st.integers(0, 300))
def test_a_run_ends_after_its_epochs_whatever_the_batch(
    epochs: int, samples: int, first: int, then: int, change: int
) -> None:
    before = walk(Length(epochs, samples, first), TrainState(), change)
    after = Length(epochs, samples, then)
    steps = walk(after, before[-1])
    assert steps[-1].epoch == epochs and steps[-1].consumed == 0
    assert after.last_step(before[-1]) == steps[-1].step
    progress = [after.updates(each) / after.steps_an_epoch for each in steps]
    assert progress == sorted(progress) and progress[-1] == epochs


@given(EPOCHS, SAMPLES, BATCH, st.sampled_from([None, 0, 1, 3, 7]), st.integers(1, 90) | st.none(),
       st.integers(0, 50))  # fmt: skip
def test_checkpoints_are_counted_as_they_are_made(
    epochs: int, samples: int, batch: int, every: int | None, most: int | None, start: int
) -> None:
    length = Length(epochs, samples, batch, most, every)
    here = walk(Length(epochs, samples, batch), TrainState(), start)[-1]
    made = [each for each in walk(length, here)[1:] if length.saves(each)]
    assert length.saves_left(here) == len(made)
    if every is None and most is None:  # one an epoch
        assert all(each.consumed == 0 for each in made)


@given(EPOCHS, SAMPLES, RAMP, st.sampled_from([None, 0, 1, 3, 7]), st.integers(1, 90) | st.none(),
       st.integers(0, 50))  # fmt: skip
def test_steps_and_checkpoints_of_a_batch_that_grows_are_counted_as_they_are_made(
    epochs: int, samples: int, ramp: Ramp, every: int | None, most: int | None, start: int
) -> None:
    length = Length(epochs, samples, ramp.most, most, every, ramp=ramp)
    here = walk(Length(epochs, samples, ramp.most, ramp=ramp), TrainState(), start)[-1]
    seen = walk(length, here)
    assert length.last_step(here) == seen[-1].step
    assert length.saves_left(here) == sum(length.saves(each) for each in seen[1:])
    progress = [length.updates(each) for each in seen]
    assert progress == sorted(progress)


@given(EPOCHS, SAMPLES, BATCH, st.sampled_from([None, 1, 3, 7]), st.integers(1, 90) | st.none(),
       st.integers(0, 50))  # fmt: skip
def test_evaluations_are_due_every_few_steps_or_each_epoch_and_at_the_end(
    epochs: int, samples: int, batch: int, every: int | None, most: int | None, start: int
) -> None:
    length = Length(epochs, samples, batch, most, eval_every=every, eval_at_start=True)
    here = walk(Length(epochs, samples, batch), TrainState(), start)[-1]
    seen = walk(length, here)[1:]
    due = [each for each in seen if length.evaluates(each)]
    assert len(due) <= length.evaluations_left(here) and (not seen or seen[-1] in due)
    for each in seen[:-1]:
        assert length.evaluates(each) == (each.step % every == 0 if every else each.consumed == 0)
    assert length.evaluates(TrainState())
    by_clock = Length(epochs, samples, batch, most, eval_by_clock=True)
    assert [each for each in seen if by_clock.evaluates(each)] == seen[-1:]


def test_by_the_clock_the_last_step_alone_is_known() -> None:
    length = Length(2, 60, 7, by_clock=True)
    *before, last = walk(length, TrainState())
    assert length.saves(last) and not any(length.saves(each) for each in before)
    assert length.saves_left(TrainState()) == last.step


@given(EPOCHS, SAMPLES, BATCH, st.floats(0, 4))
def test_the_rate_of_an_unchanged_batch_is_that_of_its_step_to_the_bit(
    epochs: int, samples: int, batch: int, warmup: float
) -> None:
    config = read_config(training_parser(""), ["--epochs", str(epochs),
                                               "--warmup-epochs", str(warmup)])  # fmt: skip
    length = Length(epochs, samples, batch)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=config.lr)
    schedule = make_schedule(optimizer, config, length)
    rates = []
    for updates in (lambda each: each.step, length.updates):
        rates.append([])
        for each in walk(length, TrainState())[:-1]:
            schedule.step_update(updates(each))
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(rates[0]) == epochs * math.ceil(samples / batch)


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["--sched", "step", "--decay-epochs", "2"], [5e-4, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5]),
        (["--sched", "multistep", "--decay-milestones", "3,5", "--decay-rate", "0.5"],
         [5e-4, 1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]),
        (["--sched", "poly", "--min-lr", "0"], [5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4]),
    ],
)  # fmt: skip
def test_schedules_are_timms_and_of_steps(words: list[str], rates: list[float]) -> None:
    config = read_config(training_parser(""), [*words, "--epochs", "6", "--warmup-epochs", "1"])
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=config.lr)
    schedule = make_schedule(optimizer, config, Length(6, 1, 1))
    found = []
    for step in range(6):
        schedule.step_update(step)
        found.append(get_rate(optimizer))
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("ramp", [None, Ramp(4, 12, 4, 60)])
@pytest.mark.parametrize(("words", "falls"), [("", True), ("--epochs 30", False)])
def test_the_rate_falls_until_the_run_ends_unless_epochs_are_typed(
    ramp: Ramp | None, words: str, falls: bool
) -> None:
    config = read_config(training_parser(""), [*words.split(), "--max-steps", "40"])
    length = Length(config.epochs, 100, 12, 40, ramp=ramp)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=config.lr)
    schedule, rates = make_schedule(optimizer, config, length), []
    for each in walk(length, TrainState())[:-1]:
        schedule.step_update(length.updates(each))
        rates.append(get_rate(optimizer))
    assert len(rates) == 40 and max(rates) > 0.9 * config.lr
    assert (rates[-1] < 0.05 * config.lr) == falls
    said = explain_early_end(config, length, TrainState())
    assert (said == "") == falls and ("without --epochs, the rate falls" in said) != falls
    continued = replace(config, continued_names=config.typed_names & {"epochs"})
    said = explain_early_end(continued, length, TrainState(step=1))
    assert ("--epochs 30 comes from the checkpoint, and --epochs N changes it" in said) != falls
    few = Length(30, 12, 12, 40)  # a step an epoch
    said = explain_early_end(config, few, TrainState())
    assert (
        "the 30 epochs of the default end after step 30, before --max-steps 40" in said
    ) == falls

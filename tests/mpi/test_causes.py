"""Five causes of slow steps: the verdict names each, and tells its time."""

import statistics
from dataclasses import replace

import pytest
from jobs import Jobs, Trained
from project import ROOT

from motley.live.verdict import run_verdict
from motley.records.costs import Training, lead, read_training
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

DRIVER = "tests/support/drivers/slowed.py"
PHASE, SLOW_S = 9, 0.2  # of the driver
# By cause, in the driver's order: the part of the records, and the verdict's words.
CAUSES = {
    "input": ("t_data", "input"), "optimizer": ("t_opt", "the optimizer"),
    "host": ("t_host", "the host's Python"), "wire": ("t_comm", "the wire"),
    "rank": ("t_wait", "waiting for "),
}  # fmt: skip


@pytest.fixture(scope="module")
def slowed(module_jobs: Jobs) -> Training:
    words = ("--batch-size", 16, "--shares", "1,1", "--max-steps", PHASE * (len(CAUSES) + 1),
             "--epochs", 9, "--eval-samples", 10)  # fmt: skip
    run: Trained = module_jobs.train(2, DRIVER, "slowed", *words)
    return read_training(RunFolder(run.folder))


def phase(training: Training, number: int) -> Training:
    """Return the records of one phase, without its first and last step."""
    first, last = number * PHASE + 1, (number + 1) * PHASE - 1
    steps = {rank: [line for line in lines if first <= line["step"] < last]
             for rank, lines in training.steps.items()}  # fmt: skip
    return replace(training, steps=steps, lead=lead(steps))


@pytest.mark.parametrize("cause", CAUSES)
def test_the_verdict_names_the_cause_and_its_milliseconds(slowed: Training, cause: str) -> None:
    number, (part, words) = list(CAUSES).index(cause) + 1, CAUSES[cause]
    usual, slow = phase(slowed, 0), phase(slowed, number)
    verdict = run_verdict(slow, co2_per_kwh=None)
    named, share = next(iter(verdict.lost.items()))
    assert named.startswith(words), verdict.lost
    assert cause != "rank" or named.endswith("(rank 1)")

    def seconds(training: Training) -> float:
        return statistics.median(line[part] for line in training.steps[0])

    assert seconds(slow) - seconds(usual) == pytest.approx(SLOW_S, rel=0.1)
    assert verdict.step_s
    ranks_that_lose = 0.5 if cause == "rank" else 1.0  # the verdict tells a mean over ranks
    before = run_verdict(usual, co2_per_kwh=None)
    added = share * verdict.step_s - before.lost.get(named, 0.0) * (before.step_s or 0.0)
    assert added == pytest.approx(ranks_that_lose * SLOW_S, rel=0.1)


def test_the_driver_and_the_test_agree() -> None:
    text = (ROOT / DRIVER).read_text()
    assert f"PHASE, SLOW_S, COMPUTE_S = {PHASE}, {SLOW_S}, " in text
    assert f"CAUSES = {tuple(CAUSES)!r}".replace("'", '"') in text

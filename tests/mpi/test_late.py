"""A step whose outcome is read after the next one's backward pass is the same step."""

import pytest
from jobs import Jobs, Trained

pytestmark = pytest.mark.mpi

LATE, FAILING = "tests/support/drivers/late.py", "tests/support/drivers/failing.py"
WORDS = ("--batch-size", 96, "--epochs", 2, "--shares", "3,2,1", "--eval-samples", 60,
         "--save-every", 11, "--clip-grad", 0.5)  # fmt: skip
READ_LATE = 30 - 2 - 2  # steps; not before a checkpoint, nor an evaluation


@pytest.fixture(scope="module")
def at_once(module_jobs: Jobs) -> Trained:
    return module_jobs.train(3, LATE, "at once", "--at-once", *WORDS)


def test_records_and_evaluations_are_the_same(module_jobs: Jobs, at_once: Trained) -> None:
    late = module_jobs.train(3, LATE, "late", *WORDS)
    for rank in range(3):
        for one, other in zip(late.steps(rank), at_once.steps(rank), strict=True):
            for name in ("step", "epoch", "loss", "lr", "grad_norm", "n_local", "n_global"):
                assert one[name] == other[name], (rank, one["step"], name)
    assert late.run["result"]["loss"] == at_once.run["result"]["loss"]
    assert f"read late: {READ_LATE}" in late.done.output
    assert "read late: 0" in at_once.done.output
    parts = [sum(value for name, value in step.items() if name.startswith("t_"))
             for step in late.steps()]  # fmt: skip
    whole = [step["n_global"] / step["samples_per_s"] for step in late.steps()]
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("lost", [2, 0], ids=["the last", "rank 0"])
def test_a_step_that_nobody_has_read_is_not_lost(
    module_jobs: Jobs, at_once: Trained, lost: int
) -> None:
    name, step = f"lost {lost}", 7
    place = ("--logs", module_jobs.logs, "--run", name)
    failing = ("--late", "--fail", "killed", "--step", step, "--on", lost)
    done = module_jobs.fork(3, FAILING, *failing, *place, *WORDS)
    assert done.code != 0
    assert f"saved as of step {step}" in done.output
    resumed = module_jobs.train(3, LATE, name, "--resume", "auto", *WORDS)
    losses = {each["step"]: each["loss"] for each in resumed.steps()}
    expected = {each["step"]: each["loss"] for each in at_once.steps()}
    assert {n: losses[n] for n in range(step, 30)} == pytest.approx(
        {n: expected[n] for n in range(step, 30)}, rel=2e-6
    )

"""A run goes on with another batch: epochs and schedule are as asked."""

import math

import pytest
from jobs import Jobs
from project import DDP

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("batch", [32, 160])
def test_a_run_goes_on_with_another_batch(jobs: Jobs, batch: int) -> None:
    words = ("--data-fraction", 0.25, "--epochs", 4, "--precision", "fp32", "--shares", "equal")
    jobs.train(1, DDP, "r", *words, "--batch-size", 96, "--max-steps", 8)  # two epochs of 359
    straight = jobs.train(1, DDP, "s", *words, "--batch-size", batch)
    run = jobs.train(1, DDP, "r", *words, "--batch-size", batch, "--resume", "auto")
    steps = run.steps()
    for epoch in range(4):
        assert sum(step["n_global"] for step in steps if step["epoch"] == epoch) == 359
    assert [step["lr"] for step in steps if step["epoch"] >= 2] == [
        step["lr"] for step in straight.steps() if step["epoch"] >= 2
    ]
    saved = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    each = math.ceil(359 / batch)  # one an epoch, the last two kept
    assert saved == [f"step_{8 + each:08d}", f"step_{8 + 2 * each:08d}"]

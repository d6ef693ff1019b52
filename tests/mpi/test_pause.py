"""A run that is asked to ends before a step that all ranks agree on, and goes on to the bit."""

import json
import re

import pytest
from jobs import Jobs
from project import DDP

pytestmark = pytest.mark.mpi

WORDS = ("--batch-size", 96, "--epochs", 2, "--precision", "fp32", "--shares", "3,2,1",
         "--eval-samples", 60, "--seed", 4)  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize(
    "more",
    [("--model-ema",), ("--strategy", "fsdp"), ("--wire", "powersgd:2")],
    ids=["DDP", "FSDP", "error memory of each rank"],
)
def test_it_goes_on_to_the_bit(jobs: Jobs, more: tuple[str, ...]) -> None:
    unbroken = jobs.train(3, DDP, "unbroken", *WORDS, *more)
    place = ("--logs", jobs.logs, "--run", "paused")
    done = jobs.fork(3, "tests/support/drivers/pausing.py", *place, *WORDS, *more)
    assert done.code == 75, done.output  # try again later
    said = re.search(r"motley: saved as of step (\d+)\n", done.output)
    assert said, done.output
    step = int(said[1])
    assert f"motley: paused as asked (SIGUSR2) after step {step}; continue with" in done.output
    folder = jobs.logs / "paused"
    content = json.loads((folder / "run.json").read_text())
    assert (content["status"], content["failure"]["kind"]) == ("stopped", "paused")
    assert content["last_step"] == 30
    for rank in range(3):
        assert len((folder / f"steps.rank{rank}.jsonl").read_text().splitlines()) == step
    run = jobs.train(3, DDP, "paused", *WORDS, *more, "--resume", "auto")
    assert run.losses == unbroken.losses
    assert run.epochs[-1]["loss"] == unbroken.epochs[-1]["loss"]

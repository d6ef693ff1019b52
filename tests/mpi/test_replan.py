"""A rank becomes slower in mid-run: the others take over, and the model stays the same."""

import re

import pytest
from jobs import Jobs
from project import DDP

pytestmark = pytest.mark.mpi


def test_shares_follow_the_speed_and_the_losses_stay(jobs: Jobs) -> None:
    options = ("--precision", "fp32", "--batch-size", 64, "--max-steps", 90)
    one = jobs.train(1, DDP, "one", *options)
    run = jobs.train(2, "tests/support/drivers/slowing.py", "two", *options)
    assert run.losses == pytest.approx(one.losses, rel=2e-5)
    replans = [event for event in run.events if event["event"] == "replan"]
    slower = [event for event in replans if 30 <= event["step"] < 60]
    faster = [event for event in replans if event["step"] >= 60]
    assert 1 <= len(slower) <= 2 and 1 <= len(faster) <= 2, replans
    assert slower[-1]["counts"][0] < 20 and slower[-1]["step"] <= 50
    assert 27 <= faster[-1]["counts"][0] <= 37
    assert all(step["n_global"] == sum(run.steps(r)[k]["n_local"] for r in range(2))
               for k, step in enumerate(run.steps()))  # fmt: skip
    # The slow rank evaluates as few of the 360 held-out images as it takes of a batch.
    evaluated = re.findall(r"evaluated (\d+) after step (\d+)", run.done.output)
    images = sum(int(count) for count, step in evaluated if step == "46")
    assert images == pytest.approx(360 * slower[-1]["counts"][0] / 64, abs=1)


def test_so_they_do_while_the_batch_grows(jobs: Jobs) -> None:
    options = ("--precision", "fp32", "--batch-size", "32:64:8/2900", "--max-steps", 56)
    one = jobs.train(1, DDP, "one", *options)
    run = jobs.train(2, "tests/support/drivers/slowing.py", "two", *options)
    assert run.losses == pytest.approx(one.losses, rel=2e-5)
    replans = [event for event in run.events if event["event"] == "replan"]
    assert 1 <= len(replans) <= 2 and 30 <= replans[-1]["step"] <= 50, replans
    assert sum(replans[-1]["counts"]) == 64 and replans[-1]["counts"][0] < 20
    sizes = [step["n_global"] for step in run.steps()]
    assert sizes == [step["n_global"] for step in one.steps()] and sizes[50] < 64
    assert run.steps()[-1]["n_local"] < 20

"""What each wire does to a run."""

import re

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi


WIRES = {
    "bf16": (3, DDP, "--wire", "bf16"),
    "fp16": (3, DDP, "--wire", "fp16"),
    "fp16 through DeepSpeed": (3, ZERO, "--wire", "fp16", "--stage", 1),
}


@pytest.mark.turns
@pytest.mark.parametrize("name", WIRES)
def test_a_rounded_wire_gives_the_same_losses_but_for_rounding(
    module_jobs: Jobs, name: str
) -> None:
    steps = ("--max-steps", 20, "--precision", "fp32")
    alone = module_jobs.logs / "alone"
    if not alone.exists():
        module_jobs.train(1, DDP, "alone", *steps)
    ranks, script, *options = WIRES[name]
    run = module_jobs.train(ranks, script, name, *steps, *options, "--shares", "5,3,1")
    losses = Trained(alone, run.done).losses
    assert run.losses == pytest.approx(losses, rel=1e-4) and run.losses != losses
    assert run.run["plan"]["wire"] == options[1]
    kinds = [event["event"] for event in run.events]
    assert "overflow" not in kinds and ("loss_scale" in kinds) == ("fp16" in name)


def test_a_wire_that_overflows_skips_the_step_for_all(jobs: Jobs) -> None:
    run = jobs.train(
        2, DDP, "high", "--wire", "fp16", "--loss-scale", "2^22", "--max-steps", 10,
        "--precision", "fp32", "--shares", "3,1",
    )  # fmt: skip
    skipped = [step["overflow"] for step in run.steps()]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert not [event for event in run.events if event["event"] == "drift"]


def test_powersgd_remembers_through_skipped_steps_scales_and_resumes(jobs: Jobs) -> None:
    done = jobs.fork(3, "tests/support/drivers/power_sgd.py")
    assert done.code == 0, done.output


def test_local_steps_are_averaged_by_samples_one_meeting_later(jobs: Jobs) -> None:
    done = jobs.fork(3, "tests/support/drivers/local_steps.py")
    assert done.code == 0, done.output
    worst = [float(value) for value in re.findall(r"worst (\S+)", done.output)]
    assert len(worst) == 3 and max(worst) < 1e-5  # of how far training went


def test_local_steps_learn_and_all_ranks_end_alike(jobs: Jobs) -> None:
    run = jobs.train(3, DDP, "local", "--wire", "local:3", "--shares", "3,0,1", "--epochs", 6)
    told = [step["loss"] for step in run.steps(2)]
    assert [loss is not None for loss in told[:12]] == [False] * 5 + ([True] + [False] * 2) * 2 + [
        True
    ]
    assert run.losses == told
    assert run.run["result"]["top1"] > 0.8
    assert not [event for event in run.events if event["event"] == "drift"]


def test_local_steps_that_meet_at_ends_of_epochs_alone_tell_their_loss(jobs: Jobs) -> None:
    run = jobs.train(2, DDP, "long", "--wire", "local:50", "--epochs", 3, "--shares", "2,1")
    known = [step["step"] for step in run.steps() if step["loss"] is not None]
    assert known == [12, 24]  # after epochs of 12 steps
    assert run.losses[24] < run.losses[12] < 2.4

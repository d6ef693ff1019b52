"""Ranks of different precision in one job: one loss scale, one set of parameters."""

import pytest
from jobs import Jobs
from project import DDP, ZERO

pytestmark = pytest.mark.mpi


@pytest.mark.turns
@pytest.mark.parametrize(
    ("script", "options"),
    # Putting the partitions of stage 1 together takes two seconds.
    [(DDP, ()), (ZERO, ("--stage", 0)), (ZERO, ("--stage", 1, "--save-every", 4))],
)
def test_an_overflow_on_the_fp16_rank_is_skipped_by_all_together(
    jobs: Jobs, script: str, options: tuple[object, ...]
) -> None:
    run = jobs.train(
        3, script, "mixed", "--precision", "fp16,bf16,fp32", "--shares", "1,2,2", "--loss-scale",
        "2^24", "--max-steps", 24, "--save-every", 1, "--clip-grad", 1.0, *options,
    )  # fmt: skip
    ranks = [run.steps(rank) for rank in range(3)]
    overflows = [[step["overflow"] for step in steps] for steps in ranks]
    assert overflows[0] == overflows[1] == overflows[2]
    assert 3 <= sum(overflows[0]) <= 15, "2^24 is far too high for fp16, and the scale sinks"
    scales = [[step["loss_scale"] for step in steps] for steps in ranks]
    assert scales[0] == scales[1] == scales[2]
    assert scales[0][0] == 2.0**24 and scales[0][-1] < 2.0**22
    # Each checkpoint compares the hash of the parameters of all ranks.
    assert not [event for event in run.events if event["event"] == "drift"]
    assert len([e for e in run.events if e["event"] == "overflow"]) == sum(overflows[0])
    # It trains: the loss falls, and steps that overflowed changed nothing.
    assert run.losses[-1] < 0.9 * run.losses[0]
    assert [step["grad_norm"] for step in ranks[0] if step["overflow"]] == [None] * sum(
        overflows[0]
    )


@pytest.mark.turns
@pytest.mark.parametrize("script", [DDP, ZERO])
def test_the_scale_is_found_before_step_1(jobs: Jobs, script: str) -> None:
    run = jobs.train(
        3, script, "auto", "--precision", "fp16,bf16,fp32", "--shares", "1,2,2", "--max-steps", 30
    )
    scales = [step["loss_scale"] for step in run.steps()]
    assert not any(step["overflow"] for step in run.steps())
    (found,) = [event for event in run.events if event["event"] == "loss_scale"]
    # 2^24 overflows (see above); far below 2^10 small gradients would vanish in fp16.
    assert found["value"] == scales[0] and 2.0**10 <= scales[0] <= 2.0**22


@pytest.mark.parametrize(
    "first",
    [("--batch-size", "2:8192:90/100K"), ("--batch-size", 8192, "--data-fraction", 0.0014)],
    ids=["a ramp", "two samples"],
)
def test_the_scale_fits_the_batches_that_come_first(jobs: Jobs, first: tuple[object, ...]) -> None:
    run = jobs.train(1, DDP, "first", "--precision", "fp16", "--shares", 1, "--max-steps", 6,
                     *first)  # fmt: skip
    steps = run.steps()
    assert [step["n_global"] for step in steps] == [2] * 6
    assert not any(step["overflow"] for step in steps)

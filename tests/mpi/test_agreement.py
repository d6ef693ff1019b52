"""What all ranks hold alike is compared and put right once: by the majority, or the checkpoint."""

import pytest
from jobs import Jobs, Trained
from project import DDP

pytestmark = pytest.mark.mpi

FLIPPED = "tests/support/drivers/flipped.py"
WORDS = ("--precision", "fp32", "--shares", "equal", "--max-steps", 12, "--save-every", 4)


@pytest.fixture(scope="module")
def straight(module_jobs: Jobs) -> Trained:
    """Nothing is changed."""
    return module_jobs.train(3, DDP, "straight", *WORDS)


def drifts(run: Trained) -> list[tuple[int, list[int]]]:
    """Step and ranks of each."""
    return [(event["step"], event["ranks"]) for event in run.events if event["event"] == "drift"]


@pytest.mark.turns
@pytest.mark.parametrize("flip", ["1:moment:4", "2:step:8", "0:parameter:4", "0:moment:8"])
def test_the_majority_is_taken_once(straight: Trained, jobs: Jobs, flip: str) -> None:
    run = jobs.train(3, FLIPPED, "flipped", *WORDS, "--flip", flip)
    assert drifts(run) == [(int(flip[-1]), [int(flip[0])])]
    assert run.losses == straight.losses
    assert run.run["result"]["loss"] == straight.run["result"]["loss"]


def test_without_a_majority_all_go_back_to_the_checkpoint(jobs: Jobs) -> None:
    for wire in ("exact", "local:4"):
        straight = jobs.train(2, DDP, f"straight {wire}", *WORDS, "--wire", wire)
        run = jobs.train(2, FLIPPED, wire, *WORDS, "--wire", wire, "--flip", "0:parameter:8")
        assert drifts(run) == [(8, [1])]
        assert "all ranks go back to the last checkpoint" in run.done.output
        assert "step_00000004 at step 4" in run.done.output
        assert [step["step"] for step in run.steps(1)] == list(range(12))
        known = [(a, b) for a, b in zip(run.losses, straight.losses, strict=True) if a and b]
        assert known and all(a == b for a, b in known)
        assert run.run["result"]["loss"] == straight.run["result"]["loss"]


def test_without_either_the_run_ends(jobs: Jobs) -> None:
    done = jobs.fork(2, FLIPPED, *WORDS, "--flip", "1:moment:4", "--logs", jobs.logs, "--run", "r")
    assert done.code != 0
    assert "no checkpoint to go back to" in done.output and "--hosts NAME" in done.output
    assert (
        "differ from those of rank 0 on" in done.output
        and ".exp_avg_sq after step 4" in done.output
    )
    assert "gives the same numbers on all ranks" in done.output
    assert "faulty" not in done.output  # nothing shows that
    assert "Traceback" not in done.output


def test_unlike_devices_that_round_differently_go_back_once(jobs: Jobs) -> None:
    run = jobs.train(2, FLIPPED, "unlike", *WORDS, "--flip", "1:parameter:8", "--unlike")
    assert [step for step, _ in drifts(run)] == [8, 8, 12]
    assert run.done.output.count("all ranks go back to the last checkpoint") == 1
    assert run.done.output.count("since devices of different kinds may round differently") == 2
    assert [step["step"] for step in run.steps(1)] == list(range(12))

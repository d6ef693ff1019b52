"""A rank that dies takes no finished step with it: the others save what they hold."""

import time

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

from motley import records
from motley.live.follow import RunFollower
from motley.live.snapshot import take_snapshot
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

FAILING = "tests/support/drivers/failing.py"
WORDS = ("--batch-size", 96, "--epochs", 2, "--precision", "fp32", "--shares", "3,2,1",
         "--eval-samples", 60, "--model-ema", "--seed", 4)  # fmt: skip
STEP = 7  # of an epoch of 15, at whose end alone there would be a checkpoint


@pytest.fixture(scope="module")
def unbroken(module_jobs: Jobs) -> Trained:
    return module_jobs.train(3, DDP, "unbroken", *WORDS)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("lost", "then"),
    [(2, (DDP,)), (0, (DDP,)), (1, (ZERO, "--stage", 1, "--shares", "1,2"))],
    ids=["the last", "rank 0", "another engine goes on"],
)
def test_the_run_goes_on_from_the_last_finished_step(
    module_jobs: Jobs, unbroken: Trained, lost: int, then: tuple[object, ...]
) -> None:
    name = f"lost {lost}"
    place = ("--logs", module_jobs.logs, "--run", name)
    done = module_jobs.fork(
        3, FAILING, "--fail", "killed", "--step", STEP, "--on", lost, *place, *WORDS
    )
    assert done.code != 0
    assert f"motley: saved as of step {STEP}" in done.output, done.output
    folder = module_jobs.logs / name
    assert [path.name for path in folder.glob("checkpoints/step_*")] == [f"step_{STEP:08d}"]
    survivor = 1 if lost == 0 else 0
    assert len((folder / f"steps.rank{survivor}.jsonl").read_text().splitlines()) == STEP
    ranks = 2 if then[0] == ZERO else 3
    run = module_jobs.train(ranks, then[0], name, *WORDS, *then[1:], "--resume", "auto")  # type: ignore[arg-type]
    assert f"at step {STEP}" in run.done.output
    found = [step["loss"] for step in run.steps()]
    if ranks == 3:  # the same ranks: to the bit
        assert found == unbroken.losses
        assert run.run["result"]["ema_loss"] == unbroken.run["result"]["ema_loss"]
    else:
        assert found == pytest.approx(unbroken.losses, rel=2e-6)
    assert [step["step"] for step in run.steps()] == list(range(30))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ((2,), ()),
        ((1,), ()),
        ((0,), ()),
        ((2,), ("--wire", "bf16")),
        ((2,), ("--micro-batch", "40,20,9", "--hosts", "all", "--replan", "off")),
        ((1, 2), ()),
    ],
    ids=["the last", "one between", "rank 0", "another wire", "values for each", "two at once"],
)
def test_those_who_are_left_go_on_by_themselves(
    module_jobs: Jobs, unbroken: Trained, lost: tuple[int, ...], words: tuple[object, ...]
) -> None:
    name = f"without {lost} {len(words)} {time.monotonic_ns()}"  # it may be run again
    place = ("--logs", module_jobs.logs, "--run", name)
    fault = ("--survive", "--fail", "killed", "--step", STEP, "--on", ",".join(map(str, lost)))
    done = module_jobs.fork(3, FAILING, *fault, *place, *WORDS, *words)
    left = [rank for rank in range(3) if rank not in lost]
    assert done.code == -9 and f"{len(left)} of 3 ranks continue" in done.output, done.output
    run = Trained(module_jobs.logs / name, done)
    assert run.run["status"] == "finished"
    # A rank keeps its number of the launch, and so its file.
    assert [worker["rank"] for worker in run.run["ranks"]] == left
    assert [each["step"] for each in run.run["groups"]] == [0, STEP]
    for rank in range(3):
        taken = range(STEP if rank in lost else 30)
        assert [step["step"] for step in run.steps(rank)] == list(taken)
    assert None not in records.load(run.folder).steps["host"]
    followed = RunFollower(RunFolder(run.folder))
    followed.look(0.0, time.time())
    assert [row.rank for row in take_snapshot(followed, time.time()).rows] == left
    near = {"rel": 2e-6} if "--wire" not in words else {"rel": 1e-3}
    losses = [step["loss"] for step in run.steps(left[0])]
    assert losses == pytest.approx(unbroken.losses, **near)
    assert run.run["result"]["ema_loss"] == pytest.approx(
        unbroken.run["result"]["ema_loss"], **near
    )
    events = [event for event in run.events if event["event"] == "lost"]
    assert sorted(event["rank"] for event in events) == list(lost)
    assert {event["step"] for event in events} == {STEP}
    before, after = [step for step in run.steps(left[0]) if step["step"] in (STEP - 1, STEP)]
    assert after["time"] - before["time"] < 5
    assert sum(run.run["plan"]["counts"]) == after["n_global"] == 96
    # The rates and the duration are of the whole job.
    result = run.run["result"]
    counted = sum(step["n_global"] for step in run.steps(left[0]))
    assert result["samples_per_s"] * result["seconds"] == pytest.approx(counted, rel=1e-6)
    assert run.run["started"] < before["time"] < run.run["grouped"] < after["time"]


def test_half_of_an_optimizers_step_is_not_kept(module_jobs: Jobs, unbroken: Trained) -> None:
    name = f"stepping {time.monotonic_ns()}"
    place = ("--logs", module_jobs.logs, "--run", name)
    fault = ("--survive", "--fail", "stepping", "--step", STEP, "--on", 1)
    done = module_jobs.fork(3, FAILING, *fault, *place, *WORDS)
    assert done.code == -9 and "2 of 3 ranks continue" in done.output, done.output
    run = Trained(module_jobs.logs / name, done)
    assert run.losses == pytest.approx(unbroken.losses, rel=2e-6)
    assert [step["step"] for step in run.steps()] == list(range(30))


@pytest.mark.turns
@pytest.mark.parametrize("every", [2, 50], ids=["meets again soon", "meets at an epoch's end"])
def test_those_who_are_left_go_on_with_steps_of_their_own(
    module_jobs: Jobs, unbroken: Trained, every: int
) -> None:
    name = f"local {every}"
    place = ("--logs", module_jobs.logs, "--run", name)
    fault = ("--survive", "--fail", "killed", "--step", STEP, "--on", 2)
    done = module_jobs.fork(3, FAILING, *fault, *place, *WORDS, "--wire", f"local:{every}")
    assert done.code == -9 and "2 of 3 ranks continue" in done.output, done.output
    run = Trained(module_jobs.logs / name, done)
    assert run.run["status"] == "finished" and len(run.run["ranks"]) == 2
    assert [step["step"] for step in run.steps()] == list(range(30))
    assert not [event for event in run.events if event["event"] == "drift"]
    (said,) = [event for event in run.events if event["event"] == "resume"]
    assert "the mean of the surviving ranks' parameters" in said["text"]
    whole = unbroken.run["result"]["top1"]  # it learns nearly as well with steps of all ranks
    assert run.run["result"]["top1"] == pytest.approx(whole, abs=0.15)


def test_what_is_wrong_in_itself_is_not_saved(module_jobs: Jobs) -> None:
    place = ("--logs", module_jobs.logs, "--run", "wild")
    done = module_jobs.fork(2, DDP, *place, "--lr", 1e9, "--epochs", 3, "--warmup-epochs", 0)
    assert done.code == 2 and "not finite" in done.output
    assert "saved as of step" not in done.output

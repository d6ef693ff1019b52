"""The same model as one big machine: losses and gradients do not depend on who computes what."""

import re

import pytest
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO

pytestmark = pytest.mark.mpi

STEPS = ("--max-steps", 14, "--precision", "fp32", "--clip-grad", 1.0)  # an epoch is 12
RUNS = {
    "2 ranks": (2, DDP),
    "5 ranks, 5:4:3:2:1": (5, DDP, "--shares", "5,4,3,2,1"),
    "micro-batches": (3, DDP, "--shares", "5,4,3", "--micro-batch", "7,128,16", "--workers", 1),
    "an idle rank": (3, DDP, "--shares", "2,0,1"),
    "a loss scale": (2, DDP, "--shares", "3,1", "--loss-scale", "2^12"),
    "PowerSGD that has nothing to gain": (3, DDP, "--shares", "5,4,3", "--wire", "powersgd:64"),
    "local steps that meet after each": (3, DDP, "--shares", "5,4,3", "--wire", "local:1"),
    "a leaf": (4, DDP, "--shares", "5,4,3,1", "--wire", "exact/leaf3"),
    "a leaf, the first": (3, DDP, "--shares", "1,0,2", "--wire", "exact/leaf0"),
    "DeepSpeed 0": (5, ZERO, "--shares", "5,4,3,2,1", "--micro-batch", "10,7,128,3,4"),
    "DeepSpeed 0, an idle rank": (3, ZERO, "--shares", "2,0,1", "--loss-scale", "2^12"),
    "DeepSpeed 1": (3, ZERO, "--stage", 1, "--shares", "3,0,1", "--micro-batch", 20),
    "DeepSpeed 2": (3, ZERO, "--stage", 2, "--shares", "3,0,1", "--micro-batch", 20),
    "DeepSpeed 3": (2, ZERO, "--stage", 3, "--shares", "3,1", "--micro-batch", 40),
    "FSDP": (3, DDP, "--strategy", "fsdp", "--shares", "3,0,1", "--micro-batch", 40),
    "FSDP, recomputed": (2, DDP, "--strategy", "fsdp", "--grad-checkpointing", "mlp,blocks.0"),
    "plain attention": (2, DDP, "--shares", "2,1", "--attention", "plain"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "alone", *STEPS)


def get_run(jobs: Jobs, name: str) -> Trained:
    ranks, script, *options = RUNS[name]
    return jobs.train(ranks, script, name, *STEPS, *options)


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_the_first_14_losses_are_those_of_one_rank(
    module_jobs: Jobs, alone: Trained, name: str
) -> None:
    ranks = RUNS[name][0]
    run = get_run(module_jobs, name)
    assert len(run.losses) == 14
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    norms = [[step["grad_norm"] for step in each.steps()] for each in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for rank in range(ranks):  # every rank recorded the same global loss
        assert [step["loss"] for step in run.steps(rank)] == run.losses
    assert sum(run.steps(rank)[0]["n_local"] for rank in range(ranks)) == 128
    assert run.run["status"] == "finished"
    assert run.run["result"]["top1"] == pytest.approx(alone.run["result"]["top1"], abs=0.006)
    assert not [event for event in run.events if event["event"] == "drift"]


def test_so_are_those_of_small_images_that_each_device_enlarges(module_jobs: Jobs) -> None:
    large = (*STEPS[2:], "--img-size", 20, "--max-steps", 8, "--mixup", 0.5)
    alone = module_jobs.train(1, DDP, "enlarged, alone", *large)
    split = module_jobs.train(3, DDP, "enlarged", *large, "--shares", "5,4,3")
    assert len(alone.losses) == 8
    assert split.losses == pytest.approx(alone.losses, rel=2e-6)
    assert split.run["result"]["top1"] == pytest.approx(alone.run["result"]["top1"], abs=0.006)


def test_the_parts_of_a_step_sum_to_the_step(alone: Trained, module_jobs: Jobs) -> None:
    run = Trained(module_jobs.logs / (name := "5 ranks, 5:4:3:2:1"), alone.done)
    if not run.folder.exists():  # its turn is on another day
        run = get_run(module_jobs, name)
    for rank in range(5):
        for step in run.steps(rank):
            parts = sum(
                step[f"t_{part}"] for part in ("data", "compute", "wait", "comm", "opt", "host")
            )
            assert parts == pytest.approx(step["n_global"] / step["samples_per_s"], rel=1e-6)


TYPES = ROOT / "tests" / "support" / "many_types.py"
RESNET = "--model test_resnet --img-size 32 --bn-group 4"


@pytest.mark.parametrize(
    ("words", "bound"),
    [("ddp", 1e-12), ("zero", 1e-6), (f"ddp {RESNET}", 1e-12), (f"types --task {TYPES}", 20)],
)
def test_the_gradient_of_any_split_is_that_of_one_process(
    jobs: Jobs, words: str, bound: float
) -> None:
    done = jobs.fork(3, "tests/support/drivers/gradient.py", *words.split())
    assert done.code == 0, done.output
    worst = [float(value) for value in re.findall(r"worst (\S+)", done.output)]
    assert len(worst) == 3 and max(worst) < bound

"""Any task is exact: samples of unequal weight and cost, on any ranks, through any engine."""

import pytest
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO

pytestmark = pytest.mark.mpi

OUTLIER = ROOT / "tests" / "support" / "outlier.py"
STEPS = ("--max-steps", 20, "--precision", "fp32", "--clip-grad", 1.0, "--warmup-epochs", 0)
TEXT = ("--task", "text", "--paragraphs", "--depth", 2, "--width", 32, "--batch-size", 32,
        "--length", 48, "--eval-samples", 30)  # fmt: skip
IDLE = ("--shares", "5,0,3")
RUNS = {
    "DDP": (3, DDP, *IDLE),
    "micro-batches, recomputed": (3, DDP, *IDLE, "--micro-batch", 7, "--grad-checkpointing"),
    "a loss scale": (2, DDP, "--shares", "3,1", "--loss-scale", "2^12"),
    "FSDP": (3, DDP, *IDLE, "--strategy", "fsdp", "--micro-batch", 9),
    "DeepSpeed 0": (3, ZERO, *IDLE),
    "DeepSpeed 1": (3, ZERO, *IDLE, "--stage", 1, "--loss-scale", "2^12"),
    "DeepSpeed 2": (3, ZERO, *IDLE, "--stage", 2, "--micro-batch", 9),
    "DeepSpeed 3": (3, ZERO, *IDLE, "--stage", 3),
}


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "alone", *TEXT, *STEPS)


@pytest.mark.parametrize("name", RUNS)
def test_paragraphs_of_any_length_are_learnt_as_by_one_rank(
    module_jobs: Jobs, alone: Trained, name: str
) -> None:
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *TEXT, *STEPS, *options)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.losses[-1] < 0.95 * run.losses[0]
    # The first gradient; later ones part by more than losses do, since AdamW takes a whole step
    # even where the gradient of a rare token is next to nothing, and of either sign.
    first = [each.steps()[0]["grad_norm"] for each in (run, alone)]
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    weights = [[step["weight"] for step in each.steps()] for each in (run, alone)]
    assert weights[0] == weights[1] and len(set(weights[0])) > 10, "tokens differ from step to step"
    ends = [each.run["result"]["bits_per_byte"] for each in (run, alone)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


@pytest.mark.parametrize("options", [
    (DDP,), (DDP, "--strategy", "fsdp"), (ZERO, "--stage", 2), (ZERO, "--stage", 3),
], ids=["DDP", "FSDP", "DeepSpeed 2", "DeepSpeed 3"])  # fmt: skip
def test_a_rank_with_nothing_to_do_is_not_heard_whatever_it_computes(
    module_jobs: Jobs, options: tuple[object, ...]
) -> None:
    script, *rest = options
    words = ("--task", OUTLIER, "--data-fraction", 0.05, "--seed", 1, "--batch-size", 10,
             "--epochs", 2, "--eval-samples", 3, "--shares", "1,0")  # fmt: skip
    name = " ".join(map(str, rest)) or "ddp"
    run = module_jobs.train(2, script, f"outlier {name}", *words, *rest)
    assert not any(step["overflow"] for step in run.steps())
    assert run.losses[-1] < 0.9 * run.losses[0]


def test_a_task_of_ones_own_goes_on_elsewhere_through_the_other_engine(jobs: Jobs) -> None:
    task = ("--task", "examples/my_task.py", "--digits", 3, "--batch-size", 200, "--epochs", 1)
    whole = jobs.train(1, DDP, "whole", *task)
    first = jobs.train(2, DDP, "broken", *task, "--shares", "2,1", "--max-steps", 41)
    assert first.run["task"]["title"] == "task Sums" and first.run["config"]["digits"] == 3
    rest = ("--resume", "auto", "--stage", 1, "--shares", "1,0,3")
    then = jobs.train(3, ZERO, "broken", *task, *rest)
    assert then.losses == pytest.approx(whole.losses, rel=2e-6)
    assert then.losses[-1] < 0.9 * then.losses[0]

"""A batch that grows is exact: whoever computes it, and wherever the run is stopped in between."""

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

WORDS = ("--batch-size", "16:64:8/600", "--epochs", 1, "--precision", "fp32", "--seed", 3,
         "--eval-samples", 60, "--ramp-lr", "sqrt")  # fmt: skip


@pytest.fixture(scope="module")
def whole(module_jobs: Jobs) -> Trained:
    return module_jobs.train(3, DDP, "whole", *WORDS, "--shares", "3,1,2")


def test_it_grows_as_asked_and_the_rate_with_it(whole: Trained) -> None:
    steps = whole.steps()
    sizes = [step["n_global"] for step in steps]
    assert sizes[0] == 16 and sizes[-2] == 64 and sizes[:-1] == sorted(sizes[:-1])
    assert set(sizes[:-1]) == set(range(16, 65, 8))
    assert sum(sizes) == whole.run["result"]["epoch_samples"]
    used = 0
    for step in steps[:-1]:
        assert step["n_global"] == 16 + 8 * min(6, used * 6 // 600)
        used += step["n_global"]
    assert "a step is 64 samples = 32 + 11 + 21, " in whole.done.output
    assert "the batch grows from 16 to 64 samples, in steps of 8" in whole.done.output
    assert whole.run["last_step"] == len(steps)
    plain = [step["lr"] / (step["n_global"] / 64) ** 0.5 for step in steps[:-1]]
    assert plain == sorted(plain)  # the warm-up of before


@pytest.mark.turns
@pytest.mark.parametrize(
    ("size", "script", "more"),
    [
        (1, DDP, ()),
        (5, DDP, ("--shares", "1,4,2,2,1")),
        (2, DDP, ("--strategy", "fsdp", "--shares", "2,1")),
        (2, ZERO, ("--stage", 2, "--shares", "1,2")),
    ],
    ids=["one rank", "five ranks", "FSDP", "ZeRO 2"],
)
def test_whoever_computes_it(
    module_jobs: Jobs, whole: Trained, size: int, script: str, more: tuple[object, ...]
) -> None:
    name = f"{size}{script[:5]}{len(more)}"
    run = module_jobs.train(size, script, name, *WORDS, *more)
    assert run.losses == pytest.approx(whole.losses, rel=2e-6)


def test_a_resume_in_the_middle_is_exact_to_the_bit(module_jobs: Jobs, whole: Trained) -> None:
    words = (*WORDS, "--shares", "3,1,2", "--save-every", 4)
    module_jobs.train(3, DDP, "cut", *words, "--max-steps", 8)
    run = module_jobs.train(3, DDP, "cut", *words, "--resume", "auto")
    assert run.losses == whole.losses and "at step 8" in run.done.output


def test_groups_that_stay_together_fit_into_each_of_its_batches(module_jobs: Jobs) -> None:
    done = module_jobs.fork(
        2, DDP, "--logs", module_jobs.logs, "--run", "odd", "--batch-size", "16:64:3/600",
        "--mixup", 0.2,
    )  # fmt: skip
    assert done.code == 2 and "--batch-size 16:64:3/600: 19 is not a multiple of 2" in done.output

"""A model that no rank holds whole, in small: the same numbers on any ranks, by any engine."""

import hashlib

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

GPT = ("--task", "text", "--depth", 4, "--width", 64, "--length", 48, "--batch-size", 16,
       "--eval-samples", 30, "--warmup-epochs", 0, "--precision", "fp32",
       "--build", "blocks")  # fmt: skip
# Of a rate so small that no number changes.
STILL = ("--max-steps", 1, "--save-every", 1, "--lr", 1e-30)
RUNS = {
    "FSDP, a rank": (1, DDP, "--strategy", "fsdp"),
    "FSDP, as planned": (2, DDP, "--strategy", "fsdp", "--hosts", "all"),
    "FSDP, unequal": (3, DDP, "--strategy", "fsdp", "--shares", "2,0,1"),
    "FSDP, 5": (5, DDP, "--strategy", "fsdp", "--shares", "equal", "--grad-checkpointing",
                "--reshard-after-forward"),
    "DDP": (2, DDP, "--shares", "3,1"),
    "DeepSpeed 3": (2, ZERO, "--stage", 3, "--shares", "3,1"),
}  # fmt: skip


def parameters_of(run: Trained) -> str:
    (path,) = run.folder.glob("checkpoints/step_*/model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank of DDP."""
    return module_jobs.train(1, DDP, "alone", *GPT, *STILL)


@pytest.mark.parametrize("name", RUNS)
def test_any_ranks_draw_the_same_numbers(module_jobs: Jobs, alone: Trained, name: str) -> None:
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *GPT, *STILL, *options)
    assert parameters_of(run) == parameters_of(alone)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert len(run.run["result"]["memory_peak_mib"]) == ranks
    assert run.steps()[0]["grad_norm"] == pytest.approx(alone.steps()[0]["grad_norm"], rel=1e-5)


def test_a_model_that_cannot_fit_is_refused_before_anything_is_allocated(jobs: Jobs) -> None:
    wide = ("--task", "text", "--width", 24576, "--depth", 96, "--heads", 96)
    done = jobs.fork(2, DDP, *wide, "--strategy", "fsdp", "--logs", jobs.logs)
    assert done.code != 0 and done.seconds < 60
    assert "the model does not fit: 2 ranks on" in done.output, done.output
    assert "--reshard-after-forward, or a smaller model" in done.output
    assert not jobs.logs.exists()

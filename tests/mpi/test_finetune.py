"""Runs that begin with other weights, and train a part of the model."""

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

FIRST = ("--max-steps", 6, "--batch-size", 48, "--warmup-epochs", 0, "--lr", 3e-3)
HEAD = (*FIRST, "--freeze", "backbone", "--precision", "fp32")
UNEQUAL = ("--shares", "3,1")
ENGINES = {
    "DDP": (DDP,), "FSDP": (DDP, "--strategy", "fsdp"), "local": (DDP, "--wire", "local:1"),
    "DeepSpeed 0": (ZERO,), "DeepSpeed 1": (ZERO, "--stage", 1),
    "DeepSpeed 2": (ZERO, "--stage", 2), "DeepSpeed 3": (ZERO, "--stage", 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def before(module_jobs: Jobs) -> Trained:
    """Whose weights others begin with."""
    return module_jobs.train(1, DDP, "before", *FIRST)


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs, before: Trained) -> Trained:
    """One rank."""
    begin = ("--initial-checkpoint", before.folder, "--seed", 1)
    return module_jobs.train(1, DDP, "alone", *HEAD, *begin)


def test_a_run_begins_with_the_weights_of_another(before: Trained, alone: Trained) -> None:
    assert alone.losses[0] < before.losses[0] - 0.1
    assert f"begins with the weights of {before.folder}" in alone.done.output


@pytest.mark.turns
@pytest.mark.parametrize("name", ENGINES)
def test_a_frozen_backbone_is_exact_in_every_engine(
    module_jobs: Jobs, before: Trained, alone: Trained, name: str
) -> None:
    script, *rest = ENGINES[name]
    begin = ("--initial-checkpoint", before.folder, "--seed", 1)
    half = module_jobs.train(2, script, name, *HEAD, *begin, *rest, *UNEQUAL, "--max-steps", 3)
    assert half.losses == pytest.approx(alone.losses[:3], rel=2e-6)
    # Whole states: another engine goes on with it, on other ranks.
    other = (DDP,) if script == ZERO else (ZERO, "--stage", 1)
    if "--wire" in rest:
        return
    then = module_jobs.train(3, other[0], name, *HEAD, *begin, *other[1:], "--resume", "auto")
    assert then.losses == pytest.approx(alone.losses, rel=2e-6)

"""A ResNet is the same on any ranks: its batch norms see groups of the global order."""

import pytest
import torch
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO

from motley.checkpoint.read import load_checkpoint

pytestmark = pytest.mark.mpi

RESNET = ("--model", "test_resnet", "--img-size", 32, "--batch-size", 64, "--bn-group", 8,
          "--warmup-epochs", 0, "--precision", "fp32", "--max-steps", 2, "--lr", 1e-4,
          "--eval-samples", 40)  # fmt: skip
UNEQUAL = ("--shares", "5,0,3")
ENGINES = {
    "DDP": (DDP, "--micro-batch", 16), "recomputed": (DDP, "--grad-checkpointing", "layer2,layer3"),
    "FSDP": (DDP, "--strategy", "fsdp"), "DeepSpeed 0": (ZERO,),
    "DeepSpeed 1": (ZERO, "--stage", 1, "--loss-scale", "2^10"),
    "DeepSpeed 3": (ZERO, "--stage", 3),
}  # fmt: skip


def statistics(run: Trained, step: int = 2) -> dict[str, torch.Tensor]:
    tensors, _ = load_checkpoint(run.folder / "checkpoints" / f"step_{step:08d}")
    return {name: value for name, value in tensors.items() if "running_" in name or "num_b" in name}


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "alone", *RESNET)


@pytest.mark.turns
@pytest.mark.parametrize("name", ENGINES)
def test_gradient_and_statistics_are_those_of_one_rank(
    module_jobs: Jobs, alone: Trained, name: str
) -> None:
    script, *options = ENGINES[name]
    run = module_jobs.train(3, script, f"bn {name}", *RESNET, *UNEQUAL, *options)
    first = [each.steps()[0] for each in (run, alone)]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-6)
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-5)
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)  # ReLU is not smooth
    expected = statistics(alone)
    for key, value in statistics(run).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5, msg=key)
    assert expected["model.bn1.num_batches_tracked"] == 2
    assert run.run["result"]["loss"] == pytest.approx(alone.run["result"]["loss"], rel=1e-3)


def test_layers_that_stand_still_run_twice_or_get_tokens_are_those_of_one_rank(
    module_jobs: Jobs,
) -> None:
    words = ("--task", ROOT / "tests/support/odd_norms.py", "--batch-size", 32, "--max-steps", 6,
             "--precision", "fp32", "--lr", 1e-3, "--warmup-epochs", 0)  # fmt: skip
    alone = module_jobs.train(1, DDP, "odd alone", *words)
    split = module_jobs.train(2, DDP, "odd split", *words, "--shares", "5,3", "--micro-batch", 8)
    assert split.losses == pytest.approx(alone.losses, rel=2e-5)
    expected, found = statistics(alone, 6), statistics(split, 6)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=key)
    counts = [int(found[f"model.{name}.num_batches_tracked"])
              for name in ("still", "twice", "never", "tokens")]  # fmt: skip
    assert counts == [0, 12, 0, 6]


def test_a_planned_resnet_goes_on_on_other_ranks(module_jobs: Jobs, alone: Trained) -> None:
    half = module_jobs.train(2, DDP, "planned", *RESNET, "--max-steps", 1)
    assert all(count % 8 == 0 for count in half.run["plan"]["counts"])
    then = module_jobs.train(3, ZERO, "planned", *RESNET, "--stage", 1, "--resume", "auto")
    assert then.losses == pytest.approx(alone.losses, rel=1e-4)


def test_those_who_are_left_keep_what_their_batch_norms_have_seen(module_jobs: Jobs) -> None:
    words = (*RESNET, "--max-steps", 8, "--shares", "3,3,2")
    alone = module_jobs.train(1, DDP, "eight alone", *words[:-2])
    place = ("--logs", module_jobs.logs, "--run", "left")
    fault = ("--survive", "--fail", "killed", "--step", 6, "--on", 1)
    done = module_jobs.fork(3, "tests/support/drivers/failing.py", *fault, *place, *words)
    assert "2 of 3 ranks continue" in done.output, done.output
    run = Trained(module_jobs.logs / "left", done)
    expected, found = statistics(alone, 8), statistics(run, 8)
    for key, value in found.items():  # of what is lost, others' samples tell as much
        torch.testing.assert_close(value, expected[key], rtol=0.1, atol=0.02, msg=key)
    assert expected["model.bn1.num_batches_tracked"] == 8


def test_a_batch_of_broken_groups_is_refused_before_anything_is_trained(jobs: Jobs) -> None:
    done = jobs.fork(1, DDP, "--model", "test_resnet", "--batch-size", 100)
    assert done.code != 0
    assert done.output.rstrip().endswith(
        "--batch-size 100 is not a multiple of 32, and 32 samples share one batch norm "
        "(--bn-group); take 96 or 128, or --bn-group 25"
    )

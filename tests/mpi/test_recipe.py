"""The usual augmentation is the same whoever computes it, and a fine-tuning learns sooner."""

from pathlib import Path

import pytest
from hub_images import save_folder, write_shards
from jobs import Jobs
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

RECIPE = ("--recipe", "deit", "--drop-path", 0, "--color-jitter", 0.2, "--layer-decay", 0.8,
          "--precision", "fp32", "--batch-size", 90, "--max-steps", 17, "--clip-grad", 1.0,
          "--epochs", 1, "--warmup-epochs", 0.2, "--eval-samples", 60)  # fmt: skip


RUNS = {
    "DDP": (5, DDP, "--shares", "5,4,3,2,1", "--micro-batch", 8),
    "DeepSpeed 1": (3, ZERO, "--stage", 1, "--shares", "5,0,3"),
}


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_mixed_and_augmented_images_are_learnt_as_by_one_rank(module_jobs: Jobs, name: str) -> None:
    alone = module_jobs.train(1, DDP, f"{name} alone", *RECIPE)
    assert alone.run["config"]["mixup"] == 0.8 and alone.run["config"]["epochs"] == 1
    assert alone.steps()[-1]["n_global"] % 2, "the last batch is ragged, and odd"
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *RECIPE, *options)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.steps()[0]["grad_norm"] == pytest.approx(alone.steps()[0]["grad_norm"], rel=1e-6)


def test_several_images_of_a_sample_are_learnt_as_by_one_rank(module_jobs: Jobs) -> None:
    words = ("--model", "resnet10t", "--img-size", 32, "--bn-group", 8, "--aug-splits", 3, "--aa",
             "augmix-m5-w4-d2", "--jsd-loss", "--reprob", 0.5, "--resplit", "--batch-size", 48,
             "--max-steps", 4, "--precision", "fp32", "--eval-samples", 40)  # fmt: skip
    alone = module_jobs.train(1, DDP, "copies alone", *words)
    run = module_jobs.train(3, DDP, "copies", *words, "--shares", "3,1,2", "--micro-batch", 8)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.epochs[-1]["loss"] == pytest.approx(alone.epochs[-1]["loss"], rel=1e-5)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["hfds", "wds"])
def test_images_as_others_publish_them_are_learnt_as_by_one_rank(
    module_jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    if kind == "hfds":
        name = f"hfds/{save_folder(tmp_path / 'Saved', {'train': 48, 'validation': 12})}"
    else:
        name = f"wds/{write_shards(tmp_path / 'shards').name}"
    words = ("--dataset", name, "--data-dir", tmp_path, "--model", "vit_digits", "--batch-size", 16,
             "--epochs", 3, "--warmup-epochs", 0, "--lr", 3e-3, "--precision", "fp32")  # fmt: skip
    alone = module_jobs.train(1, DDP, f"{kind} alone", *words)
    assert len(alone.losses) == 9 and alone.epochs[-1]["top1"] == 1, alone.epochs
    unequal = ("--shares", "5,0,3", "--workers", 2)
    run = module_jobs.train(3, DDP, f"{kind} unequal", *words, *unequal)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.run["config"]["dataset"] == name and run.epochs[-1]["top1"] == 1


def test_who_begins_with_other_classes_learns_sooner(jobs: Jobs) -> None:
    first = ("--classes", "0,1,2,3,4", "--batch-size", 60, "--epochs", 5, "--warmup-epochs", 1)
    jobs.train(1, DDP, "first", *first)
    words = ("--classes", "9,8,7,6,5", "--batch-size", 24, "--epochs", 6, "--data-fraction", 0.1,
             "--warmup-epochs", 1, "--lr", 2e-3)  # fmt: skip
    scratch = jobs.train(1, DDP, "scratch", *words)
    tuned = jobs.train(1, DDP, "tuned", *words, "--initial-checkpoint", jobs.logs / "first")
    tops = [[epoch["top1"] for epoch in each.epochs] for each in (tuned, scratch)]
    assert sum(tops[0]) > sum(tops[1]), tops
    assert (
        "new random weights for head.bias, head.weight, because the checkpoint was trained on "
        "other classes" in tuned.done.output
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mixup", 0.8, "--batch-size", 33),
         "--batch-size 33 is not a multiple of 2, and 2 samples are mixed with one another "
         "(--mixup, --cutmix); take 32 or 34"),
        (("--aa", "rnad-m9"), "--aa rnad-m9: timm does not know this augmentation"),
        (("--recipe", "diet"), "--recipe diet is unknown (nearest: deit"),
        (("--classes", "0,17"), "--classes 0,17: name two or more of 0 to 9"),
        (("--model", "test_resnet", "--cutmix", 1, "--bn-group", 5, "--batch-size", 100),
         "--bn-group 5 is odd, and --mixup and --cutmix mix pairs"),
    ],
    ids=lambda words: str(words[0]) if isinstance(words, tuple) else "",
)  # fmt: skip
def test_what_cannot_be_is_said_first(
    module_jobs: Jobs, words: tuple[object, ...], said: str
) -> None:
    done = module_jobs.fork(1, DDP, "--logs", module_jobs.logs, *words)
    assert done.code != 0 and said in done.output.rstrip().splitlines()[-1], done.output

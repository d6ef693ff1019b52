"""Options of the optimization change what they say, and are the same on any ranks."""

import json

import pytest
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO

from motley.checkpoint.read import load_checkpoint

pytestmark = pytest.mark.mpi

STEPS = ("--max-steps", 8, "--batch-size", 64, "--precision", "fp32", "--eval-samples", 60)
OPTIONS = {
    "value": ("--clip-grad", 1e-3, "--clip-mode", "value", "--opt", "sgd", "--momentum", 0.8,
              "--opt-kwargs", "nesterov=False", "--lr", 1.0, "--warmup-steps", 3),
    "agc": ("--clip-grad", 0.01, "--clip-mode", "agc", "--opt", "sgd", "--lr", 0.5,
            "--weight-decay-end", 0.4, "--warmup-epochs", 0, "--lr-cycle-limit", 2),
    "betas": ("--opt-kwargs", "betas=0.9,0.95", "eps=1e-6", "--weight-decay-end", 0.4,
              "--warmup-steps", 2, "--min-lr", "10%", "--clip-grad", 1.0),
}  # fmt: skip
RUNS = {
    "value, DDP": (3, DDP, "--shares", "5,0,3"),
    "value, FSDP": (2, DDP, "--strategy", "fsdp", "--shares", "3,1"),
    "value, local": (2, DDP, "--wire", "local:1", "--shares", "3,0"),
    "agc, DDP": (3, DDP, "--shares", "5,0,3", "--micro-batch", 9),
    "agc, DeepSpeed 0": (2, ZERO, "--stage", 0, "--shares", "3,1"),
    "betas, FSDP": (2, DDP, "--strategy", "fsdp", "--shares", "3,1"),
    "betas, DeepSpeed 1": (2, ZERO, "--stage", 1, "--shares", "3,1"),
}


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_they_are_those_of_one_rank(module_jobs: Jobs, name: str) -> None:
    kind = name.partition(",")[0]
    folder = module_jobs.logs / kind
    words = (*STEPS, *OPTIONS[kind])
    if not folder.exists():
        module_jobs.train(1, DDP, kind, *words, "--shares", "equal")
    ranks, script, *options = RUNS[name]
    module_jobs.train(ranks, script, name, *words, *options, "--max-steps", 5)
    run = module_jobs.train(ranks, script, name, *STEPS[2:], *options, "--resume", "auto",
                            "--max-steps", 8)  # fmt: skip
    alone = Trained(folder, run.done)
    assert run.losses == pytest.approx(alone.losses, rel=5e-6)
    for each in ("lr", "grad_norm"):
        values = [[step[each] for step in trained.steps()] for trained in (run, alone)]
        assert values[0] == pytest.approx(values[1], rel=2e-5)
    assert not [event for event in run.events if event["event"] == "drift"]


def test_a_clipped_value_bounds_each_step(module_jobs: Jobs) -> None:
    words = ("--opt", "sgd", "--lr", 1.0, "--weight-decay", 0, "--momentum", 0, "--warmup-steps", 0,
             "--clip-grad", 1e-3, "--clip-mode", "value", "--save-every", 1)  # fmt: skip
    run = module_jobs.train(2, DDP, "bounded", *STEPS, *words, "--max-steps", 2)
    folders = [run.folder / "checkpoints" / f"step_0000000{step}" for step in (1, 2)]
    before, after = (load_checkpoint(folder, only=["model"])[0] for folder in folders)
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert 0.9e-3 < moved <= 1.001e-3


def test_a_task_brings_its_own(module_jobs: Jobs) -> None:
    words = ("--task", ROOT / "tests/support/own_training.py", "--max-steps", 8, "--batch-size", 32,
             "--lr", 0.02, "--eval-every", 4, "--keep-best", "skill:max")  # fmt: skip
    alone = module_jobs.train(1, DDP, "own, alone", *words)
    module_jobs.train(3, DDP, "own", *words, "--shares", "5,0,3", "--max-steps", 4)
    run = module_jobs.train(2, DDP, "own", *words, "--shares", "1,2", "--resume", "auto")
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    total = 30 * 7  # steps of 30 epochs
    assert [step["lr"] for step in run.steps()] == pytest.approx(
        [0.02 * (1 - step / total) for step in range(8)]
    )
    outputs = [[json.loads(line) for line in (each.folder / "outputs.jsonl").open()]
               for each in (run, alone)]  # fmt: skip
    assert len(outputs[1]) == 2
    for one, other in zip(*outputs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-3)
    sizes = [(each.folder / "confusion.csv").read_text() for each in (run, alone)]
    assert sizes[0] == sizes[1]

"""A run goes on elsewhere: on other ranks, at another ZeRO stage, through the other engine."""

import json
import re

import pytest
from jobs import Jobs, Trained
from project import DDP, ZERO

pytestmark = pytest.mark.mpi

# Where a run is started and where it goes on after 14 of 24 steps.
STARTS = {
    "DDP": (3, DDP),
    "PowerSGD": (3, DDP, "--wire", "powersgd:2", "--shares", "3,2,1"),
    "local steps": (3, DDP, "--wire", "local:4", "--shares", "3,2,1"),
    "ZeRO 1": (3, ZERO, "--stage", 1),
    "ZeRO 2": (2, ZERO, "--stage", 2),
    "FSDP": (3, DDP, "--strategy", "fsdp"),
}
WAYS = [
    ("ZeRO 1", (3, ZERO, "--stage", 1), 0.0),  # the same ranks: bit for bit
    ("ZeRO 2", (2, ZERO, "--stage", 2), 0.0),
    ("PowerSGD", (3, DDP, "--wire", "powersgd:2", "--shares", "3,2,1"), 0.0),
    ("PowerSGD", (2, DDP, "--wire", "powersgd:2", "--shares", "2,1"), 0.05),
    ("DDP", (3, DDP), 0.0),
    ("local steps", (3, DDP, "--wire", "local:4", "--shares", "3,2,1"), 0.0),
    ("local steps", (2, DDP, "--wire", "local:4", "--shares", "2,1"), 0.1),
    ("FSDP", (3, DDP, "--strategy", "fsdp"), 0.0),
    ("FSDP", (2, ZERO, "--stage", 3), 2e-6),
    ("ZeRO 1", (2, DDP, "--strategy", "fsdp"), 2e-6),
    ("DDP", (2, ZERO, "--stage", 2), 2e-6),
]


@pytest.mark.turns
@pytest.mark.parametrize(("start", "goes_on", "tolerance"), WAYS)
def test_a_resumed_run_continues_the_same_losses(
    module_jobs: Jobs, start: str, goes_on: tuple[object, ...], tolerance: float
) -> None:
    ranks, script, *options = STARTS[start]
    unbroken = module_jobs.logs / start
    if not unbroken.exists():
        module_jobs.train(ranks, script, start, *options, "--max-steps", 24, "--save-every", 14,
                          "--precision", "fp32", "--keep", 9)  # fmt: skip
    ranks, script, *options = goes_on
    name = f"{start} to {ranks} {script.partition('/')[0]} {options}"
    resumed = module_jobs.train(
        ranks, script, name.replace("/", " "), *options, "--max-steps", 24,
        "--save-every", 14, "--precision", "fp32",
        "--resume", unbroken / "checkpoints" / "step_00000014",
    )  # fmt: skip
    expected = Trained(unbroken, resumed.done).losses[14:]
    assert len(resumed.losses) == 10
    if start == "local steps":  # what was told at the checkpoint, the unbroken run says after it
        expected[0] = None
    known = [loss is not None for loss in expected]
    assert [loss is not None for loss in resumed.losses] == known
    assert any(known) and all(known) == (start != "local steps")
    found, expected = ([loss for loss in each if loss] for each in (resumed.losses, expected))
    assert found == pytest.approx(expected, rel=tolerance, abs=0.0)
    forgets = [event for event in resumed.events if "starts empty" in str(event)]
    assert bool(forgets) == (start == "PowerSGD" and tolerance > 0)


RECIPE = ("--lr", 3e-3, "--weight-decay", 0.2, "--seed", 5, "--batch-size", 96, "--epochs", 2,
          "--data-fraction", 0.4, "--no-augment", "--model-ema", "--clip-grad", 1.0)  # fmt: skip


def test_options_are_the_checkpoints_unless_they_are_typed(jobs: Jobs) -> None:
    words = (1, DDP, "--logs", jobs.logs, "--shares", "equal", "--precision", "fp32")
    whole = jobs.train(1, DDP, "whole", *RECIPE, "--shares", "equal", "--precision", "fp32")
    cut = jobs.train(1, DDP, "my cut", *RECIPE, "--shares", "equal", "--precision", "fp32",
                     "--max-steps", 5, "--resume", "auto")  # fmt: skip
    assert (
        f"{cut.folder} has no checkpoint, so --resume auto starts the run from the beginning"
        in cut.done.output
    )
    assert f"--logs {jobs.logs} --run 'my cut' --resume auto" in cut.done.output
    done = jobs.fork(*words, "--run", "my cut", "--resume", "auto")
    assert done.code == 0, done.output
    assert Trained(cut.folder, done).losses == whole.losses
    assert re.search("options of the checkpoint: .*--batch-size 96, .*--lr 0.003, ", done.output)
    assert not notes(cut)
    typed = ("--lr", 1e-3, "--no-model-ema", "--clip-grad", "none", "--epochs", 3)
    done = jobs.fork(*words, "--run", "my cut", "--resume", "auto", *typed)
    assert done.code == 0, done.output
    (note,) = notes(cut)
    assert "--lr 0.001 (the checkpoint: 0.003)" in note
    assert "--clip-grad none (the checkpoint: 1.0)" in note
    assert cut.run["config"]["weight_decay"] == 0.2 and cut.run["config"]["model_ema"] is False
    other = jobs.fork(*words, "--run", "my cut", "--resume", "auto", "--task", "text")
    assert other.code != 0 and "with --task image, and this launch has --task text; add --task" in (
        other.output
    )


def notes(run: Trained) -> list[str]:
    return [
        event["text"]
        for event in run.events
        if "differ from the checkpoint's" in event.get("text", "")
    ]


POWER = ("--wire", "powersgd:2", "--shares", "3,1", "--precision", "fp32", "--max-steps", 6)


@pytest.fixture(scope="module")
def power(module_jobs: Jobs) -> Trained:
    """Its first two steps are exact."""
    return module_jobs.train(2, DDP, "power", *POWER, "--save-every", 1, "--keep", 9)


@pytest.mark.turns
@pytest.mark.parametrize("step", [1, 2, 3])
def test_powersgd_goes_on_to_the_bit_from_any_step(power: Trained, jobs: Jobs, step: int) -> None:
    resumed = jobs.train(2, DDP, "resumed", *POWER, "--resume",
                         power.folder / "checkpoints" / f"step_{step:08d}")  # fmt: skip
    assert resumed.losses == power.losses[step:]


SHORT = ("--data-fraction", 0.25, "--batch-size", 96, "--epochs", 3, "--precision", "fp32",
         "--shares", "equal")  # fmt: skip


def evaluations(run: Trained) -> list[tuple[int, int, float]]:
    """Step, epoch and loss of each."""
    lines = map(json.loads, (run.folder / "epochs.jsonl").open())
    return [(line["step"], line["epoch"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def short(module_jobs: Jobs) -> Trained:
    """Three epochs of 359 samples: of four steps each, the last one smaller."""
    return module_jobs.train(1, DDP, "short", *SHORT)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("before", "every"), [(2, ()), (3, ()), (3, ("--save-every", 5))],
    ids=["after a checkpoint", "at the end", "far from one"],
)  # fmt: skip
def test_an_evaluation_that_was_killed_is_made_up_for(
    short: Trained, jobs: Jobs, before: int, every: tuple[object, ...]
) -> None:
    words = (*SHORT, *every, "--logs", jobs.logs, "--run", "k")
    assert jobs.fork(1, "tests/support/drivers/killed.py", "--before", before, *words).code != 0
    run = jobs.train(1, DDP, "k", *SHORT, *every, "--resume", "auto")
    assert evaluations(run) == evaluations(short)
    assert run.run["result"]["top1"] == short.run["result"]["top1"]
    assert run.losses == short.losses
    again = jobs.train(1, DDP, "k", *SHORT, *every, "--resume", "auto")
    assert evaluations(again) == evaluations(short)

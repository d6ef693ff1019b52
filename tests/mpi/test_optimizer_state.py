"""Runs go on to the bit with any optimizer, on several ranks; FSDP refuses what it changes."""

import re

import pytest
from jobs import Jobs
from project import DDP, ZERO

pytestmark = pytest.mark.mpi


def test_fsdp_cuts_what_stays_the_same_and_refuses_the_rest(jobs: Jobs) -> None:
    done = jobs.fork(2, "tests/support/drivers/sharded_optimizers.py")
    assert done.code == 0, done.output
    said = dict(re.findall(r"^(\w+): (.*)$", done.output, re.MULTILINE))
    assert len(said) >= 70 and said["adamw"] == "fused=True" and said["sgd"] == "fused=False"
    for name in ("lamb", "lars", "adan", "radamlegacy", "lookahead_radamlegacy"):
        assert said[name].startswith("fused="), said[name]
    for name in ("muon", "adamp", "cadamw", "adafactor"):
        assert said[name].startswith(f"--opt {name} ") and "--strategy ddp" in said[name]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("script", "options"),
    [
        (DDP, ("--opt", "lamb")), (DDP, ("--opt", "lookahead_radamlegacy", "--strategy", "fsdp")),
        (ZERO, ("--stage", 1, "--opt", "adan")), (ZERO, ("--stage", 3, "--opt", "nadamlegacy")),
    ],
    ids=["ddp", "fsdp", "zero1", "zero3"],
)  # fmt: skip
def test_a_run_goes_on_to_the_bit(jobs: Jobs, script: str, options: tuple[object, ...]) -> None:
    words = (*options, "--precision", "fp32", "--shares", "2,1", "--max-steps", 12)
    straight = jobs.train(2, script, "straight", *words, "--save-every", 7, "--keep", 9)
    resumed = jobs.train(2, script, "resumed", *words, "--resume",
                         straight.folder / "checkpoints" / "step_00000007")  # fmt: skip
    assert resumed.losses == straight.losses[7:]

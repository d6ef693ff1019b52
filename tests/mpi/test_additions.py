"""One new file adds a dataset, a wire mode, a strategy or an optimizer."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import Jobs
from project import DDP, ROOT
from safetensors.torch import load_file
from warm.ranks import FOLDERS, WarmRanks

pytestmark = pytest.mark.mpi

PLACES = {
    "stripes": "src/motley/data/datasets",
    "fp8": "src/motley/comm/modes",
    "late": "src/motley/engines/strategies",
    "blockwise": "src/motley/engines/strategies",
    "signs": "src/motley/engines/optimizers",
}


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs in a copy of the repository with these new files, and no other difference."""
    root = tmp_path_factory.mktemp("copy") / "motley"
    for folder in (*FOLDERS, "setup"):
        shutil.copytree(ROOT / folder, root / folder)
    shutil.copy(ROOT / "entry_cn.sh", root)
    shutil.copy(ROOT / "hosts.example.txt", root / "hosts.txt")
    for name, place in PLACES.items():
        shutil.copy(ROOT / "tests" / "support" / "additions" / f"{name}.py", root / place)
    with WarmRanks(("warm.script", "motley.train.start"), root) as ranks:
        yield Jobs(root, ranks)


def said_by(jobs: Jobs, ranks: int, *words: object) -> str:
    """What a script says that succeeds."""
    done = jobs.fork(ranks, *words, COLUMNS="200")
    assert done.code == 0, done.output
    return done.output


def test_they_are_trained_with(added: Jobs) -> None:
    losses = {}
    for name, words in {
        "fp8": ("--strategy", "ddp", "--wire", "fp8"),
        "late": ("--strategy", "late", "--tell", "--wire", "exact"),
    }.items():
        options = ("--dataset", "stripes", "--batch-size", 64, "--epochs", 4, "--seed", 3)
        run = added.train(2, DDP, name, *options, *words, "--shares", "3,1")
        assert ("rank 1 is late" in run.done.output) == (name == "late")
        losses[name] = run.losses
        assert run.run["plan"]["wire"] == ("fp8" if name == "fp8" else "exact")
        assert run.run["config"]["dataset"] == "stripes"
    assert losses["late"][-1] < 0.8 * losses["late"][0]
    assert losses["fp8"] == pytest.approx(losses["late"], rel=0.1)
    assert losses["fp8"] != losses["late"]


def test_an_optimizer_keeps_its_own_state(added: Jobs) -> None:
    words = ("--dataset", "stripes", "--batch-size", 64, "--opt", "signs", "--shares", "3,1",
             "--save-every", 2)  # fmt: skip
    ddp, fsdp, local = ("--strategy", "ddp"), ("--strategy", "fsdp"), ("--wire", "local:2")
    for name, first, then in (("cut", ddp, fsdp), ("local", local, local)):
        whole = added.train(2, DDP, f"{name}-whole", *words, *first, "--max-steps", 4)
        added.train(2, DDP, name, *words, *first, "--max-steps", 2)
        cut = added.train(2, DDP, name, *words, *then, "--max-steps", 4, "--resume", "auto")
        assert cut.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-6)
        saved = load_file(cut.folder / "checkpoints" / "step_00000004" / "optimizer.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.int8}


def test_a_strategy_that_shards_brings_its_memory_estimate(added: Jobs) -> None:
    words = ("--dataset", "stripes", "--batch-size", 64, "--shares", "1,1", "--max-steps", 3)
    fsdp, blockwise = (
        added.train(2, DDP, f"cut-{name}", *words, "--build", "blocks", "--strategy", name)
        for name in ("fsdp", "blockwise")
    )
    assert blockwise.losses == pytest.approx(fsdp.losses, rel=1e-6)
    gathered = [[rank["gathered_mib"] for rank in run.run["memory"]] for run in (blockwise, fsdp)]
    assert 0 < max(gathered[0]) < 0.8 * min(gathered[1])


def test_they_are_planned_with(added: Jobs) -> None:
    said = said_by(added, 2, "torch_dist/plan_vit.py", "--dataset", "stripes", "--wire", "fp8")
    assert "as planned, --wire fp8" in said
    assert "it is inexact, and its cost in accuracy was not measured" in said


def test_help_and_the_matrix_know_them(added: Jobs, tmp_path: Path) -> None:
    said = " ".join(said_by(added, 1, DDP, "--help-all").split())
    for words in (
        "{blockwise,ddp,fsdp,late}",
        "|fp8|",
        "stripes are computed",
        "--tell say on each rank",
    ):
        assert words in said
    matrix = tmp_path / "m.toml"
    matrix.write_text(
        'options = "--dataset stripes --wire fp8"\n[matrix]\nstrategy = ["ddp", "late"]\n'
    )
    script = "torch_dist/baseline_measure.py"
    shown = said_by(added, 1, script, "--matrix", matrix, "--dry-run")
    assert "--strategy late" in shown and "7 runs of 30 steps" in shown

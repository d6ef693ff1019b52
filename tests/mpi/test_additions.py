"""What a user adds is one new file each: a dataset, a wire mode, a strategy."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from project import ROOT, environment, venv

pytestmark = pytest.mark.mpi

PLACES = {
    "stripes": "src/motley/data/datasets",
    "fp8": "src/motley/comm/modes",
    "late": "src/motley/engines/strategies",
}
TRAIN = "torch_dist/train_vit.py"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with three new files, and no other difference."""
    root = tmp_path_factory.mktemp("copy") / "motley"
    for folder in ("src", "torch_dist"):
        shutil.copytree(ROOT / folder, root / folder)
    for name in ("entry_cn.sh", "hosts.txt"):
        shutil.copy(ROOT / name, root)
    for name, place in PLACES.items():
        shutil.copy(ROOT / "tests" / "support" / "additions" / f"{name}.py", root / place)
    return root


@pytest.fixture
def run(copy: Path) -> Command:
    """Any command, in the copy."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        extra = {"MOTLEY_VENV": str(venv()), "PYTHONPATH": str(copy / "src"), "COLUMNS": "200"}
        done = subprocess.run(
            words, cwd=copy, env=environment(**extra), text=True, capture_output=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def mpirun(script: str, *words: str) -> tuple[str, ...]:
    return ("mpirun", "-np", "2", "--hostfile", "hosts.txt", "./entry_cn.sh", script, *words)


def test_they_are_trained_with(run: Command, copy: Path) -> None:
    losses = {}
    for name, words in {
        "fp8": ("--strategy", "ddp", "--wire", "fp8"),
        "late": ("--strategy", "late", "--tell", "--wire", "exact"),
    }.items():
        options = ("--dataset", "stripes", "--batch-size", "64", "--epochs", "4", "--seed", "3")
        done = run(*mpirun(TRAIN, *options, *words, "--shares", "3,1", "--run", name))
        assert ("rank 1 is late" in done.stdout) == (name == "late")
        lines = (copy / "logs" / name / "steps.rank0.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        record = json.loads((copy / "logs" / name / "run.json").read_text())
        assert record["plan"]["wire"] == ("fp8" if name == "fp8" else "exact")
        assert record["config"]["dataset"] == "stripes"
    assert losses["late"][-1] < 0.8 * losses["late"][0]
    assert losses["fp8"] == pytest.approx(losses["late"], rel=0.1)
    assert losses["fp8"] != losses["late"]


def test_they_are_planned_with(run: Command) -> None:
    done = run(*mpirun("torch_dist/plan_vit.py", "--dataset", "stripes", "--wire", "fp8"))
    assert "as planned, --wire fp8" in done.stdout
    assert "it is inexact, and what that costs in accuracy was not measured" in done.stdout


def test_help_and_the_matrix_know_them(run: Command, tmp_path: Path) -> None:
    python = str(venv() / "bin" / "python")
    said = " ".join(run(python, TRAIN, "--help-all").stdout.split())
    for words in ("{ddp,fsdp,late}", "|fp8|", "stripes are computed", "--tell say on each rank"):
        assert words in said
    matrix = tmp_path / "m.toml"
    matrix.write_text(
        'options = "--dataset stripes --wire fp8"\n[matrix]\nstrategy = ["ddp", "late"]\n'
    )
    script = "torch_dist/baseline_measure.py"
    shown = run(python, script, "--matrix", str(matrix), "--dry-run").stdout
    assert "--strategy late" in shown and "7 runs of 30 steps" in shown

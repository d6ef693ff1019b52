"""The house's own rules: who may import whom, and where files may lie."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src" / "motley"
PURE = {
    "errors", "spelling", "hosts", "gpus", "facts", "balance", "forecast", "links", "network",
    "rebalance", "length", "lines", "same_code",
    "advice", "plan", "precision", "wire", "records", "gpu_records", "gpu_log", "processes",
    "leftovers", "at_once", "login", "shell", "remote", "leases", "shards", "matrix", "outcome",
    "baselines", "baseline_rows", "baseline_table", "faults",
}  # fmt: skip
LAUNCH = {"messages", "handshakes", "vigil", "escort", "lifeline", "launch", "traffic"}
SCRIPTS = ("setup", "torch_dist", "deepspeed", "plots", "lab", "benchmarks", "tests")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def library(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("motley.")}


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_layer_imports_only_itself(name: str) -> None:
    path = LIBRARY / f"{name}.py"
    assert not tops(path) & {"torch", "timm", "mpi4py", "deepspeed"}
    assert library(path) <= PURE


@pytest.mark.parametrize("name", sorted(LAUNCH))
def test_launch_imports_no_torch(name: str) -> None:
    path = LIBRARY / f"{name}.py"
    assert not tops(path) & {"torch", "timm", "deepspeed"}
    assert library(path) <= PURE | LAUNCH


@pytest.mark.parametrize("path", sorted(LIBRARY.glob("*.py")), ids=lambda path: path.stem)
def test_the_library_knows_no_engine_and_one_user_of_each(path: Path) -> None:
    assert not tops(path) & {"deepspeed", "ddp_engine", "zero_engine"}
    for package, owners in {
        "mpi4py": {"launch"},
        "paramiko": {"remote"},
        "GPUtil": {"gpus"},
        "pynvml": {"gpus"},
    }.items():
        assert package not in tops(path) or path.stem in owners
    text = path.read_text()
    for variable in ('"RANK"', '"WORLD_SIZE"', '"MASTER_ADDR"', '"MASTER_PORT"'):
        assert variable not in text or path.stem == "launch"


@pytest.mark.parametrize("path", sorted((ROOT / "plots").glob("*.py")), ids=lambda path: path.stem)
def test_plots_need_neither_torch_nor_mpi(path: Path) -> None:
    assert not tops(path) & {"torch", "timm", "mpi4py", "deepspeed"}
    assert library(path) <= PURE


def test_importing_the_plan_loads_no_torch() -> None:
    code = "import sys, motley.plan; print(*map(sys.modules.get, ['torch', 'mpi4py']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.split() == ["None", "None"]


def test_the_plan_reads_no_clock_environment_or_hardware() -> None:
    assert not tops(LIBRARY / "plan.py") & {"os", "time", "datetime", "random", "psutil", "socket"}


def test_script_folders_are_no_packages() -> None:
    # A deepspeed/__init__.py would hide the package of that name.
    assert not [folder for folder in SCRIPTS if list((ROOT / folder).rglob("__init__.py"))]

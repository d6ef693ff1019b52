"""The command motley: what it lists, what it refuses, and what it gives a rank."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from project import ROOT

from motley import cli, completion
from motley.records.run_folder import RunFolder
from motley.text import typed_command
from motley.train.command_line import make_resume_line


def motley(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", "from motley.cli import main; main()", *words], check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def test_each_command_is_listed_and_has_a_main() -> None:
    listed = motley("-h")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) <= 24  # fits a screen
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in listed.stdout
        assert name == "run" or callable(importlib.import_module(command.module).main)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "motley: no command is given; choose train, run"),
        (("trian",), "motley: trian is no command (nearest: train, traces, run); choose train"),
    ],
)
def test_a_wrong_command_is_answered_with_the_nearest(words: tuple[str, ...], says: str) -> None:
    done = motley(*words)
    assert done.returncode == 2 and done.stderr.startswith(says)
    assert done.stderr.endswith(f"as in: {cli.EXAMPLE}\n")


# Begins a command or a script with each of some command lines, and says how these ended, and what
# was loaded meanwhile.
READER = """
import json, os, runpy, sys
target, command_lines, heavy = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
codes = []
for words in command_lines:
    sys.argv = [target, *words]
    try:
        if target.endswith(".py"):
            sys.path.insert(0, os.path.dirname(target))
            runpy.run_path(target, run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, sorted({*heavy} & {*sys.modules})]), file=sys.stderr)
"""
HEAVY = (
    "torch", "timm", "torchvision", "transformers", "deepspeed", "matplotlib", "numpy", "mpi4py.MPI"
)  # fmt: skip
DOORS = [
    path for folder in ("torch_dist", "deepspeed", "plots")
    for path in sorted((ROOT / folder).glob("*.py")) if "__main__" in path.read_text()
]  # fmt: skip
RECKONS = ("plot", "report", "verdict")  # whose modules import numpy: a tenth of a second


def read_command_lines(target: str, *command_lines: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the exit code of each command line, and the heavy packages that were loaded."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", READER, target, json.dumps(command_lines), json.dumps(HEAVY)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    codes, loaded = json.loads(done.stderr.splitlines()[-1])
    return codes, loaded


def without_numpy(name: str, loaded: list[str]) -> list[str]:
    """Return the packages, less numpy for a command that may load it."""
    return [each for each in loaded if each != "numpy" or not name.startswith(RECKONS)]


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != cli.RUN])
def test_a_command_says_its_options_before_it_loads_what_computes(name: str) -> None:
    codes, loaded = read_command_lines("motley.cli", [name, "-h"], [name, "--no-such-option"])
    assert codes == [0, 2] and without_numpy(name, loaded) == []


@pytest.mark.parametrize("door", DOORS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_so_does_a_script(door: Path) -> None:
    codes, loaded = read_command_lines(str(door), ["-h"], ["--no-such-option"])
    assert codes == [0, 2] and without_numpy(door.name, loaded) == []


def test_a_wrong_option_of_a_training_is_answered_before_torch_is_loaded() -> None:
    wrong = (
        ("--task", "imgae"), ("--task", "no_such_file.py"), ("--lr", "fast"), ("--opt",),
        ("--dataset", "digitz"), ("--wire", "powersgd:x"), ("--strategy", "dpd"), ("--stage", "9"),
        ("--recipe", "denit"), ("--task", "text", "--img-size", "8"), ("--config", "no_such.toml"),
        ("--help-all",), ("--task", "weather", "--help-all"),
    )  # fmt: skip
    command_lines = [("train", *words) for words in wrong]
    codes, loaded = read_command_lines("motley.cli", *command_lines)
    assert codes == [2] * (len(wrong) - 2) + [0, 0] and loaded == []


def test_what_a_script_imports_of_motley_loads_no_torch() -> None:
    code = "from motley import *; import sys; print(Task, train_model, *({%s} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code % str(HEAVY)[1:-1]], capture_output=True, text=True,
        check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.startswith("<class 'motley.tasks.task.Task'> <function train_model")
    assert done.stdout.rstrip().endswith(">")


BASH = """
source /dev/stdin
ask() {
  COMP_WORDS=(motley "$@") COMP_CWORD=$#
  _shtab_motley motley "${@: -1}" x
  echo ${COMPREPLY[@]}
}
ask t; ask train --ba; ask train --strategy f; ask plot-gpu --he
"""


def test_a_shell_completes_commands_options_and_their_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["motley completion", "bash"])
    assert completion.main() == 0
    done = subprocess.run(
        ["bash", "-c", BASH], input=capsys.readouterr().out, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "train traces", "--bad-samples --bad-images --batch-size", "fsdp", "--help",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["motley completion", "bsh"])
    assert completion.main() == 2
    assert "motley: bsh is no shell (nearest: bash, zsh" in capsys.readouterr().err


def test_a_rank_has_the_environment_that_the_entry_script_gives(tmp_path: Path) -> None:
    names = (
        "GOMP_SPINCOUNT", "MOTLEY_LAST_FOLDERS", "PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH",
        "PYTHONUNBUFFERED", "TORCH_CPP_LOG_LEVEL",
    )  # fmt: skip
    given = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": "/some/where", "PYTHONHOME": "/usr",
        "PYTHONSAFEPATH": "1", "HOME": str(tmp_path),
    }  # fmt: skip
    script = tmp_path / "say.py"
    script.write_text(f"import os; print({{n: os.environ.get(n) for n in {names}}})")
    entry = subprocess.run(
        [ROOT / "entry_cn.sh", script], env={**given, "MOTLEY_VENV": sys.prefix},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = cli.rank_environment(given)
    assert entry.stdout == f"{ {name: found.get(name) for name in names} }\n"
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]


def test_what_is_said_names_the_command_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed_command("plots/plot_gpu.py") == "python plots/plot_gpu.py"
    monkeypatch.setattr(sys, "argv", ["motley train", "--lr", "1", "--run", "old"])
    assert typed_command("plots/plot_gpu.py") == "motley plot-gpu"
    line = make_resume_line(RunFolder(Path("logs/new")))
    assert line == "motley train --lr 1 --run new --resume auto"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "my motley" / "train.py"), "--lr", "1"])
    line = make_resume_line(RunFolder(Path("logs/new")))
    assert line == "./entry_cn.sh 'my motley/train.py' --lr 1 --run new --resume auto"

"""The command motley: what it lists, what it refuses, and what it gives a rank."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT

from motley import cli, completion, text
from motley.errors import HostTrouble, MotleyError
from motley.launch.environment import rank_environment
from motley.records.run_folder import RunFolder
from motley.text import typed_command
from motley.train.command_line import make_resume_line


def motley(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", "from motley.cli import main; main()", *words], check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def test_each_command_is_listed_and_has_a_main() -> None:
    listed = motley("-h")
    lines = listed.stdout.splitlines()
    assert listed.returncode == 0 and len(lines) <= 40  # fits a screen
    assert max(map(len, lines)) <= 100
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  .*\b{name}\b", listed.stdout, re.MULTILINE)
        assert name == "run" or callable(importlib.import_module(command.module).main)


def test_each_door_of_the_clone_is_a_commands() -> None:
    doors = [door for command in cli.COMMANDS.values() for door in command.doors]
    there = {
        str(path.relative_to(ROOT)) for folder in ("torch_dist", "deepspeed", "plots", "setup")
        for path in (ROOT / folder).iterdir()
        if path.suffix == ".py" or (path.suffix == ".sh" and "/door.sh" in path.read_text())
    }  # fmt: skip
    own = {"own_python.py", "install_packages.py"}  # of a clone's environment
    assert sorted(doors) == sorted(door for door in there if Path(door).name not in own)


@pytest.mark.parametrize("name", [n for n, c in cli.COMMANDS.items() if c.visits_hosts])
def test_the_words_of_a_setup_command_are_its_modules(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (door,) = cli.COMMANDS[name].doors
    by_door = subprocess.run(
        ["bash", ROOT / door, "--dry-run", "-h"], capture_output=True, text=True, timeout=LIMIT_S,
        check=True, env={**os.environ, "MOTLEY_VENV": "/nowhere"},
    )  # fmt: skip
    assert f"bash {door}" in by_door.stdout and by_door.stdout.endswith("\n")
    done = motley(name, "-h")
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", [f"motley {name}"])
    assert done.stdout == typed_command(by_door.stdout)
    assert f"motley {name}" in done.stdout and "setup/" not in done.stdout.replace(MAKES, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "motley: no command is given; motley -h lists them"),
        (("trian",), "motley: trian is no command (nearest: train, traces, run); motley -h lists"),
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
os._exit = sys.exit  # by which a setup command ends
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
# Commands whose modules import numpy: a tenth of a second.
RECKONS = ("plot", "report", "verdict", "baseline", "stage")


def read_command_lines(target: str, *command_lines: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the exit code of each command line, and the heavy packages that were loaded."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", READER, target, json.dumps(command_lines), json.dumps(HEAVY)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
        timeout=LIMIT_S, check=True, cwd=ROOT,
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
        check=True, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.startswith("<class 'motley.tasks.task.Task'> <function train_model")
    assert done.stdout.rstrip().endswith(">")


MAKES = "setup/make_env.sh"  # which no command does
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
        timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "train traces test-gpu test-deepspeed",
        "--bad-samples --bad-images --batch-size --balanced-sampling", "fsdp", "--help",
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
        capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    found = rank_environment(given)
    assert entry.stdout == f"{ {name: found.get(name) for name in names} }\n"
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]


def test_what_is_said_names_the_command_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "see python plots/plot_gpu.py -h"
    assert typed_command(text) == text
    monkeypatch.setattr(sys, "argv", ["motley train", "--lr", "1", "--run", "old"])
    assert typed_command(text) == "see motley plot-gpu -h"
    assert typed_command("bash setup/make_env.sh") == "bash setup/make_env.sh"  # of this clone
    line = make_resume_line(RunFolder(Path("logs/new")))
    assert line == "motley train --lr 1 --run new --resume auto"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "my motley" / "train.py"), "--lr", "1"])
    line = make_resume_line(RunFolder(Path("logs/new")))
    assert line == "./entry_cn.sh 'my motley/train.py' --lr 1 --run new --resume auto"


@pytest.fixture
def no_clone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages as an installed package has them."""
    monkeypatch.setattr(text, "ROOT", None)
    text._read_doors.cache_clear()
    yield
    text._read_doors.cache_clear()


@pytest.mark.usefixtures("no_clone")
@pytest.mark.parametrize(
    ("clone", "typed"),
    [
        ("create one with: bash setup/stage_cn.sh", "create one with: motley stage"),
        ("-np 2 ./entry_cn.sh", "-np 2 motley train"),
        ("./entry_cn.sh torch_dist/plan_vit.py --lr 1", "motley plan --lr 1"),
        ("./entry_cn.sh mine.py", "motley run mine.py"),
        ("./entry_cn.sh motley train", "motley train"),
        ("Take torch_dist/train_vit.py --strategy ddp, or", "Take motley train --strategy ddp, or"),
        ("or take torch_dist/train_vit.py", "or take motley train without --stage"),
        ("python torch_dist/baseline_measure.py --dry-run", "motley baselines --dry-run"),
        ("another baseline_measure.py", "another motley baselines"),
        ("as asked (leave_cn.sh, until 14:20)", "as asked (motley leave, until 14:20)"),
        (".venv/bin/pip install datasets", "pip install datasets"),
        ("bash setup/install_cn.sh", f"pip install {text.PINNED}"),
        ("no script watch.py, /x/setup/clean_cn.sh or my_own.sh", ""),
    ],
)
def test_without_a_clone_no_message_names_a_script_of_it(clone: str, typed: str) -> None:
    assert typed_command(clone) == (typed or clone)
    assert str(MotleyError(clone)) == (typed or clone)
    assert HostTrouble("x", "found", clone).fix == (typed or clone)


@pytest.mark.usefixtures("no_clone")
def test_no_text_of_the_library_keeps_a_door_where_there_is_none() -> None:
    door = re.compile(
        r"(?<![\w./-])(?:setup|plots|torch_dist|deepspeed)/\w+\.(?:sh|py)|entry_cn\.sh"
    )
    texts = {
        node.value for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    }  # fmt: skip
    named = [text for text in texts if door.search(text)]
    assert len(named) > 60
    left = {found for text in named for found in door.findall(typed_command(text))}
    assert left <= {"entry_cn.sh", "setup/make_env.sh"}, left

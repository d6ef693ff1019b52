"""The command motley: what it lists, what it refuses, and what it gives a rank."""

import importlib
import os
import subprocess
import sys
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

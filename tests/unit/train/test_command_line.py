"""What -h says: the usual options on one screen; --help-all says all."""

import re
from collections.abc import Callable

import pytest

from motley.engines.strategy import TORCH, known_strategies
from motley.train.command_line import add_task, training_parser

Help = Callable[[str], str]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """What a script prints, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")

    def said(words: str) -> str:
        parser = training_parser(
            "Trains.\n\nmpirun -np 2 ./entry_cn.sh --epochs 2", known_strategies(TORCH)
        )
        add_task(parser, words.split())
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words.split())
        assert ended.value.code == 0
        return capsys.readouterr().out

    return said


@pytest.mark.parametrize("task", ["image", "text", "weather", "examples/my_task.py"])
def test_usual_options_fit_a_screen_and_all_are_told_by_help_all(help_of: Help, task: str) -> None:
    usual, everything = help_of(f"--task {task} -h"), help_of(f"--task {task} --help-all")
    lines = usual.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "mpirun -np 2 ./entry_cn.sh --epochs 2" in lines
    few = set(re.findall(r"^ +(?:-\w \S+, )?(--[a-z-]+)", usual, re.MULTILINE))
    many = set(re.findall(r"^ +(?:-\w(?: \S+)?, )?(--[a-z-]+)", everything, re.MULTILINE))
    assert {"--shares", "--batch-size", "--wire", "--run"} < few < many
    (rest,) = re.findall(r"--help-all tells of these and (\d+) more", usual)
    assert len(few) + int(rest) == len(many)


def test_a_users_own_options_are_among_the_usual(help_of: Help) -> None:
    assert "--digits INT" in help_of("--task examples/my_task.py -h")

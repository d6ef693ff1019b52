"""What -h says: the usual options on one screen; --help-all says all."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from motley.engines.strategies import TORCH, ZERO, known_strategies
from motley.errors import MotleyError
from motley.tasks.builtin import task_class
from motley.train.command_line import add_task, make_words, read_config, training_parser

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
    (rest,) = re.findall(r"--help-all lists these and (\d+) more", usual)
    assert len(few) + int(rest) == len(many)


def test_a_users_own_options_are_among_the_usual(help_of: Help) -> None:
    assert "--digits INT" in help_of("--task examples/my_task.py -h")


SUMS = "examples/my_task.py"


def test_a_call_is_a_command_line() -> None:
    sums = task_class(SUMS)
    options = {"lr": 3e-4, "shares": [5, 3], "batch_size": 64, "run": "a b", "compile": True}
    words = make_words(sums(digits=3), options, TORCH)  # type: ignore[call-arg]
    config = read_config(training_parser("", known_strategies(TORCH)), words)
    assert (config.lr, config.batch_size, config.run, config.task) == (3e-4, 64, "a b", SUMS)
    assert config.shares is not None and config.shares.values == (5.0, 3.0)
    (task,) = (each for each in config.own if type(each).__name__ == "Sums")
    assert vars(task)["digits"] == 3 and vars(task)["width"] == 128
    assert "width" not in config.typed_names
    assert make_words("text", {"stage": 3}, ZERO) == ["--task", "text", "--stage=3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lrr": 1}, "lrr is not an option (nearest: --lr"),
        ({"lr": "fast"}, "--lr fast: "),
        ({"shares": {"a": 1}}, "shares has to be a string or a number, and is {'a': 1}"),
        ({"stage": 3}, "stage is not an option"),  # of the other package
    ],
)
def test_a_wrong_option_of_a_call_is_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(MotleyError, match=re.escape(says)):
        make_words(SUMS, options, TORCH)


def test_none_is_the_default_of_an_option_and_a_file_may_be_named() -> None:
    options = {"run": None, "shares": None, "clip_grad": None, "config": "a.toml"}
    assert make_words("text", options, TORCH) == ["--task", "text", "--config", "a.toml"]


def test_a_file_with_two_tasks_trains_no_other_one(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(Path(SUMS).read_text() + "\n\n@dataclass\nclass Other(Sums):\n    pass\n")
    other = task_class(str(file))
    assert make_words(other, {}, TORCH)[1].endswith("two.py")
    with pytest.raises(MotleyError, match="has two tasks, Other and Sums; move one"):
        make_words(other.__mro__[1], {}, TORCH)


def test_a_task_that_is_in_no_file_is_refused() -> None:
    kind = type("Loose", (task_class(SUMS),), {"__module__": "nowhere"})
    with pytest.raises(MotleyError, match="Loose is not defined in a file"):
        make_words(kind, {}, TORCH)

"""Options from a file: the same as typed ones, and each fault by its file, line and name."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from motley.config.options import Config
from motley.engines.strategies import TORCH, ZERO, known_strategies
from motley.records.run_folder import RunFolder
from motley.train.command_line import read_config, training_parser


def read(*words: str, package: str = TORCH) -> Config:
    return read_config(training_parser("test", known_strategies(package)), words)


OPTIONS = """
# how it learns
lr = 3e-4
batch-size = 96
opt = "sgd"

[augmentation]
mixup = 0.2
color_jitter = 0.3
model-ema = true

[data]
decay-milestones = [5, 9]
dataset = "synthetic"
"""


TYPED = """
--lr 3e-4 --batch-size 96 --opt sgd --mixup 0.2 --color-jitter 0.3 --model-ema
--decay-milestones 5,9 --dataset synthetic
"""


def test_a_file_is_read_as_if_its_options_were_typed(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text(OPTIONS)
    typed = TYPED.split()
    found = read("--config", str(tmp_path / "options.toml"))
    assert found == read(*typed)
    assert found.typed_names == read(*typed).typed_names
    # Typed options count more, wherever they stand.
    other = read("--lr", "1", f"--config={tmp_path / 'options.toml'}", "--no-model-ema")
    assert (other.lr, other.model_ema, other.batch_size) == (1.0, False, 96)


@pytest.mark.parametrize(
    ("package", "typed"),
    [
        (
            TORCH,
            "--opt sgd --lr 0.3 --strategy fsdp --mixup 0.1 --no-bind --batch-size 64:96:32/10K",
        ),
        (TORCH, "--task text --depth 3 --text README.md LICENSE --decay-milestones 3,4"),
        (ZERO, "--stage 1 --clip-grad 1 --precision fp32 --model-ema"),
    ],
)
def test_a_runs_own_file_makes_the_same_options_again(
    tmp_path: Path, package: str, typed: str
) -> None:
    first = read(*typed.split(), "--run", "a", "--logs", "x", package=package)
    record = tmp_path / "run.json"
    record.write_text(json.dumps({"config": {**first.as_json(), "task_class": "ImageTask"}}))
    again = read("--config", str(record), package=package)
    plain = dataclasses.replace(first, run=again.run, logs=again.logs)
    assert again.as_json() == plain.as_json()
    assert not again.typed_names & {"run", "logs"}
    RunFolder(tmp_path).write_config(first.as_toml())
    again = read("--config", str(tmp_path / "config.toml"), package=package)
    assert again == dataclasses.replace(first, run=None)
    assert again.typed_names == first.typed_names - {"run"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "seed = 1\nlearning-rate = 1",
            "o.toml, line 2: learning_rate is not an option: it is --lr",
        ),
        ("sed = 1", r"o.toml, line 1: sed is not an option \(nearest: "),
        ("\nlr = 'quick'", "o.toml, line 2: --lr quick: "),
        ("config = 'other.toml'", "o.toml, line 1: config is not an option"),
        ("help-all = true", "o.toml, line 1: help_all is not an option"),
        ("lr = true", "o.toml, line 1: lr has to be a string or a number, and is True"),
        ("model-ema = 1", "o.toml, line 1: model_ema has to be true or false, and is 1"),
        ("strategy = 'zero'", "o.toml, line 1: --strategy zero: choose ddp"),
        ("lr = 1\n[x]\nlr = 2", "o.toml has lr twice"),
        ("lr: 1", "o.toml is not valid TOML: .*line 1.*write one option per line"),
    ],
)
def test_a_fault_is_named_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "o.toml").write_text(text)
    with pytest.raises(SystemExit):
        read("--config", str(tmp_path / "o.toml"))
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config",), "--config takes one file, and 0 are given"),
        (("--config", "a", "--config", "b"), "--config takes one file, and 2 are given"),
        (("--config", "absent.toml"), "absent.toml: No such file or directory; name a TOML file"),
    ],
)
def test_a_file_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit):
        read(*words)
    assert says in capsys.readouterr().err

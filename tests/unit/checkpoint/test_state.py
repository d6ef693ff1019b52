"""What a run that goes on is told of its checkpoint, and what a checkpoint holds."""

import json
from dataclasses import dataclass

import pytest

from motley.checkpoint.resume import _differences
from motley.config.option import Decides, Option, flag_of, option, options_of
from motley.config.options import GROUPS, Config
from motley.engines.strategy import TORCH, ZERO, known_strategies
from motley.errors import MotleyError
from motley.tasks.builtin.image import ImageTask
from motley.train.command_line import config_from, read_config, training_parser


def config_of(script: str) -> Config:
    return read_config(training_parser("", known_strategies(script)), ["--img-size", "8"])


CONFIG = config_of(TORCH)
SAVED = CONFIG.as_json()


def differences(**changed: object) -> list[str]:
    return _differences(SAVED, {**SAVED, **changed}, CONFIG)


def test_an_option_says_what_it_decides_or_decides_everything() -> None:
    @dataclass(frozen=True)
    class Plain:
        x: int = 0

    assert options_of(Plain)["x"].decides == Decides.MODEL | Decides.NUMBERS | Decides.SPEED
    with pytest.raises(TypeError, match="decides"):
        option("does something")
    for script in (TORCH, ZERO):
        strategies = known_strategies(script)
        own = [group for each in strategies.values() for group in each.options]
        groups = (*GROUPS, *own, ImageTask)
        declared = {known.name for group in groups for known in options_of(group).values()}
        several = {"strategy"} if len(strategies) > 1 else set()
        assert declared | several == config_of(script).as_json().keys()


@pytest.mark.parametrize("name", SAVED)
def test_what_changes_at_a_resume_is_said(name: str) -> None:
    declared: Option = {each: known for each, known, _ in CONFIG.options()}[name]
    said = f"{flag_of(declared)} another"
    if declared.decides & Decides.MODEL:
        with pytest.raises(MotleyError, match=said):
            differences(**{name: "another"})
    else:
        said_so = bool(declared.decides & Decides.NUMBERS)
        assert [said in note for note in differences(**{name: "another"})] == [True] * said_so


@pytest.mark.parametrize(
    "words",
    [
        [], ["--shares", "5,4,0.5", "--precision", "fp16,fp32,auto", "--micro-batch", "8,4,2"],
        ["--wire", "powersgd:4+bf16", "--hosts", "a, b", "--loss-scale", "2^20", "--compile"],
        ["--shares", "equal", "--grad-checkpointing", "mlp,blocks.0", "--no-augment", "--lr", "1"],
    ],
)  # fmt: skip
def test_a_checkpoints_options_are_read_as_they_were_written(words: list[str]) -> None:
    config = read_config(training_parser(""), words)
    saved = json.loads(json.dumps(config.as_json()))
    assert config_from(saved) == config == config_from({**saved, "of_a_later_version": 1})
    assert config_from({"loss_scale": "2^20"}).loss_scale == 2.0**20  # as older ones wrote it


def test_the_numbers_depend_on_what_is_said() -> None:
    for name in ("warmup_epochs", "min_lr", "drop", "drop_path", "wire", "bad_samples", "lr"):
        (note,) = differences(**{name: "another"})
        assert name.replace("_", "-") in note
    for name in ("run", "keep", "shares", "hosts"):
        assert differences(**{name: "another"}) == []


def test_an_older_checkpoint_need_not_say_all() -> None:
    saved = {**SAVED}
    del saved["eval_samples"]
    assert _differences(saved, {**SAVED, "eval_samples": 9}, CONFIG) == []

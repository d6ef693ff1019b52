"""What a run that goes on is told of its checkpoint, and what a checkpoint holds."""

import json
from dataclasses import dataclass

import pytest

from motley.checkpoint.resume import _differences
from motley.config.option import Decides, Option, get_flag, get_options, option
from motley.config.options import GROUPS, Config
from motley.engines.strategies import TORCH, ZERO, StrategyOptions, known_strategies
from motley.errors import MotleyError
from motley.tasks.builtin import get_task
from motley.tasks.builtin.image import ImageTask
from motley.train.command_line import (
    config_from,
    list_different_options,
    options_to_save,
    read_config,
    restore_options,
    training_parser,
)


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

    assert get_options(Plain)["x"].decides == Decides.MODEL | Decides.NUMBERS | Decides.SPEED
    with pytest.raises(TypeError, match="decides"):
        option("does something")
    for script in (TORCH, ZERO):
        strategies = known_strategies(script)
        own = [group for each in strategies.values() for group in each.options]
        groups = (*GROUPS, *own, ImageTask)
        declared = {known.name for group in groups for known in get_options(group).values()}
        several = {"strategy"} if len(strategies) > 1 else set()
        assert declared | several == config_of(script).as_json().keys()


def test_arguments_that_decide_the_state_of_an_optimizer_stay() -> None:
    betas = ["betas=0.9,0.95"]
    (note,) = differences(opt_kwargs=betas)
    assert "--opt-kwargs betas=0.9,0.95 (the checkpoint: none)" in note
    with pytest.raises(MotleyError, match=r"amsgrad=True \(the checkpoint: none\)"):
        differences(opt_kwargs=[*betas, "amsgrad=True"])


@pytest.mark.parametrize("name", SAVED)
def test_what_changes_at_a_resume_is_said(name: str) -> None:
    declared: Option = {each: known for each, known, _ in CONFIG.options()}[name]
    said = f"{get_flag(declared)} another"
    if declared.decides & Decides.MODEL:
        with pytest.raises(MotleyError, match=said):
            differences(**{name: "another"})
    else:
        said_so = not declared.per_launch and name != "max_steps"  # CONFIG's rate ends with epochs
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
    for name in ("run", "logs", "shares", "hosts"):
        assert differences(**{name: "another"}) == []


def test_options_come_from_the_checkpoint_unless_typed_or_of_one_launch() -> None:
    parser = training_parser("", known_strategies(TORCH))
    first = read_config(parser, [
        "--lr", "3e-4", "--dataset", "synthetic", "--no-augment", "--clip-grad", "1", "--wire",
        "powersgd:4", "--max-steps", "40", "--shares", "5,4", "--precision", "fp16,fp32",
        "--strategy", "fsdp", "--workers", "3", "--logs", "elsewhere", "--save-every", "10m",
    ])  # fmt: skip
    saved = json.loads(json.dumps(options_to_save(first)))
    again = restore_options(read_config(training_parser("", known_strategies(TORCH)), []), saved)
    assert (again.lr, again.clip_grad, str(again.wire)) == (3e-4, 1.0, "powersgd:4")
    assert (again.max_steps, again.schedule_ends_with_run) == (40, True)
    assert str(again.save_every) == "10m" and get_task(again).augment is False
    assert get_task(again).dataset == "synthetic" and get_task(again).name == get_task(first).name
    assert (again.shares, str(again.precision), again.workers) == (None, "auto", None)
    assert again.logs == "logs" and again.group(StrategyOptions).strategy == "ddp"
    words = ["--lr", "1e-3", "--clip-grad", "none", "--augment", "--epochs", "3"]
    typed = restore_options(read_config(training_parser("", known_strategies(TORCH)), words), saved)
    assert (typed.lr, typed.clip_grad, get_task(typed).augment) == (1e-3, None, True)
    assert (typed.max_steps, typed.epochs, typed.schedule_ends_with_run) == (None, 3, False)
    assert "lr" in again.continued_names and not {"lr", "epochs"} & typed.continued_names
    assert set(list_different_options(typed, again)) == {
        "--lr 0.001", "--clip-grad none", "--epochs 3", "--max-steps none", "--augment True",
    }  # fmt: skip


def test_a_run_of_before_a_task_had_defaults_of_its_own_keeps_those_that_it_had() -> None:
    text = read_config(training_parser(""), ["--task", "text"])
    saved = json.loads(json.dumps(options_to_save(text)))
    assert (saved["opt_kwargs"], saved["min_lr"]) == (["betas=0.9,0.95"], "10%")
    assert restore_options(text, saved) == text
    before = {name: value for name, value in saved.items()
              if name not in ("opt_kwargs", "warmup_steps", "clip_mode")}  # fmt: skip
    again = restore_options(text, {**before, "min_lr": 1e-5})
    assert (again.opt_kwargs, again.warmup_steps, again.min_lr) == (None, None, 1e-5)
    typed = read_config(training_parser(""), ["--task", "text", "--warmup-steps", "9"])
    assert restore_options(typed, before).warmup_steps == 9


def test_the_words_of_a_recipe_do_not_win_over_what_was_typed_beside_it_before() -> None:
    first = read_config(training_parser(""), ["--recipe", "lab", "--lr", "2e-3"])
    for recipe, lr, epochs in (("lab", 2e-3, 100), ("deit", 1e-3, 300)):
        again = read_config(training_parser(""), ["--recipe", recipe])
        found = restore_options(again, options_to_save(first))
        assert (found.lr, found.epochs) == (lr, epochs)


def test_an_option_may_need_those_of_the_checkpoint() -> None:
    words = ["--aug-splits", "3", "--aa", "v0", "--jsd-loss"]
    saved = options_to_save(read_config(training_parser(""), words))
    typed = read_config(training_parser(""), ["--resume", "auto", "--aug-splits", "2"])
    with pytest.raises(MotleyError, match="all images of a sample would be equal"):
        get_task(typed).check_options()
    task = get_task(restore_options(typed, saved))
    task.check_options()
    assert (task.aug_splits, task.jsd_loss) == (2, True)  # type: ignore[attr-defined]


def test_another_task_is_refused_with_the_option_to_add() -> None:
    text = read_config(training_parser(""), ["--task", "text"])
    with pytest.raises(MotleyError, match="this launch has --task image; add --task text"):
        restore_options(read_config(training_parser(""), []), options_to_save(text))


def test_an_older_checkpoint_need_not_say_all() -> None:
    saved = {**SAVED}
    del saved["eval_samples"]
    assert _differences(saved, {**SAVED, "eval_samples": 9}, CONFIG) == []

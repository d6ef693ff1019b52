"""What a run that goes on is told of its checkpoint, and what a checkpoint holds."""

from dataclasses import asdict, fields, replace

import pytest

from motley.checkpoint.transfer import _differences
from motley.config.options import AT_RESUME, FREE, MUST, SAID, Config, read_config, training_parser
from motley.errors import MotleyError

CONFIG = replace(read_config(training_parser(""), []), model="vit_digits", img_size=8)


def test_each_option_says_what_another_value_does_at_a_resume() -> None:
    assert [option.name for option in fields(Config)
            if option.metadata.get(AT_RESUME) not in (MUST, SAID, FREE)] == []  # fmt: skip


@pytest.mark.parametrize("option", fields(Config), ids=lambda option: option.name)
def test_what_changes_at_a_resume_is_said(option: object) -> None:
    name = option.name  # type: ignore[attr-defined]
    changed = {**asdict(CONFIG), name: "another"}
    kind = option.metadata[AT_RESUME]  # type: ignore[attr-defined]
    said = f"--{name.replace('_', '-')} another"
    if kind == MUST:
        with pytest.raises(MotleyError, match=said):
            _differences(asdict(CONFIG), changed)
    else:
        assert [said in note for note in _differences(asdict(CONFIG), changed)] == (
            [True] if kind == SAID else []
        )


def test_the_numbers_depend_on_what_is_said() -> None:
    for name in ("warmup_epochs", "min_lr", "drop", "drop_path", "wire", "bad_images", "lr"):
        (note,) = _differences(asdict(CONFIG), {**asdict(CONFIG), name: "another"})
        assert name.replace("_", "-") in note
    for name in ("run", "keep", "shares", "hosts"):
        assert _differences(asdict(CONFIG), {**asdict(CONFIG), name: "another"}) == []


def test_an_older_checkpoint_need_not_say_all() -> None:
    saved = asdict(CONFIG)
    del saved["eval_images"]
    assert _differences(saved, {**asdict(CONFIG), "eval_images": 9}) == []

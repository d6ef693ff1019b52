"""The page for users of other trainers says what the command line does."""

import re
import shlex

import pytest
from project import ROOT

from motley.config.other_tools import SAME
from motley.config.parser import OptionParser
from motley.engines.strategies import TORCH, ZERO, known_strategies
from motley.train.command_line import add_task, training_parser

TEXT = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines()
        if line.startswith("| ")]  # fmt: skip
LAUNCH = {"--hostfile", "--to", "--follow"}  # of mpirun and plots/publish.py


def make_parser(task: str, package: str = TORCH) -> OptionParser:
    parser = training_parser("", known_strategies(package))
    add_task(parser, ["--task", task])
    return parser


def options_of(parser: OptionParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_all_spellings_are_listed_with_the_task_that_has_them() -> None:
    listed = {row[0]: codes(row[1]) for row in ROWS if len(row) == 2}
    image, text = (options_of(make_parser(task)) for task in ("image", "text"))
    expected = {"every task": image & text, "images": image - text, "text": text - image}
    for title, known in expected.items():
        assert set(listed[title]) == {word for word, own in SAME.items() if own[0] in known}


@pytest.mark.parametrize("row", [row for row in ROWS if "works as typed" in row[-1]], ids=str)
def test_spellings_that_work_are_read_as_the_page_says(row: list[str]) -> None:
    theirs, ours, note = row
    typed = codes(theirs if note.startswith("works") else note)
    parser = make_parser("text" if "--length" in ours else "image")
    assert len(typed) == len(codes(ours))
    for other, own in zip(typed, codes(ours), strict=True):
        assert parser.parse_args(shlex.split(other)) == parser.parse_args(shlex.split(own))


def test_every_option_that_the_page_names_exists() -> None:
    known = LAUNCH.union(*(options_of(make_parser(task, package))
                           for task in ("image", "text") for package in (TORCH, ZERO)))  # fmt: skip
    named = {word for row in ROWS if len(row) == 3 for code in codes(row[1])
             for word in re.findall(r"(?<!\S)--[a-z-]+", code)}  # fmt: skip
    assert named <= known


_PART = TEXT[TEXT.index("### All options of timm") : TEXT.index("## Hugging Face Trainer")]
OF_TIMM = [
    (option, cell)
    for options, cell in re.findall(r"^\| (`--.+?) \| (.+) \|$", _PART, re.MULTILINE)
    for option in codes(options)
]
# A value that suits each option; 1 suits all others that take one.
WITH = {
    "--aa": "rand-m9", "--aug-splits": "3", "--amp-dtype": "bfloat16", "--bce-target-thresh": "0.2",
    "--clip-mode": "agc", "--config": "", "--crop-pct": "0.9", "--dataset": "folder",
    "--decay-milestones": "30,60", "--eval-metric": "top1", "--interpolation": "bicubic",
    "--opt": "sgd", "--opt-kwargs": "eps=1e-8", "--ratio": "0.75 1.33", "--remode": "const",
    "--scale": "0.08 1.0", "--sched": "step", "--test-crops": "5", "--tta": "5",
}  # fmt: skip
SWITCHES = {
    "--no-aug", "--pretrained", "--grad-checkpointing", "--bce-loss", "--jsd-loss", "--model-ema",
    "--model-ema-warmup", "--resplit", "--torchcompile",
}  # fmt: skip


def test_the_page_counts_the_options_of_timm_as_they_are() -> None:
    same = sum(cell == "the same name" for _, cell in OF_TIMM)
    other = sum(cell.startswith("`") for _, cell in OF_TIMM)
    assert f"{same} of these {len(OF_TIMM)} options by the same name, and {other} by" in _PART
    assert len(dict(OF_TIMM)) == len(OF_TIMM) >= 150


@pytest.mark.parametrize(("option", "cell"), OF_TIMM, ids=[option for option, _ in OF_TIMM])
def test_an_option_of_timm_is_read_or_answered_in_a_line(
    option: str, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = make_parser("image")
    words = [option] if option in SWITCHES else [option, *WITH.get(option, "1").split()]
    if option == "--config":  # a file of Motley's own form
        assert cell == "the same name" and option in options_of(parser)
        return
    if cell == "the same name" or option in SAME:
        parsed = vars(parser.parse_args(words))
        assert parsed != vars(parser.parse_args([])) or option in ("--img-size", "--config") or (
            option in ("--lr-cycle-mul", "--lr-cycle-limit", "--mixup-prob", "--recount")
        )  # fmt: skip
        if option in SAME:
            assert cell == f"`{' '.join(SAME[option])}`"
        return
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    due = cell.removeprefix("none: ")
    due = f"it is {codes(cell)[0]} here" if cell.startswith("`") else due
    assert f"unknown option {option}: {due}" in said

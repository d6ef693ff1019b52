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

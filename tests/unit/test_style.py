"""The rules of plain English hold in the whole library."""

import re
from pathlib import Path

import pytest
from project import ROOT
from style import WORDS, find_in_markdown, find_in_python, find_names

MADE = ("api.md", "messages.md")  # of docstrings and messages
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARITHMETIC.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in MADE),
]  # fmt: skip


def test_docstrings_comments_and_pages_keep_the_rules() -> None:
    modules = sorted((ROOT / "src" / "motley").rglob("*.py"))
    found = [str(each) for path in modules for each in (*find_in_python(path), *find_names(path))]
    found += [str(each) for page in PAGES for each in find_in_markdown(page)]
    assert found == []


def test_messages_call_processes_no_people() -> None:
    lines = (ROOT / "docs" / "messages.md").read_text().splitlines()
    assert [line for line in lines if WORDS.search(re.sub(r"<[^>]*>", "", line))] == []


def test_names_that_break_a_rule_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("class HostTold:\n    said: str\n    text: str\n\n\ndef step_of(): ...\n")
    assert [each.sentence for each in find_names(path)] == ["said", "HostTold", "step_of"]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""What it has said in all, with these bytes."""', ["opening"]),
        ('"""Append received bytes and return the complete messages."""', []),
        ("x = 1  # of what was told", ["word told"]),
        ('"""Return it.\n\nArgs:\n    rank: of the launch. host: its name.\n"""', []),
        (f'"""{"Word " * 41}."""', ["length"]),
        ('"""Run it:\n\n    What a shell line says\n\nExit code: 0.\n"""', []),
    ],
)
def test_what_breaks_a_rule_is_found(tmp_path: Path, text: str, rules: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"{text}\n")
    assert [each.rule for each in find_in_python(path)] == rules


def test_code_and_tables_of_a_page_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# What\n\n```\nWhat a line\n```\n\n| what | is |\n\nOf a page, a sentence.\n")
    assert [each.rule for each in find_in_markdown(path)] == ["opening"]

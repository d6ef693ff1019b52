"""The rules of plain English hold in each room, or break in no more places than before."""

from collections import Counter
from pathlib import Path

import pytest
from project import ROOT
from style import find_in_markdown, find_in_python

LIBRARY = ROOT / "src" / "motley"
# Places that break a rule, by room. A room that is rewritten leaves the list; a number only falls.
MOST = {
    "checkpoint": 8,
    "data": 8,
    "engines": 25,
    "launch": 12,
    "live": 10,
    "measure": 14,
    "membership": 39,
    "plan": 2,
    "records": 14,
    "root": 9,
    "tasks": 16,
    "train": 17,
}


def room_of(path: Path) -> str:
    """Return the room of a module, or ``root``."""
    names = path.relative_to(LIBRARY).parts
    return names[0] if len(names) > 1 else "root"


def test_no_room_breaks_the_rules_in_more_places() -> None:
    found = [each for path in sorted(LIBRARY.rglob("*.py")) for each in find_in_python(path)]
    counts = Counter(room_of(each.path) for each in found)
    worse = {room: count for room, count in counts.items() if count > MOST.get(room, 0)}
    assert not worse, "\n".join(str(each) for each in found if room_of(each.path) in worse)
    assert counts == MOST, "fewer places break a rule: lower the numbers in MOST"


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

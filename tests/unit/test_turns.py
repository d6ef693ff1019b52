"""Variants that take turns: none is left out for good, and none of a turn's words is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from project import ROOT
from turns import TURNS, chosen

SHOWN = st.frozensets(st.sampled_from("abcdefgh"), max_size=3)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=4), SHOWN, min_size=1, max_size=30))
def test_all_run_in_some_days_and_each_turn_shows_every_word(
    variants: dict[str, frozenset[str]],
) -> None:
    turns = [chosen(variants, turn) for turn in range(TURNS)]
    assert set().union(*turns) == set(variants)
    words = frozenset().union(*variants.values())
    for turn in turns:
        assert turn and frozenset().union(*(variants[name] for name in turn)) == words
        # A part, and no more for words that it lacks than there are.
        assert len(turn) <= max(1, -(-len(variants) // TURNS)) + len(words)
    plain = dict.fromkeys(variants, frozenset[str]())
    assert max(len(chosen(plain, turn)) for turn in range(TURNS)) <= max(1, len(plain) // TURNS + 1)


TESTS = """
import pytest

@pytest.mark.turns(shows=lambda engine, number: {engine} if number == 5 else ())
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("engine", ["ddp"])
def test_engine(engine, number): pass

@pytest.mark.turns("lost")
def test_host(): pass

@pytest.mark.turns("lost")
def test_rank(): assert False

def test_always(): pass
"""


def test_a_turn_is_chosen_said_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "here" / "test_these.py"
    path.parent.mkdir()
    path.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = turns\n")

    def run(*words: object) -> tuple[set[str], str]:
        plugins = ("-p", "turns", "-p", "xdist")
        command = [sys.executable, "-m", "pytest", *plugins, "-v", *words]
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"),
                 "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        ran = set(re.findall(r"::(test_\w+(?:\[ddp-\d\])?)", done.stdout))
        return ran, done.stdout

    ran, said = run("here", "--turn", 1, "-n", 2)
    assert ran == {"test_engine[ddp-1]", "test_engine[ddp-5]", "test_engine[ddp-6]", "test_rank",
                   "test_always"}  # fmt: skip
    assert "turn: 1 of 0 to 4; --turn 1 runs the same tests again" in said
    assert "turn 1: 8 variants have their turn at another commit" in said and "--turn all" in said
    usual, said = run("here")
    again = re.search(r"--turn (\d) runs the same tests again", said)
    assert again and run("here", "--turn", again[1])[0] == usual < run("here/test_these.py")[0]

"""Turns of a matrix of variants: a fifth of them runs at a commit, and all at five in a row.

A test of many variants (each engine, each fault) is marked ``turns``. The number of commits up to
this one, or ``--turn``, chooses the fifth; a named test, file or ``-k`` runs all. Nothing that is
the one test of a thing is marked. What every turn must have, such as each engine, the matrix says
itself (``shows``): a fifth that lacks one is given a variant that has it.

    @pytest.mark.turns                         # the variants of this test
    @pytest.mark.turns(shows=words_of)         # words_of(**parameters): what a variant shows
    @pytest.mark.turns("hosts that are lost")  # several tests are one matrix

A plugin of pytest, which conftest.py names.
"""

import subprocess
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import pytest
from project import ROOT

TURNS = 5
ALL = "all"
_LEFT = pytest.StashKey[int]()


def chosen(variants: Mapping[str, frozenset[str]], turn: int) -> set[str]:
    """The variants of one matrix that run in a turn.

    Every fifth by name; then, while some word is shown by others alone, the variant that shows
    most of such words (the usual greedy set cover).

    Args:
        variants: what each shows, by its name.
    """
    names = sorted(variants)
    count = min(TURNS, len(names))  # no turn has none
    here = {name for place, name in enumerate(names) if place % count == turn % count}
    missing = frozenset[str]().union(*variants.values())
    missing = missing.difference(*(variants[name] for name in here))
    while missing:
        most = max(names, key=lambda name: len(variants[name] & missing))
        here.add(most)
        missing -= variants[most]
    return here


def count_commits() -> int:
    """Return the number of commits up to this one; 0 where git cannot tell."""
    words = ("git", "rev-list", "--count", "HEAD")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--turn``."""
    parser.addoption(
        "--turn", choices=(*map(str, range(TURNS)), ALL),
        help="which variants of the tests marked 'turns' run; default: the fifth whose turn it is "
        "at this commit, and all where files, tests or -k are named",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Choose before there are workers, which are given the options."""
    options = config.option
    if options.turn is None:
        named = any("::" in word or word.endswith(".py") for word in config.args)
        named = named or options.keyword or getattr(options, "lf", False)
        options.turn = ALL if named else str(count_commits() % TURNS)
    if not hasattr(options, "turn_whole"):
        options.turn_whole = () if options.turn == ALL else _changed()


def pytest_report_header(config: pytest.Config) -> str:
    """What runs the same tests again."""
    turn, whole = config.option.turn, config.option.turn_whole
    if turn == ALL:
        return "turn: all variants of all matrices"
    also = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
    also = f"; whole, since they are not as on main: {also}" if whole else ""
    return f"turn: {turn} of 0 to {TURNS - 1}; --turn {turn} runs the same tests again{also}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the variants whose turn comes at another commit."""
    if config.option.turn == ALL:
        return
    marked = sorted((item for item in items if item.get_closest_marker("turns")), key=_matrix)
    here = set[str]()
    for _, found in groupby(marked, _matrix):
        variants = {item.nodeid: _shows(item) for item in found}
        here |= chosen(variants, int(config.option.turn))
    left = [item for item in marked if item.nodeid not in here and not _is_whole(item)]
    names = {item.nodeid for item in left}
    items[:] = [item for item in items if item.nodeid not in names]
    config.hook.pytest_deselected(items=left)
    config.stash[_LEFT] = len(left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist says how many, for it collects all that others do."""
    if output := getattr(session.config, "workeroutput", None):
        output["turns_left"] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hears it."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("turns_left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what did not run."""
    config = terminalreporter.config
    if count := config.stash.get(_LEFT, 0):
        terminalreporter.write_line(
            f"turn {config.option.turn}: {count} variants have their turn at another commit; "
            f"--turn {config.option.turn} repeats this one, --turn {ALL} runs all"
        )


def _matrix(item: pytest.Item) -> str:
    mark = item.get_closest_marker("turns")
    assert mark is not None
    return str(mark.args[0]) if mark.args else item.nodeid.partition("[")[0]


def _shows(item: pytest.Item) -> frozenset[str]:
    mark = item.get_closest_marker("turns")
    shows = mark and mark.kwargs.get("shows")
    return frozenset(shows(**item.callspec.params)) if shows else frozenset()  # type: ignore[attr-defined]


def _is_whole(item: pytest.Item) -> bool:
    return item.nodeid.partition("::")[0] in item.config.option.turn_whole


def _changed() -> tuple[str, ...]:
    """Return the test files that differ from the main branch, if git can tell: they run whole."""
    found: list[str] = []
    for words in (
        ("diff", "--name-only", "--merge-base", "origin/main"),
        ("ls-files", "--others", "--exclude-standard"),
    ):
        command = ["git", "-C", str(ROOT), *words, "--", "tests"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found += done.stdout.splitlines() if done.returncode == 0 else []
    return tuple(sorted(name for name in found if name.split("/")[-1].startswith("test_")))

"""hosts.txt: plain Open MPI, and nothing that ssh or a shell could run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from project import ROOT

from motley.cluster.hostfile import Host, check_name, parse_hosts, read_hosts
from motley.errors import MotleyError


def test_names_slots_and_comments() -> None:
    text = "# the lab\necetesla0 slots=2  # a comment\n\n  192.0.2.7\nfe80::1 slots=1\n"
    assert parse_hosts(text) == (Host("ecetesla0", 2), Host("192.0.2.7", 1), Host("fe80::1", 1))


def test_the_shipped_file_is_this_machine_alone() -> None:
    assert read_hosts(ROOT / "hosts.example.txt") == (Host("localhost", 5),)


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch${IFS}x", "$(touch x)", "`id`", "a;b", "a b", "a'b", 'a"b', "a/b", "a@b",
     "", ".", "a..b", "a-", "x" * 64, "fe80::1%$(id)", "a\u2028b", "a\x00b", "höst"],
)  # fmt: skip
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(MotleyError):
        check_name(name)
    with pytest.raises(MotleyError):
        parse_hosts(f"{name} slots=1")


@given(st.text(min_size=1, max_size=20))
def test_what_passes_is_harmless(name: str) -> None:
    try:
        checked = check_name(name)
    except MotleyError:
        return
    assert not checked.startswith("-")
    assert all(letter.isascii() and (letter.isalnum() or letter in "._-:") for letter in checked)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host"),
        ("# nobody\n", "names no host"),
        ("a slots=0", "line 1"),
        ("a\nb slots=x", "line 2"),
        ("a max_slots=0", "slots=N"),
        ("a\nb\na slots=2", "line 3: host a is named twice"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        parse_hosts(text)


def test_a_missing_file_is_said_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="does not exist; create it with one host per line"):
        read_hosts(tmp_path / "hosts.txt")

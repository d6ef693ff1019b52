"""What change_cn_shell.sh decides of an account."""

import pytest

from motley.errors import HostTrouble
from motley.provision import change_cn_shell
from motley.provision.change_cn_shell import Account, decide

ALL = {"local", "exists", "listed", "listed_now", "chsh"}


def test_an_account_of_a_directory_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    account = Account("alice", "/bin/tcsh", frozenset(ALL - {"local"}))
    assert decide(account, "/bin/bash", "node") == change_cn_shell.DIRECTORY
    visit = object.__new__(change_cn_shell.Visit)  # without a host to ask
    visit.account, visit.state = account, change_cn_shell.DIRECTORY
    change_cn_shell.show({"node": visit}, "/bin/bash")
    said = capsys.readouterr().out
    assert (
        "directory" in said and "No change is needed: Motley starts ranks under any shell" in said
    )


@pytest.mark.parametrize(
    ("lacking", "kind"),
    [
        ("exists", "no such shell"),
        ("listed", "shell not allowed"),
        ("listed_now", "locked to its shell"),
        ("chsh", "no chsh"),
    ],
)
def test_what_is_lacking_is_named(lacking: str, kind: str) -> None:
    with pytest.raises(HostTrouble) as raised:
        decide(Account("alice", "/bin/tcsh", frozenset(ALL - {lacking})), "/bin/bash", "node")
    assert raised.value.kind == kind
    assert decide(Account("alice", "/bin/tcsh", frozenset(ALL)), "/bin/bash", "node") == "change"

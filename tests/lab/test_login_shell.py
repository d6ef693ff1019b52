"""change_cn_shell.sh: chsh on real hosts, with the host's own PAM and a real terminal."""

import re
from collections.abc import Iterator

import pytest
from lab_door import PRIVATE, Door, lab_up
from lab_terminal import Terminal
from project import ROOT

pytestmark = pytest.mark.mpi

SCRIPT = ROOT / "setup" / "change_cn_shell.sh"
ALL = {"local", "exists", "listed", "listed_now", "chsh"}


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """Three hosts, the second with tcsh, and keys from the first to all."""
    with lab_up(PRIVATE, keys=True) as made:
        yield made


def start(door: Door, *options: object) -> Terminal:
    return Terminal(door, "alone1", "bash", SCRIPT, "--hostfile", "hosts.txt", *options)


def shells(door: Door) -> list[str]:
    lines = [door.on(f"alone{n}", "sh", "-c", "getent passwd $(id -u)") for n in (1, 2, 3)]
    return [line.rpartition("/")[2] for line in lines]


def test_the_shell_is_changed_by_password_and_back(door: Door) -> None:
    secret = door.password()
    yes = ("[y/N]", "y")
    assert shells(door) == ["bash", "tcsh", "bash"]
    done = start(door).answer(yes, ("on alone2: ", "wrong"), ("on alone2: ", secret))
    assert done.code == 0 and secret not in done.output, done.output
    assert re.search(r"alone1 +local +\S+bash +already done", done.output)
    assert re.search(r"alone2 +changed", done.output)
    assert shells(door) == ["bash"] * 3
    again = start(door).answer()
    assert again.code == 0 and again.output.count("already done") == 3

    # This machine too, and back to what does not work on one host.
    done = start(door, "--shell", "/bin/tcsh").answer(yes, ("alone3: ", secret))
    assert done.code == 0 and shells(door) == ["tcsh"] * 3, done.output
    door.on("alone3", "sh", "-c", "echo 'exit 3' >.bashrc")
    done = start(door).answer(yes, ("alone3: ", secret))
    assert done.code == 1 and re.search(r"alone3 +shell restored", done.output), done.output
    assert shells(door) == ["bash", "bash", "tcsh"]
    door.on("alone3", "rm", ".bashrc")


def test_what_cannot_be_is_said_before_anything_is_asked(door: Door) -> None:
    before = shells(door)
    for shell, code, said in (
        ("/bin/none", 1, "no such shell"),
        ("/usr/bin/ls", 1, "shell not allowed"),
        ("bash;id", 2, "not the full path"),
    ):
        done = start(door, "--shell", shell).answer()
        assert done.code == code and said in done.output
    silent = door.run(
        "exec", "alone1", "--", "bash", SCRIPT, "--hostfile", "hosts.txt", "--shell", "/bin/dash"
    )
    assert silent.code == 2 and "no terminal" in silent.output
    assert shells(door) == before

"""The lab in a box comes up, says what is wrong with a profile, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import wait_until
from lab_door import NAMES, SMALL, TESLA, Door, left_of, machine, namespaces, new_door
from project import ROOT

pytestmark = pytest.mark.mpi


@pytest.fixture
def door() -> Iterator[Door]:
    """A lab of this test's own."""
    with new_door() as made:
        yield made


def test_up_and_down_are_quick_and_leave_nothing(door: Door) -> None:
    before = machine()
    up = door.run("up", "--profile", TESLA)
    assert up.code == 0 and up.seconds < 10, up
    assert door.states() == dict.fromkeys(NAMES, "on")
    assert "already up" in door.do("up", "--profile", TESLA)
    other = door.run("up", "--profile", ROOT / "lab" / "equal.toml")
    assert other.code == 2 and "another profile" in other.output
    own = namespaces(door.processes()) - namespaces([os.getpid()])
    assert len(own) >= 5 * 5  # five kinds on each host
    down = door.run("down")
    assert down.code == 0 and down.seconds < 5, down
    assert left_of(door) == []
    assert not own & namespaces()
    assert machine() == before
    assert "is not up" in door.do("down")


@pytest.mark.turns
@pytest.mark.parametrize("made", [0, 1, 4, 12])  # processes: none yet, the switch, some hosts
def test_down_clears_what_a_killed_up_left(door: Door, made: int) -> None:
    before = machine()
    job = door.start("up", "--profile", TESLA)
    folder = Path("/var/lib/motley-lab", door.name)
    wait_until(lambda: folder.exists() and len(door.processes()) >= made, 30)
    job.kill()
    job.communicate()
    own = namespaces(door.processes()) - namespaces([os.getpid()])
    door.do("down")
    assert left_of(door) == []
    assert not own & namespaces()
    assert machine() == before


def test_up_again_finishes_what_a_killed_up_began(door: Door, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text(SMALL)
    job = door.start("up", "--profile", profile)
    wait_until(lambda: bool(door.processes()), 10)
    job.kill()
    job.communicate()
    assert "starting again" in door.do("up", "--profile", profile)
    assert door.states() == {"small1": "on", "small2": "on"}


def test_a_dry_run_changes_nothing(door: Door) -> None:
    output = door.do("up", "--dry-run")
    assert "would run: nsenter" in output and "mount -t tmpfs" in output
    assert left_of(door) == []


HOST = '[[host]]\nname = "a"\naddress = "10.97.96.1/24"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOST + 'up_mbits = 5\n', "unknown key 'up_mbits' in host a (nearest: up_mbit"),
        ("[default]\n" + HOST, "unknown key 'default' (nearest: defaults)"),
        (HOST + HOST.replace('"a"', '"b"'), "a and b both have the address 10.97.96.1"),
        (HOST + HOST, "two hosts have the name a"),
        (HOST + 'decoys = ["docker0 10.97.96.1/16"]\n', "is the address of a"),
        (HOST.replace("10.97.96.1/24", "10.97.96.300/24"), "write it like"),
        (HOST.replace('"a"', '"-oProxyCommand=x"'), "is not a host name"),
        (HOST + 'interface = "x; reboot"\n', "not a valid name of an interface"),
        (HOST + 'shell = "fish"\n', "choose one of bash, tcsh, zsh"),
        (HOST + "cpus = 0\n", "0.01 or more"),
        (HOST.replace("10.97.96.1/24", "127.0.0.1/8"), "which this machine uses already (lo)"),
        ("", "has no host"),
        ("[[host", "cannot be read"),
    ],
    ids=lambda words: "" if "host]]" in words else words,
)  # fmt: skip
def test_bad_profiles_make_nothing(door: Door, tmp_path: Path, text: str, said: str) -> None:
    profile = tmp_path / "bad.toml"
    profile.write_text(text)
    done = door.run("up", "--profile", profile)
    assert done.code == 2 and said in done.output and len(done.output.splitlines()) == 1
    assert left_of(door) == []


def test_other_users_are_told_that_it_needs_root(door: Door) -> None:
    # This clone may lie in a folder that others cannot enter, so they get a copy.
    python = Path(sys.executable).resolve()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        for name in ("lab", "src"):
            shutil.copytree(ROOT / name, Path(folder, name))
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", python, f"{folder}/lab/lab.py", "up"],
            text=True, capture_output=True, check=False,
            env={"PYTHONPATH": f"{folder}/src", "PATH": os.environ["PATH"]},
        )  # fmt: skip
    assert done.returncode == 2 and "needs root" in done.stderr
    missing = door.run("exec", "ecetesla9", "--", "true")
    assert missing.code == 2 and "is not up" in missing.output

""".deepspeed_env files as people write them: each value is what its author meant."""

import subprocess
from pathlib import Path

import pytest
from project import ROOT, environment

from motley.provision.mpi_network import merge_settings

FILES = Path(__file__).parent / "dsenv"
VALUES = {
    "backslash": {"AA": "back\\ slash", "BB": "C:\\dir\\n", "CC": "$HOME/x", "DD": "$(id)"},
    "bom": {"AA": "1"},
    "crlf": {"AA": "1", "BB": "two words"},
    "equals": {"AA": "x=y=z", "BB": "", "CC": "spaced"},
    "export": {"AA": "1"},
    "nccl_crlf": {"NCCL_SOCKET_IFNAME": "eth0"},
    "path": {},  # PATH is set already, and what is set stays
    "quotes": {"AA": "x y", "BB": "q", "CC": '"half', "DD": 'a"b'},
    "trailing": {"AA": "1", "BB": "2"},
    "utf8": {"AA": "h\u00f6h"},
    "comment": {"AA": "1", "BB": "x # y", "CC": "a#b", "DD": ""},
}


def read_by_entry(folder: Path, **extra: str) -> "subprocess.CompletedProcess[bytes]":
    """Run entry_cn.sh with a program in place of Python that prints its environment."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text("#!/bin/sh\nexec env -0\n")
    python.chmod(0o755)
    own = environment(MOTLEY_VENV=str(folder), HOME=str(folder), **extra)
    own = {name: value for name, value in own.items() if len(name) > 2 and "NCCL" not in name}
    return subprocess.run(["./entry_cn.sh"], cwd=ROOT, env=own, capture_output=True, check=False)


def values(done: "subprocess.CompletedProcess[bytes]") -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    pairs = (word.split("=", 1) for word in done.stdout.decode().split("\0") if word)
    found = dict(pairs)
    return {name: found[name] for name in found if len(name) == 2 or name == "NCCL_SOCKET_IFNAME"}


def test_every_file_has_its_right_values() -> None:
    assert {path.stem for path in FILES.iterdir()} == VALUES.keys()


@pytest.mark.parametrize(("name", "expected"), VALUES.items())
def test_values_are_as_their_author_meant(
    name: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """By the absolute path of DS_ENV_FILE, and by its own name in the home."""
    path = FILES / f"{name}.env"
    assert values(read_by_entry(tmp_path, DS_ENV_FILE=str(path))) == expected
    (tmp_path / ".deepspeed_env").write_bytes(path.read_bytes())
    assert values(read_by_entry(tmp_path)) == expected


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = read_by_entry(tmp_path, DS_ENV_FILE="/nowhere/env")
    assert done.returncode == 2 and b"DS_ENV_FILE is /nowhere/env, and there is no" in done.stderr


@pytest.mark.parametrize(
    "line", ["NCCL_IB_DISABLE=0", "export NCCL_IB_DISABLE=0", " NCCL_IB_DISABLE = 0\r",
             "\ufeffNCCL_IB_DISABLE=0"],
)  # fmt: skip
def test_what_the_user_has_set_is_not_set_again(line: str) -> None:
    assert merge_settings(f"{line}\n", ["NCCL_IB_DISABLE=1", "AA=1"])[1:] == [
        "AA=1",
        "MOTLEY_SETTINGS=AA",
    ]

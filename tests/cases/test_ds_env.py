""".deepspeed_env files as people write them: each value is what its author meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT, environment, venv

from motley.errors import MotleyError
from motley.launch.environment import rank_environment
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


def run(*words: object, cwd: Path, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_every_file_has_its_right_values() -> None:
    assert {path.stem for path in FILES.iterdir()} == VALUES.keys()


@pytest.mark.parametrize(("name", "expected"), VALUES.items())
def test_values_are_as_their_author_meant(
    name: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """By the absolute path of DS_ENV_FILE, and by its own name in the home."""
    path = FILES / f"{name}.env"
    (tmp_path / ".deepspeed_env").write_bytes(path.read_bytes())
    for own in ({"DS_ENV_FILE": str(path)}, {"HOME": str(tmp_path)}):
        found = rank_environment({"PATH": "/bin", **own})
        assert {key: found[key] for key in found if len(key) == 2 or "NCCL" in key} == expected


def test_each_door_of_a_rank_reads_them_in_the_order_of_deepspeed(tmp_path: Path) -> None:
    script, home, here = tmp_path / "say.py", tmp_path / "home", tmp_path / "here"
    script.write_text("import os; print(os.environ['AA'], os.environ['BB'], os.environ['CC'])")
    for folder, text in ((home, "AA=home\nBB=home"), (here, "AA=here")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(f"{text}\nAA=late\n")
    own = environment(MOTLEY_VENV=str(venv()), HOME=str(home), CC="set", PYTHONPATH="")
    entry = run(ROOT / "entry_cn.sh", script, cwd=here, env=own)
    assert entry.stdout == "home home set\n", entry.stderr  # this folder is not the clone
    code = (
        "import sys; from motley.launch import environment; environment.ROOT = None;"
        "environment.start_rank(sys.argv[1:])"
    )
    sources = {**own, "PYTHONPATH": str(ROOT / "src")}
    rank = run(sys.executable, "-c", code, script, cwd=here, env=sources)
    assert rank.stdout == "here home set\n", rank.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"DS_ENV_FILE names .*/env, which does not exist on"),
        ("AA=1\nNCCL DEBUG=INFO\n", "has the line 'NCCL DEBUG=INFO'; write it as NAME=VALUE"),
    ],
)
def test_a_file_that_is_wrong_is_named_and_status_2(
    text: str | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "env"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MotleyError, match=says):
        rank_environment({"DS_ENV_FILE": str(path)})
    own = environment(MOTLEY_VENV=str(venv()), DS_ENV_FILE=str(path))
    done = run("./entry_cn.sh", cwd=ROOT, env=own)
    assert done.returncode == 2 and re.search(f"motley: .*{says}", done.stderr)


@pytest.mark.parametrize(
    "line", ["NCCL_IB_DISABLE=0", "export NCCL_IB_DISABLE=0", " NCCL_IB_DISABLE = 0\r",
             "\ufeffNCCL_IB_DISABLE=0"],
)  # fmt: skip
def test_what_the_user_has_set_is_not_set_again(line: str) -> None:
    assert merge_settings(f"{line}\n", ["NCCL_IB_DISABLE=1", "AA=1"])[1:] == [
        "AA=1",
        "MOTLEY_SETTINGS=AA",
    ]

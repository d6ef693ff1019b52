"""What NCCL says goes to a file a rank, where the user has it talk and names no place."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from project import LIMIT_S

from motley.checkpoint.run import Run, talks_to_terminal
from motley.records.run_folder import RunFolder

# What every communicator begins with; it needs no GPU.
SPEAK = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128))"
)


@pytest.fixture
def nccl() -> Path:
    spec = find_spec("nvidia.nccl")
    found = [
        path for place in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(place).glob("lib/libnccl.so.*")
    ]  # fmt: skip
    if not found:
        pytest.skip("this torch has no NCCL")
    return found[0]


def world_of(devices: tuple[str, ...]) -> Any:
    """One rank."""
    return SimpleNamespace(
        rank=0, number=0, nodes=[SimpleNamespace(devices=devices)], allgather=lambda value: [value],
        from_first=lambda make: make(), once_per_node=lambda work: [work()],
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return Run(RunFolder(tmp_path / "100%h"), [], world_of(("a GPU",)))


def test_each_rank_has_a_file_and_the_terminal_nothing(
    run: Run, nccl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run.divert_nccl()
    assert f"goes to {run.folder.path}/nccl.rank*.log" in capsys.readouterr().out
    with subprocess.Popen(
        [sys.executable, "-c", SPEAK, nccl], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == b""
    path = run.folder.path / f"nccl.rank0.{socket.gethostname()}.{process.pid}.log"
    assert "NCCL INFO" in path.read_text()


@pytest.mark.parametrize(
    ("level", "file", "devices"),
    [("", "", ("a GPU",)), ("INFO", "/tmp/mine", ("a GPU",)), ("INFO", "", ())],
)
def test_nothing_is_made_where_nothing_would_be_said_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, level: str, file: str, devices: tuple[str, ...]
) -> None:
    run = Run(run.folder, [], world_of(devices))
    monkeypatch.setenv("NCCL_DEBUG", level)
    if file:
        monkeypatch.setenv("NCCL_DEBUG_FILE", file)
    run.divert_nccl()
    assert not run.folder.path.exists() and os.environ.get("NCCL_DEBUG_FILE", "") == file


def test_a_run_without_a_name_keeps_the_folder_that_it_has(run: Run) -> None:
    run.unnamed = True
    for _ in range(2):
        run._make_folder()
    assert [path.name for path in run.folder.path.parent.iterdir()] == ["100%h"]


def test_what_talks() -> None:
    said = {"INFO": True, "warn": True, "NONE": False, " none": False, "": False}
    assert {level: talks_to_terminal({"NCCL_DEBUG": level}) for level in said} == said
    assert not talks_to_terminal({})

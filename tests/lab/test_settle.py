"""setup/test_mpi.py on hosts whose environment belongs to another user."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import mpi_network
import pytest
from lab_door import need_root

from motley.cluster.ssh import connect
from motley.errors import HostTrouble

LINES = (["btl_tcp_if_include = 10.0.0.0/24"], ["prte_if_include = 10.0.0.0/24"], ["NCCL=1"])
NOBODY = 65534


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment and a repository that anybody may read."""
    need_root()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "venv" / "etc").mkdir(parents=True)
        (folder / "venv" / "etc" / "prte-mca-params.conf").write_text("own = 1\n")
        monkeypatch.setattr(mpi_network, "VENV", folder / "venv")
        monkeypatch.setattr(mpi_network, "ROOT", folder)
        monkeypatch.setenv("HOME", made)
        yield folder


def settle() -> str:
    """What it says; empty if all is well."""
    try:
        with connect("localhost") as remote:
            return mpi_network.settle(remote, LINES, write=True)
    except HostTrouble as trouble:
        return str(trouble)


def as_nobody() -> str:
    """The same by another user."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=os.setuid, initargs=(NOBODY,)) as pool:
        return pool.submit(settle).result()


def test_who_may_not_write_the_parameters_is_told_whose_they_are(place: Path) -> None:
    said = as_nobody()
    assert f"{place}/venv/etc belongs to root; have root run this once" in said
    assert "a copy of this repository of your own" in said
    assert settle() == ""
    written = (place / "venv" / "etc" / "prte-mca-params.conf").read_text()
    assert written == f"own = 1\n# motley: begin\n{LINES[1][0]}\n# motley: end\n"
    assert (place / ".deepspeed_env").read_text() == "NCCL=1\nMOTLEY_SETTINGS=NCCL\n"
    assert as_nobody() == ""  # there is nothing left to write

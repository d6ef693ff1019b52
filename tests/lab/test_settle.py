"""setup/test_mpi.sh on hosts whose environment belongs to another user."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from lab_door import need_root

from motley.cluster.ssh import connect
from motley.errors import HostTrouble
from motley.provision import mpi_network

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
        monkeypatch.setattr(mpi_network, "PLACE", folder)
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


def test_the_parameters_of_another_user_stay_and_ones_own_files_have_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = as_nobody()
    assert f"{place}/venv/etc belongs to root; ask root to run this command once" in said
    assert "a copy of this repository of your own" in said
    home = place / "home"
    (home / ".prte").mkdir(parents=True)
    (home / ".prte" / "mca-params.conf").write_text("mine = 1\n")
    for folder in (place, home, home / ".prte"):
        os.chown(folder, NOBODY, NOBODY)
    monkeypatch.setenv("HOME", str(home))
    marked = "# motley: begin\n{}\n# motley: end\n"
    for _ in range(2):
        assert as_nobody() == ""
        own = (home / ".prte" / "mca-params.conf").read_text()
        assert own == "mine = 1\n" + marked.format(LINES[1][0])
        own = (home / ".openmpi" / "mca-params.conf").read_text()
        assert own == marked.format(LINES[0][0])

    assert settle() == ""
    written = (place / "venv" / "etc" / "prte-mca-params.conf").read_text()
    assert written == "own = 1\n" + marked.format(LINES[1][0])
    assert (place / ".deepspeed_env").read_text() == "NCCL=1\nMOTLEY_SETTINGS=NCCL\n"
    assert as_nobody() == ""  # there is nothing left to write

"""Ranks without MPI meet, and whoever does not know their secret is not heard."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from project import LIMIT_S

from motley.cluster.launcher import WITHOUT_MPI, Launcher, read_launch
from motley.errors import MotleyError
from motley.launch.ranks import TcpRanks, meeting_point, secret

RANK = """
import os, sys
from motley.cluster.launcher import read_launch
from motley.launch.ranks import TcpRanks
ranks = TcpRanks(read_launch())
for number in range(3):
    assert ranks.allgather((ranks.rank, number)) == [(r, number) for r in range(ranks.size)]
assert ranks.on_this_machine() == list(range(ranks.size))
"""


def slurm(rank: int, size: int, job: object, **more: str) -> dict[str, str]:
    """As srun without PMIx has it, on a node that is this machine."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost", "MOTLEY_SECRET": "of a test", **more,
    }  # fmt: skip


def start(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    environ = {**os.environ, **environ}
    return subprocess.Popen(
        [sys.executable, "-c", RANK], env=environ, stderr=subprocess.PIPE, text=True
    )


def test_they_exchange_values_though_strangers_are_quicker() -> None:
    job = os.getpid()
    _, _, port = meeting_point(read_launch(slurm(0, 4, job)), slurm(0, 4, job))
    first = start(slurm(0, 4, job))
    strangers: list[socket.socket] = []
    deadline = time.monotonic() + 30
    while len(strangers) < 70:  # more than are heard at once
        assert time.monotonic() < deadline
        try:
            line = socket.create_connection(("localhost", port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.05)
            continue
        strangers.append(line)
        if len(strangers) % 2:  # half of them say nothing
            line.sendall(b"[" * 1000)
    others = [start(slurm(rank, 4, job)) for rank in (1, 2, 3)]
    for each in (first, *others):
        _, errors = each.communicate(timeout=LIMIT_S)
        assert each.returncode == 0, errors
    for line in strangers:
        line.close()


class Unpickled:
    """Does something where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["UNPICKLED"],)


def test_who_has_another_secret_is_not_unpickled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"{os.getpid()}1"
    monkeypatch.setenv("UNPICKLED", str(tmp_path / "made"))
    here = slurm(0, 2, job, MOTLEY_START_TIMEOUT="8")
    _, _, port = meeting_point(read_launch(here), here)
    first = start(here)
    stranger = slurm(1, 2, job, MOTLEY_START_TIMEOUT="3", MOTLEY_SECRET="another")
    with pytest.raises(MotleyError, match=r"another secret listens there; set MOTLEY_SECRET"):
        TcpRanks(read_launch(stranger), stranger)

    def pickles() -> None:
        with Client(("localhost", port)) as line:
            line.send_bytes(pickle.dumps(Unpickled()))

    threading.Thread(target=pickles, daemon=True).start()
    _, errors = first.communicate(timeout=LIMIT_S)
    assert "1 of 2 ranks did not connect to rank 0 within 8 s" in errors
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_NODELIST": "n[1-"}, "not a list of Slurm's nodes"),
        ({"SLURM_NODELIST": ""}, "does not name the address of rank 0"),
        ({"SLURM_NODELIST": "-oProxyCommand=x"}, "-oProxyCommand"),
    ],
)
def test_an_environment_that_names_no_node_is_refused(environ: dict[str, str], words: str) -> None:
    environ = slurm(1, 2, 1, **environ)
    assert read_launch(environ).by is Launcher.SLURM
    with pytest.raises(MotleyError, match=words):
        meeting_point(read_launch(environ), environ)


def test_ranks_of_srun_with_pmix_meet_without_mpi_where_they_are_to() -> None:
    environ = slurm(1, 2, 1, PMIX_RANK="1")
    assert read_launch(environ).by is Launcher.MPI
    environ[WITHOUT_MPI] = "1"
    assert read_launch(environ).by is Launcher.SLURM
    environ["OMPI_COMM_WORLD_RANK"] = "1"  # of mpirun in an allocation
    assert read_launch(environ).by is Launcher.MPI


def test_the_first_node_of_the_step_is_met_wherever_the_allocation_begins() -> None:
    environ = slurm(1, 2, 1, SLURM_NODELIST="n[01-04]", SLURM_STEP_NODELIST="n[03-04]")
    assert meeting_point(read_launch(environ), environ)[1] == "n03"


def test_the_secret_is_made_once_and_not_taken_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = secret({})
    path = tmp_path / ".motley" / "secret"
    assert secret({}) == first == path.read_text() and len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    path.chmod(0o644)
    with pytest.raises(MotleyError, match="others can read it"):
        secret({})
    assert secret({"MOTLEY_SECRET": "given"}) == "given"

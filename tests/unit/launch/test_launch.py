"""Who am I of how many, and where: the parts of launching that need no launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT, environment

from motley.cluster.facts import read_node
from motley.errors import MotleyError
from motley.launch import process
from motley.launch.process import keep_caches_local, launched_rank, stop_usage
from motley.launch.ranks import check_size
from motley.launch.world import (
    port_of_user,
    reserve_port,
    set_rank_variables,
    why_not_free,
)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"SLURM_PROCID": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1),  # mpirun inside an allocation
        ({"ROLE_RANK": "4", "PMIX_RANK": "1", "SLURM_PROCID": "1"}, 4),  # torchrun inside srun
    ],
)
def test_rank_from_the_launchers_environment(environ: dict[str, str], rank: int) -> None:
    assert launched_rank(environ) == rank


@pytest.mark.parametrize(
    ("ranks", "first", "allowed", "said"),
    [(5, 0, 1044, ""), (500, 1, 3024, ""), (3900, 1, 4096, ""), (5000, 0, 4096, ""),
     (5000, 1, 4096, "needs 5064 open files")],
)  # fmt: skip
def test_a_rank_may_open_as_many_files_as_there_are_ranks(
    ranks: int, first: int, allowed: int, said: str
) -> None:
    script = (
        "import resource, sys; from motley.launch.process import allow_files; "
        "from motley.errors import MotleyError\n"
        f"try: allow_files({ranks}, bool({first}))\n"
        "except MotleyError as error: print(error, file=sys.stderr)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    soft = "64" if ranks == 5 else "1024"
    command = ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn 4096; exec "$@"', "-"]
    done = subprocess.run(
        [*command, sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=environment(PYTHONPATH=str(ROOT / "src")),
    )  # fmt: skip
    assert said in done.stderr and bool(done.stderr) == bool(said)
    assert int(done.stdout) == allowed


def test_what_the_user_set_is_not_overwritten() -> None:
    environ = {"RANK": "3"}
    with pytest.raises(MotleyError, match="RANK=3"):
        set_rank_variables({"RANK": 0}, environ)
    environ = {}
    set_rank_variables({"RANK": 0, "WORLD_SIZE": 2}, environ)
    assert environ == {"RANK": "0", "WORLD_SIZE": "2"}


def test_ranks_that_cannot_see_each_other_are_refused() -> None:
    with pytest.raises(MotleyError, match="--mpi=none"):
        check_size(1, {"SLURM_STEP_NUM_TASKS": "5"})
    with pytest.raises(MotleyError, match="5 ranks, but MPI finds one"):
        check_size(1, {"PMI_SIZE": "5"})
    check_size(5, {"SLURM_STEP_NUM_TASKS": "5"})
    check_size(1, {"SLURM_STEP_NUM_TASKS": "5", "OMPI_COMM_WORLD_SIZE": "1"})


def test_a_reserved_port_is_nobodys_but_can_be_listened_on() -> None:
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("127.0.0.1", port))
        with socket.socket() as store:  # as torch's TCPStore does
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "29500.0", "http", "\u0663", "9" * 5000])
def test_a_master_port_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MotleyError, match=r"on rank 1 is not a port; .* from 1 to 65535"):
        port_of_user([None, text])


def test_a_master_port_of_some_ranks_is_that_of_all() -> None:
    assert port_of_user([None, None]) is None
    assert port_of_user(["29500", None, "29500"]) == 29500
    with pytest.raises(
        MotleyError, match="29500 on rank 0 and 29501 on rank 2; set it to the same port"
    ):
        port_of_user(["29500", None, "29501"])


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert why_not_free(port) == "another program listens on it"
    assert why_not_free(port) == ""


def test_caches_go_to_a_folder_that_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"motley-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"motley-{os.getuid()}").chmod(0o777)  # somebody prepared it
    environ = {"TRITON_CACHE_DIR": "/mine"}
    keep_caches_local(environ)
    folder = Path(environ["TORCH_EXTENSIONS_DIR"]).parent
    assert folder != tmp_path / f"motley-{os.getuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    assert environ["TRITON_CACHE_DIR"] == "/mine"


@pytest.mark.parametrize("says", ["NVIDIA-SMI has failed because ...", "No devices were found"])
def test_a_broken_driver_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert read_node().devices == ()


def test_this_machine_has_facts() -> None:
    node = read_node()
    assert node.host == socket.gethostname()
    assert node.cores >= 1 and node.memory_total_mib > 100
    assert any(interface.address == "127.0.0.1" for interface in node.interfaces)


def test_a_rank_that_is_done_takes_nothing_apart_and_lets_all_others_finish() -> None:
    script = """
import atexit, time
from concurrent.futures import ThreadPoolExecutor
from motley.launch.process import end_at_once

class Imported:
    def __del__(self):
        print("taken apart")

kept = Imported()
atexit.register(print, "atexit")
ThreadPoolExecutor().submit(lambda: (time.sleep(0.3), print("thread")))
end_at_once(lambda: print("finalized", end=""))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=environment(PYTHONPATH=str(ROOT / "src")),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("thread\natexit\nfinalized", "")


@pytest.mark.parametrize(("rank", "where"), [("0", ""), ("1", "rank 1 on ")])
def test_a_rank_with_an_error_of_its_own_names_itself(
    rank: str, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    monkeypatch.setattr(process, "_FIRST_SAYS_S", 0.0)
    with pytest.raises(SystemExit) as stopped:
        stop_usage("there is no such file")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"motley: {where}")

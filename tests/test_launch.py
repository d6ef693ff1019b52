"""Who am I of how many, and where: the parts of launching that need no launcher."""

import os
import socket
from pathlib import Path

import pytest

from motley.errors import MotleyError
from motley.facts import Interface, read_node
from motley.launch import (
    Network,
    check_slurm,
    choose_networks,
    keep_caches_local,
    launched_rank,
    reserve_port,
    set_rank_variables,
)

DOCKER = Interface("docker0", "172.17.0.1", 16)
LOOPBACK = Interface("lo", "127.0.0.1", 8)


def test_the_shared_subnet_is_found_under_three_interface_names() -> None:
    # The real lab's names; docker0 is listed first on every host with one and the same address.
    lab = {
        0: (DOCKER, LOOPBACK, Interface("eno1", "129.97.92.168", 24)),
        1: (DOCKER, LOOPBACK, Interface("enp4s0f1", "129.97.92.169", 24)),
        4: (DOCKER, Interface("enp0s31f6", "129.97.92.187", 24), LOOPBACK),
    }
    names = {0: "ecetesla0", 1: "ecetesla1", 4: "ecetesla3"}
    assert choose_networks(lab, names, {}) == {
        0: Network("eno1", "129.97.92.168"),
        1: Network("enp4s0f1", "129.97.92.169"),
        4: Network("enp0s31f6", "129.97.92.187"),
    }


def test_the_users_interface_is_preferred() -> None:
    hosts = {
        0: (Interface("slow", "10.0.0.1", 24), Interface("fast", "10.1.0.1", 24)),
        1: (Interface("slow", "10.0.0.2", 24), Interface("fast", "10.1.0.2", 24)),
    }
    chosen = choose_networks(hosts, {0: "a", 1: "b"}, {"NCCL_SOCKET_IFNAME": "fast"})
    assert chosen[1] == Network("fast", "10.1.0.2")


def test_no_shared_subnet_is_an_error_that_shows_what_was_found() -> None:
    hosts = {
        0: (DOCKER, Interface("eth0", "10.0.0.1", 24)),
        1: (DOCKER, Interface("eth0", "10.9.0.2", 24)),
    }
    with pytest.raises(MotleyError, match=r"a: docker0 .*; b: .*eth0 10\.9\.0\.2/24"):
        choose_networks(hosts, {0: "a", 1: "b"}, {})


def test_one_machine_talks_over_loopback() -> None:
    assert choose_networks({0: (DOCKER,)}, {0: "a"}, {}) == {0: Network("lo", "127.0.0.1")}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"SLURM_PROCID": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1),  # mpirun inside an allocation
    ],
)
def test_rank_from_the_launchers_environment(environ: dict[str, str], rank: int) -> None:
    assert launched_rank(environ) == rank


def test_what_the_user_set_is_not_overwritten() -> None:
    environ = {"RANK": "3"}
    with pytest.raises(MotleyError, match="RANK=3"):
        set_rank_variables({"RANK": 0}, environ)
    environ = {}
    set_rank_variables({"RANK": 0, "WORLD_SIZE": 2}, environ)
    assert environ == {"RANK": "0", "WORLD_SIZE": "2"}


def test_slurm_without_pmix_is_said() -> None:
    with pytest.raises(MotleyError, match="--mpi=pmix"):
        check_slurm(1, {"SLURM_STEP_NUM_TASKS": "5"})
    check_slurm(5, {"SLURM_STEP_NUM_TASKS": "5"})
    check_slurm(1, {"SLURM_STEP_NUM_TASKS": "5", "OMPI_COMM_WORLD_SIZE": "1"})


def test_a_reserved_port_is_nobodys_but_can_be_listened_on() -> None:
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("127.0.0.1", port))
        with socket.socket() as store:  # as torch's TCPStore does
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()


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

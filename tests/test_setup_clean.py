"""What ends leftover training processes ends those, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conftest import ROOT, Done, venv, wait_until
from lab_door import Door, lab_up

from motley.cluster import processes
from motley.cluster.orphans import Found, state

SCRIPT = ROOT / "setup" / "clean_cn.sh"
LINGER = "tests/drivers/linger.py"

RANK = Found(7, 70, 5.0, "rank 0", "rank", (), None, ("c0.lab", 41), True, True, False)
BY_HAND = replace(RANK, head=None, launched=False, held=False)


@pytest.mark.parametrize(
    ("process", "mpiruns", "expected"),
    [
        (RANK, [("c0", [40, 41])], "running"),
        (RANK, [("c0", [40])], "leftover"),
        (RANK, [("c0", [40]), ("c0", [41])], "running"),  # machines of one name
        (RANK, [("c1", [41])], "unknown"),  # its head was not asked
        (replace(RANK, held=False, orphan=True), [("c1", [])], "leftover"),
        (replace(RANK, kind="daemon", orphan=True), [("c1", [])], "unknown"),
        (replace(RANK, head=None), [("c0", [])], "running"),  # Open MPI 4.1, Slurm
        (replace(RANK, head=None, held=False), [("c0", [])], "leftover"),
        (BY_HAND, [], "running"),
        (replace(BY_HAND, orphan=True), [], "unknown"),
        (replace(RANK, kind="mpirun", head=None, launched=False, held=False), [], "running"),
    ],
)
def test_a_leftover_is_what_nobody_waits_for(
    process: Found, mpiruns: list[tuple[str, list[int]]], expected: str
) -> None:
    assert state(process, mpiruns) == expected


def test_a_pid_that_was_used_again_is_left_alone() -> None:
    job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = processes.ticks(job.pid)
        assert processes.end([(job.pid, start - 1)]) == {job.pid: "gone"}
        assert job.poll() is None
        assert processes.end([(job.pid, start)]) == {job.pid: "ended"}
    finally:
        job.kill()
        job.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process: root's for nobody")
def test_a_process_of_another_user_is_left_alone() -> None:
    job = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        assert processes.end([(job.pid, processes.ticks(job.pid))]) == {job.pid: "gone"}
        assert job.poll() is None
    finally:
        job.kill()
        job.wait()


HOSTS = "[defaults]\nshell = 'tcsh'\n" + "".join(
    f"[[host]]\nname = 'c{number}'\naddress = '10.97.91.{number + 1}/24'\n" for number in range(2)
)
START = f"""
cd {ROOT}
PATH={venv()}/bin:$PATH exec mpirun -np 2 --map-by node --hostfile ~/hosts.txt -x MOTLEY_VENV \\
  ./entry_cn.sh {LINGER} $1
"""


@pytest.fixture
def lab() -> Iterator[Door]:
    """Two hosts."""
    with lab_up(HOSTS, keys=True) as made:
        yield made


def clean(lab: Door, *words: object) -> Done:
    """setup/clean_cn.sh on c0."""
    return lab.run("exec", "c0", "--", "bash", SCRIPT, "--hostfile", "hosts.txt", *words)


def lingering(lab: Door, host: str) -> dict[str, int]:
    """Pids of the ranks on a host, by the mark in their command line."""
    lines = lab.do("exec", "--root", host, "--", "ps", "-e", "-o", "pid=,args=").splitlines()
    ranks = [line.split() for line in lines if "-m motley.launch" in line and LINGER in line]
    return {words[-1]: int(words[0]) for words in ranks}


def launchers(lab: Door, host: str, mark: str) -> list[int]:
    """Pids of the mpirun or the daemons that have ``mark`` in their command line."""
    lines = lab.on(host, "ps", "-e", "-o", "pid=,comm=,args=").splitlines()
    found = [line.split() for line in lines if mark in line]
    return [int(words[0]) for words in found if words[1] in ("prterun", "prted")]


@pytest.mark.mpi
def test_leftovers_on_two_hosts_are_ended_and_nothing_else(lab: Door) -> None:
    jobs = [lab.start("exec", "c0", "--", "bash", "-c", START, "start", m) for m in ("old", "new")]
    alike = f"cd {ROOT} && exec ./entry_cn.sh {LINGER} other"
    jobs.append(lab.start("exec", "--root", "c0", "--", "sh", "-c", alike))
    try:
        wait_until(lambda: set(lingering(lab, "c0")) == {"old", "new", "other"}, 20)
        wait_until(lambda: set(lingering(lab, "c1")) == {"old", "new"}, 20)
        done = clean(lab)
        assert done.code == 0 and "nothing is left over" in done.output
        assert done.output.count("running") == done.output.count("\nc")

        # The old job's mpirun and daemons are killed, as by the kernel's out-of-memory killer.
        (mpirun,) = launchers(lab, "c0", f"{LINGER} old")
        lab.on("c1", "kill", "-KILL", *launchers(lab, "c1", f"prterun-c0-{mpirun}@"))
        lab.run("exec", "c0", "--", "kill", "-KILL", mpirun)
        lab.on("c1", "kill", "-STOP", lingering(lab, "c1")["old"])  # and SIGTERM is no help
        before = {host: lingering(lab, host) for host in ("c0", "c1")}
        assert "old" in before["c0"] and "old" in before["c1"]

        assert clean(lab).code == 1  # no terminal, no yes
        done = clean(lab, "--dry-run")
        old = f"c0 {before['c0']['old']}, c1 {before['c1']['old']}"
        assert done.code == 0 and f"would end 2 processes: {old}\n" in done.output
        assert {host: lingering(lab, host) for host in before} == before

        command = f"bash {SCRIPT} --hostfile hosts.txt"  # on a terminal, where somebody says yes
        said = lab.do("exec", "c0", "--", "script", "-qec", command, "/dev/null", stdin="y\n")
        assert f"c0: ended {before['c0']['old']}" in said, said
        assert f"c1: killed {before['c1']['old']}" in said
        assert set(lingering(lab, "c0")) == {"new", "other"}
        assert set(lingering(lab, "c1")) == {"new"}

        assert clean(lab, "--running", "--yes").code == 0
        assert set(lingering(lab, "c0")) == {"other"} and not lingering(lab, "c1")
        assert clean(lab).output == "nothing is left over\n"
    finally:
        for job in jobs:
            job.kill()

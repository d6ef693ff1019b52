"""Motley under the launchers that people have: Debian's Open MPI 4.1, Slurm, and not as root."""

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, environment, needs

pytestmark = pytest.mark.mpi

WHO = """
import os
from motley import launch
from motley.team import join_team, leave_team

def main(world):
    team = join_team(world)
    who = f"rank {team.rank} of {team.size}, local {os.environ['LOCAL_RANK']}"
    print(f"{who}, {world.network.address}", flush=True)
    leave_team()

launch.run(main)
"""


@pytest.fixture
def who(tmp_path: Path) -> Path:
    """A script in which each rank says who it is, over a process group."""
    tmp_path.chmod(0o755)
    script = tmp_path / "who.py"
    script.write_text(WHO)
    return script


def said(output: str) -> set[str]:
    return {line.strip() for line in output.splitlines() if line.startswith("rank ")}


def expected(size: int) -> set[str]:
    return {f"rank {rank} of {size}, local {rank}, 127.0.0.1" for rank in range(size)}


def test_debians_open_mpi_4(who: Path) -> None:
    needs("mpirun.openmpi", "Open MPI 4.1")
    done = subprocess.run(
        ["mpirun.openmpi", "--oversubscribe", "-np", "3", "./entry_cn.sh", who], cwd=ROOT,
        text=True, capture_output=True, timeout=120, check=False,
        env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(done.stdout) == expected(3)


SLURM = """
ClusterName=motley
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES OverSubscribe=FORCE:8 State=UP
"""

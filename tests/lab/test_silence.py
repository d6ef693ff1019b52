"""A host or rank that falls silent is named within 30 s, all end, and a short pause is survived."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jobs import wait_until
from lab_door import Door
from lab_job import EARLY, FOURTH, LATE, NAMES, LabJob, still_lab
from long_runs import goes_on, steps_done
from project import DDP

from motley.live.follow import RunFollower
from motley.live.snapshot import take_snapshot
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

# Small and quick to start; its faults go where all hosts see them.
LOOP = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from motley.launch.world import run
from motley.faults import Phase
from motley.measure.process_group import join_process_group

def main(world):
    join_process_group(world)
    world.supervisor.step = 7
    faults = Path.home() / f"{sys.argv[1]}.faults"
    world.supervisor.on_fault = lambda fault: faults.open("a").write(fault.line() + "\\n")
    for number in range(100000):
        world.supervisor.set_status(Phase.FORWARD, 100)
        dist.all_reduce(torch.ones(9))
        if world.rank == 0 and number == 9:
            (Path.home() / f"{sys.argv[1]}.begun").touch()
        time.sleep(0.05)

run(main)
"""

# The last rank is not there yet.
SLOW = """
import os, sys, time
from pathlib import Path
from motley.launch.world import run

if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    (Path.home() / "early.begun").touch()
    time.sleep(15)
run(lambda world: None)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    """Three hosts that reach each other by ssh."""
    with still_lab() as made:
        made.on(NAMES[0], "sh", "-c", "cat >loop.py", stdin=LOOP)
        made.on(NAMES[0], "sh", "-c", "cat >slow.py", stdin=SLOW)
        yield made


def launcher_on(job: LabJob, host: str) -> int:
    """The process that started the ranks of a host."""
    ranks = (psutil.Process(pid) for pid in job.left(host))
    parents = {
        rank.ppid() for rank in ranks if rank.cmdline()[1:4] == ["-P", "-m", "motley.launch"]
    }
    (parent,) = parents
    return parent


def loop(lab: Door, name: str, keepalive: tuple[int, int, int], *others: str) -> LabJob:
    """LOOP on the head and other hosts."""
    return LabJob(lab, name, keepalive, (NAMES[0], *others), f"~/loop.py {name}", f"{name}.begun")


def test_a_training_survives_short_pauses_and_ends_by_a_frozen_host(lab: Door) -> None:
    words = f"{DDP} --epochs 500 --batch-size 48 --hosts all --logs ~/logs --run ice"
    job = LabJob(lab, "ice", LATE, NAMES, words, "logs/ice/steps.rank0.jsonl").begin()
    folder = job.home / "logs" / "ice"
    for harm, undo in (("freeze", "thaw"), ("cut", "heal")):
        lab.do(harm, NAMES[2])
        time.sleep(3)
        lab.do(undo, NAMES[2])
        goes_on(lambda: steps_done(folder))
    lab.do("freeze", NAMES[2])
    wait_until(lambda: named(folder) == f"{NAMES[2]} (rank 2)", 8)  # long before it is a fault
    assert job.wait(35) != 0  # mpirun itself would wait for ever
    line, saved = job.said
    assert saved.startswith("motley: saved as of step ")
    assert f"rank 2 on {NAMES[2]}, step " in line and "silent" in line
    run = RunFolder(folder).read_run()
    assert run["status"] == "failed"
    failure = run["failure"]
    assert isinstance(failure, dict) and failure["host"] == NAMES[2]
    (fault,) = [e for e in RunFolder(folder).read_events() if e["event"] == "fault"]
    assert fault["host"] == NAMES[2]
    lab.do("thaw", NAMES[2])
    wait_until(lambda: not job.left(), 12)


def named(folder: Path) -> str:
    """Whom plots/watch.py calls silent first."""
    followed = RunFollower(RunFolder(folder))
    followed.look(time.monotonic(), time.time())
    said = take_snapshot(followed, time.time()).headline
    return said.partition(" has been silent")[0]


def test_a_lost_host_is_named_whoever_notices_first(lab: Door) -> None:
    cut, killed = loop(lab, "cut", LATE, NAMES[1], FOURTH), loop(lab, "kill", EARLY, NAMES[2])
    cut.begin()
    killed.begin()
    lab.do("cut", NAMES[1])
    lab.do("kill", NAMES[2])
    killed.wait(20)  # mpirun says 0 when it loses a host
    assert cut.wait(35) != 0
    for job, host in ((cut, NAMES[1]), (killed, NAMES[2])):
        assert len(job.said) == 1 and f"rank 1 on {host}, step 8: silent" in job.said[0]
    lab.do("heal", NAMES[1])
    lab.do("boot", NAMES[2])
    wait_until(lambda: not cut.left(), 12)
    # Each says what it can see, where it can write; who is cut off blames nobody else.
    by_itself, by_first = sorted(cut.faults, key=lambda line: "silent" in line)
    assert f"rank 1 on {NAMES[1]}, step 8: silent" in by_first
    assert (
        f"rank 1 on {NAMES[1]}, step 8: {NAMES[1]} has received nothing from any other host"
        in by_itself
    )


def test_a_frozen_head_leaves_nothing_running_elsewhere(lab: Door) -> None:
    job = loop(lab, "head", LATE, NAMES[1]).begin()
    assert job.left(NAMES[1])
    lab.do("freeze", NAMES[0])
    wait_until(lambda: not job.left(NAMES[1]), 35)
    assert len(job.faults) == 1 and f"rank 0 on {NAMES[0]}, step 8: silent" in job.faults[0]
    lab.do("thaw", NAMES[0])
    assert job.wait(20) != 0
    assert len(job.said) == 1 and f"rank 0 on {NAMES[0]}" in job.said[0]
    wait_until(lambda: not job.left(), 12)


@pytest.mark.turns
@pytest.mark.parametrize("what", ["daemon", "session", "late"])
def test_a_killed_daemon_or_its_ssh_is_no_ranks_fault(lab: Door, what: str) -> None:
    job = loop(lab, what, LATE, NAMES[1]).begin()
    pid = launcher_on(job, NAMES[1])
    if what == "session":
        (pid,) = (pid for pid in job.left(NAMES[0]) if psutil.Process(pid).name() == "ssh")
    mpirun = launcher_on(job, NAMES[0])
    if what == "late":  # by mpirun, which is as slow as the machine is busy
        os.kill(mpirun, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    if what == "late":
        time.sleep(1)
        os.kill(mpirun, signal.SIGCONT)
    job.wait(20)  # mpirun says 0 when it loses a host
    wait_until(lambda: bool(job.said), 10)
    print(job.said, job.faults)
    assert len(job.said) == 1 and f"the launcher lost {NAMES[1]}" in job.said[0]
    wait_until(lambda: not job.left(), 12)


def test_a_killed_launcher_is_named_and_blames_no_host(lab: Door) -> None:
    words = f"{DDP} --epochs 500 --batch-size 48 --hosts all --logs ~/logs --run nine"
    job = LabJob(lab, "nine", LATE, NAMES, words, "logs/nine/steps.rank0.jsonl").begin()
    os.kill(launcher_on(job, NAMES[0]), signal.SIGKILL)
    assert job.wait(20) != 0
    wait_until(lambda: not job.left(), 12)
    wait_until(lambda: bool(job.said), 10)
    assert len(job.said) == 1 and "the launcher (prterun, process " in job.said[0]
    run = RunFolder(job.home / "logs" / "nine").read_run()
    assert run["status"] == "failed"
    assert isinstance(run["failure"], dict) and run["failure"]["kind"] == "launcher lost"


def test_a_host_that_freezes_while_all_start_is_named(lab: Door) -> None:
    job = LabJob(
        lab, "early", LATE, NAMES, "~/slow.py", "early.begun", before="MOTLEY_START_TIMEOUT=5"
    ).begin()
    lab.do("freeze", NAMES[2])
    assert job.wait(40) != 0
    (line,) = job.said
    assert f"all ranks on {NAMES[0]} have started, so the host of one of ranks 1, 2" in line
    assert f"({', '.join(NAMES[1:])})" in line
    lab.do("thaw", NAMES[2])
    wait_until(lambda: not job.left(), 12)

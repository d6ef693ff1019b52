"""A rank that falls silent or hangs is named, and a short pause is survived."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import Jobs, processes_of, wait_until
from long_runs import goes_on, rank_process, start, status, steps_done
from project import DDP

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi


def test_a_stopped_rank_is_named_and_a_short_stop_is_not(jobs: Jobs) -> None:
    job = start(jobs, DDP)
    pid = rank_process(jobs.logs, 2)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)
    goes_on(lambda: steps_done(jobs.logs / "long"))
    os.kill(pid, signal.SIGSTOP)
    done = jobs.wait(job, 30)
    assert done.code != 0
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert re.search(r"rank 2 on .*, step \d+: silent for 1\d s: .*--resume auto", lines[0])
    assert all("saved as of step" in line for line in lines[1:])
    wait_until(lambda: not processes_of(str(jobs.logs)), 3)
    assert status(jobs)["status"] == "failed"
    fault = RunFolder(jobs.logs / "long").read_events()[-1]
    assert (fault["event"], fault["rank"]) == ("fault", 2) and fault["step"] > 10


BUSY = """
import ctypes
from motley.launch.world import run

def main(world):
    for rank, seconds in ((2, 18), (0, 21)):  # of rank 0 two others judge, one later than the other
        if world.rank == rank:
            ctypes.PyDLL(None).sleep(seconds)  # it keeps Python's lock: no thread of it runs
        world.allgather(None)
    print("rank", world.rank, "goes on")

run(main)
"""


def test_a_rank_whose_python_is_busy_is_not_taken_for_a_frozen_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    done = jobs.fork(3, script)
    assert done.code == 0, done.output
    assert sorted(re.findall(r"rank \d goes on", done.output)) == [
        f"rank {rank} goes on" for rank in range(3)
    ]
    assert "motley: " not in done.output


HANGING = """
import time, torch, torch.distributed as dist
from motley.launch.world import run
from motley.faults import Phase
from motley.measure.process_group import join_process_group

def main(world):
    join_process_group(world)
    world.supervisor.step = 7
    if world.rank == 1:
        world.supervisor.set_status(Phase.DATA, 3)
        time.sleep(1000)
    world.supervisor.set_status(Phase.ALL_REDUCE, 3)
    dist.all_reduce(torch.ones(9))

run(main)
"""


def test_a_rank_that_lives_and_hangs_is_named(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    done = jobs.run(2, script)
    assert done.code != 0
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert len(lines) == 1
    assert (
        "step 8: no rank has made progress" in lines[0] and "rank 1 is loading samples" in lines[0]
    )

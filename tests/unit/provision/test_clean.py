"""What is left over is known from what is not, and ends alone."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from motley.cluster import processes
from motley.cluster.orphans import TrainingProcess, state

RANK = TrainingProcess(7, 70, 5.0, "rank 0", "rank", (), None, ("c0.lab", 41), True, True, False)


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
    process: TrainingProcess, mpiruns: list[tuple[str, list[int]]], expected: str
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

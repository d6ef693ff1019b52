"""A job that cannot start says who is missing, ends, and leaves nothing."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import Jobs, processes_of, wait_until

pytestmark = pytest.mark.mpi

# The rank that is to be stopped waits for it.
STARTING = """
import os, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
if sys.argv[2] == "all" or (sys.argv[2] == "import" and rank == "1"):
    open(sys.argv[1] + "/here", "w").close()
    time.sleep(1000)
from motley.launch.world import World, run
if sys.argv[2] == "join":
    connect = World.connect
    def slow(world, packages):
        if world.rank == 1:
            open(sys.argv[1] + "/here", "w").close()
            time.sleep(1000)
        connect(world, packages)
    World.connect = slow
run(lambda world: print("started", flush=True))
"""


@pytest.mark.turns
@pytest.mark.parametrize(
    ("where", "stop", "says"),
    [
        ("import", True, "rank 1 on .* is stopped; start it again"),
        (
            "import",
            False,
            "rank 1 on .* is still importing its program; if the hosts are slow, allow",
        ),
        ("join", True, "rank 1 on .* is stopped; start it again"),
        ("join", False, "the ranks on .* wait for each other in MPI"),
    ],
)
def test_a_rank_that_does_not_start_is_named(
    jobs: Jobs, tmp_path: Path, where: str, stop: bool, says: str
) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    job = jobs.start(3, script, tmp_path, where, MOTLEY_START_TIMEOUT="4")
    wait_until((tmp_path / "here").exists, 60)
    pid = min(  # what it has started looks alike
        pid
        for pid in processes_of(str(script))
        if b"OMPI_COMM_WORLD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    if stop:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    done = jobs.wait(job, 30)
    assert time.monotonic() - begun < 20
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert "not all ranks have started within 4 s" in line
    assert re.search(says, line), line
    wait_until(lambda: not processes_of(str(script)), 3)


def test_where_all_are_stopped_while_they_import_they_are_named(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    job = jobs.start(2, script, tmp_path, "all", MOTLEY_START_TIMEOUT="4")
    wait_until((tmp_path / "here").exists, 60)

    def pids() -> list[int]:
        return [pid for pid in processes_of("-m\0motley.launch\0") if pid in ours()]

    def ours() -> list[int]:
        return processes_of(str(script))

    wait_until(lambda: len(pids()) == 2, 20)
    for pid in pids():
        os.kill(pid, signal.SIGSTOP)
    done = jobs.wait(job, 30)
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert re.search("within 4 s: rank 0 on .* is stopped; rank 1 on .* is stopped", line), line
    wait_until(lambda: not processes_of(str(script)), 3)


def test_the_time_to_start_is_a_number(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    done = jobs.run(2, script, tmp_path, "", MOTLEY_START_TIMEOUT="soon")
    assert done.code == 2
    (line,) = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert "MOTLEY_START_TIMEOUT=soon is not a number of seconds" in line

"""Lanes of tests at once: some wait while others compute.

A test with a lab waits for most of its time: for a host that is frozen, a cable that is cut, a
processor of which a host has a third. It says how long things take, so no other of its kind runs
beside it; those that only say what comes of it are another lane. Nor do two that start mpirun here,
and say how soon all has ended, run beside each other.
What compares two times that this machine takes has it alone, in the end, while the other workers
wait. All others only compute. They run file after file in whichever worker of pytest-xdist is
free, at a lower priority: they take what is left.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm.ranks import keep_place
from xdist.scheduler import LoadScopeScheduling

INSTALLS = ("lab_chain", "private", "launchers")
MPIRUN = (
    "ending", "silence", "starting", "setup_mpi", "same_code", "baselines", "infer", "rescue",
)  # fmt: skip
LANES = {
    "alone": (
        "tests/lab/test_connection.py",
        "tests/lab/test_lab.py",  # which compares what other labs change too
        "tests/lab/test_seen.py",  # how soon it is seen
        "tests/lab/test_start.py",
        "tests/mpi/test_causes.py",
        "tests/mpi/test_compile_keeper.py",  # which waits for a run's steps
        "tests/mpi/test_input.py",
        "tests/mpi/test_replan.py",
        "tests/unit/plotting/test_watch",  # how soon it is seen
        "tests/unit/measure/test_input.py",
    ),
    "installs": tuple(f"tests/lab/test_{name}.py" for name in INSTALLS),
    "labs": ("tests/lab/",),
    "mpirun": tuple(f"tests/mpi/test_{name}.py" for name in MPIRUN),
}
# A tenth of a processor's time beside a lane that says how soon things are, and a third.
PRIORITIES = {None: 10, "installs": 5}
# What takes longest comes first, so that no worker is left with it in the end.
ORDER = ("labs", "installs", "mpirun")


def lane_of(nodeid: str) -> str | None:
    """The lane of a test that has to do with time; None for one that only computes."""
    return next((lane for lane, paths in LANES.items() if nodeid.startswith(paths)), None)


def place_of(item: pytest.Item) -> tuple[int, ...]:
    """Where it comes: lanes, ranks, what computes here, and in the end what has all alone."""
    lane = lane_of(item.nodeid)
    folders = ("tests/mpi/test_fuzz_exact", "tests/mpi/", "tests/unit/")
    found = [n for n, start in enumerate(folders) if item.nodeid.startswith(start)]
    own = ORDER.index(lane) if lane in ORDER else len(ORDER)
    return int(lane == "alone"), own, *found[:1]


def times_again(item: pytest.Item) -> int:
    """How often a test is run again if it fails.

    What compares times: twice. What starts ranks: once, and the first failure is printed all the
    same, since two thousand such tests in one go meet whatever else a machine is busy with. What
    looks for faults by chance, and what only computes: never.
    """
    if lane_of(item.nodeid) == "alone":
        return 2
    by_chance = item.nodeid.startswith("tests/mpi/test_fuzz")
    return int(item.get_closest_marker("mpi") is not None and not by_chance)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a whole lane to one worker, and all else a file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        """See LoadScopeScheduling."""
        return lane_of(nodeid) or nodeid.partition("::")[0]


@contextlib.contextmanager
def machine(item: pytest.Item) -> Iterator[None]:
    """During a test: shared with the other worker's, or had alone.

    Two files of this clone are what the workers lock: whoever wants all of the machine keeps the
    door (this file) while it waits for the room (its folder's other file) to be empty.
    """
    alone = lane_of(item.nodeid) == "alone"
    with Path(__file__).open() as door, Path(__file__).with_name("project.py").open() as room:
        # Unlocked by name: processes that a test forks have these files open too.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)


def take_place(item: pytest.Item) -> None:
    """Before a test: this worker, and what it starts, has the priority of its lane."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    if os.getsid(0) != os.getpid():
        os.setsid()  # see keep_place
    with contextlib.suppress(PermissionError):  # only root gets a higher one back
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITIES.get(lane_of(item.nodeid), 0))
    keep_place(os.getpid())

"""Lanes of tests at once: some wait while others compute.

A test with a lab waits for most of its time: for a host that is frozen, a cable that is cut, a
processor of which a host has a third. It says how long things take, so no other of its kind runs
beside it; and no two that start mpirun here, and say how soon all has ended, run beside each other.
All others only compute. They run file after file in whichever worker of pytest-xdist is free. Each
has a lower priority than the one before it: it takes what is left.
"""

import contextlib
import os

import pytest
from xdist.scheduler import LoadScopeScheduling

LANES = {
    "labs": ("tests/lab/", "tests/mpi/test_replan.py"),  # which measures speeds
    "mpirun": tuple(
        f"tests/mpi/test_{name}.py"
        for name in ("ending", "silence", "setup_mpi", "same_code", "baselines", "infer")
    ),
}
NICENESS = {"labs": 0, "mpirun": 5, None: 10}


def lane_of(nodeid: str) -> str | None:
    """The lane of a test that has to do with time; None for one that only computes."""
    return next((lane for lane, paths in LANES.items() if nodeid.startswith(paths)), None)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a whole lane to one worker, and all else a file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        """See LoadScopeScheduling."""
        return lane_of(nodeid) or nodeid.partition("::")[0]


def take_place(item: pytest.Item) -> None:
    """Before a test: what it starts in this worker has the priority of its lane."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):  # only root gets a higher one back
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS[lane_of(item.nodeid)])

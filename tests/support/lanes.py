"""Two lanes of tests at once: some wait, the others compute meanwhile.

A test with a lab waits for most of its time: for a host that is frozen, a cable that is cut, a
processor of which a host has a third. It says how long things take, so it runs with no other of
its kind beside it, in one worker of pytest-xdist and first of all. The other worker runs what
computes, file after file, with a lower priority: that has time, and takes what is left.
"""

import contextlib
import os

import pytest
from xdist.scheduler import LoadScopeScheduling

TIMED = ("tests/lab/", "tests/mpi/test_replan.py")  # it measures speeds
LATER = 10  # the priority of all others


def is_timed(test: pytest.Item | str) -> bool:
    """Whether a test measures time, by its node id."""
    return (test if isinstance(test, str) else test.nodeid).startswith(TIMED)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all that is timed to one worker, and the others a file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        """See LoadScopeScheduling."""
        return "timed" if is_timed(nodeid) else nodeid.partition("::")[0]


def take_place(item: pytest.Item) -> None:
    """Before a test: what it starts in this worker has the priority of its lane."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):  # only root gets a higher one back
            os.setpriority(os.PRIO_PROCESS, 0, 0 if is_timed(item) else LATER)

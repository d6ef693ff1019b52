"""A host that is cut off is named within 3 s: in a terminal, and on a page."""

import re
import time
from collections.abc import Callable, Iterator

import pytest
from jobs import wait_until
from lab_door import Door
from lab_job import LATE, NAMES, LabJob, still_lab
from long_runs import steps_done
from project import DDP
from pseudo_terminal import PseudoTerminal
from watched_page import Headlines, served

pytestmark = pytest.mark.mpi

WORDS = f"{DDP} --epochs 500 --batch-size 48 --shares equal --hosts all --logs ~/logs"
WITHIN_S = 3.0
SEES_S = 12.0  # for which it is looked, so that a failure says how long it took


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    with still_lab() as made:
        yield made


class Watchers:
    """A terminal, and a page."""

    def __init__(self, terminal: PseudoTerminal, page: Headlines) -> None:
        self._terminal, self._page = terminal, page

    def named_after(self, harm: Callable[[], object], says: str) -> dict[str, float]:
        """Seconds from a harm until each says it; what has not, is not there."""
        harm()
        began, at = time.monotonic(), len(self._terminal.output)
        found: dict[str, float] = {}
        while len(found) < 2 and (now := time.monotonic() - began) < SEES_S:
            if re.search(says, self._page.last):
                found.setdefault("page", round(now, 2))
            if re.search(says, self._terminal.output[at:]):
                found.setdefault("terminal", round(now, 2))
            self._terminal.read(0.05)
        return found


def test_a_host_that_is_cut_off_is_named_within_3_s(lab: Door) -> None:
    run, cut = f"seen{time.monotonic_ns()}", NAMES[1]  # it may be run again
    words = f"{WORDS} --run {run}"
    job = LabJob(lab, run, LATE, NAMES, words, f"logs/{run}/steps.rank0.jsonl").begin()
    folder = job.home / "logs" / run
    wait_until(lambda: steps_done(folder) > 100, 60)
    with (
        served(folder) as address, Headlines(address, run) as page,
        PseudoTerminal("plots/watch.py", folder, columns=160, lines=30) as terminal,
    ):  # fmt: skip
        terminal.await_frame(lambda text: "of each step" in text)
        says = f"{cut} .rank 1. has been silent"
        found = Watchers(terminal, page).named_after(lambda: lab.do("cut", cut), says)
    lab.do("heal", cut)
    job.process.terminate()
    assert len(found) == 2 and max(found.values()) <= WITHIN_S, found

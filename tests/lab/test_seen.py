"""A host that becomes slow, and one that is cut off, are named within 3 s: in a terminal, and on a
page."""

import re
import time
from collections.abc import Callable, Iterator

import pytest
from jobs import wait_until
from lab_door import Door
from lab_job import LATE, NAMES, LabJob, still_lab
from long_runs import goes_on, steps_done
from project import DDP
from pseudo_terminal import PseudoTerminal
from watched_page import Headlines, served

pytestmark = pytest.mark.mpi

# Long epochs: in an evaluation nobody takes a step, and none tells who is slow.
DATA = "--dataset synthetic --model vit_digits --batch-size 48"
WORDS = f"{DDP} --epochs 500 {DATA} --shares equal --hosts all --logs ~/logs"
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


def test_a_slow_host_and_one_that_is_cut_off_are_named_within_3_s(lab: Door) -> None:
    run, slow, cut = f"seen{time.monotonic_ns()}", NAMES[2], NAMES[1]  # it may be run again
    words = f"{WORDS} --run {run}"
    job = LabJob(lab, run, LATE, NAMES, words, f"logs/{run}/steps.rank0.jsonl").begin()
    folder = job.home / "logs" / run
    wait_until(lambda: steps_done(folder) > 100, 60)
    with (
        served(folder) as address, Headlines(address, run) as page,
        PseudoTerminal("plots/watch.py", folder, columns=160, lines=30) as terminal,
    ):  # fmt: skip
        watchers = Watchers(terminal, page)
        terminal.await_frame(lambda text: "of each step" in text)
        says = f"waits for {slow} "
        # A sixth of what it uses. With a twentieth of a processor, of which its heartbeats take
        # their part too, nobody was named once in three times.
        slowed = watchers.named_after(lambda: lab.do("cpus", slow, "0.1"), says)
        lab.do("cpus", slow, "all")
        goes_on(lambda: steps_done(folder))
        says = f"{cut} .rank 1. has been silent"
        silent = watchers.named_after(lambda: lab.do("cut", cut), says)
    lab.do("heal", cut)
    job.process.terminate()
    print(slowed, silent)
    for found in (slowed, silent):
        assert len(found) == 2 and max(found.values()) <= WITHIN_S, (slowed, silent)

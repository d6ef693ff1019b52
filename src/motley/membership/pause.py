"""A pause: the job ends at a step boundary, the same on all ranks, with the whole state saved.

A pause is requested when a host leaves, or to add a missing host again. All ranks live, and every
engine can save its state, so no step is lost. Rank 0 asks all ranks which step they have started. A
rank that was asked starts no other step until rank 0 names the step to stop before. This step
follows the last step that any rank has started. All ranks take every step before this step, and
therefore do not block each other.

    member                               coordinator
    HostLeaves("leaves as asked")  -------->  or PauseRequest(), after a signal
                                   <--------  AskStep()
    StepBegun(17)                  -------->
                                   <--------  PauseBefore(18)
    RankLeft()                     -------->  from a host that leaves, once the state is saved
    Paused("saved as of ...")      -------->  the end of the job
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Mapping

from motley.faults import Fault
from motley.membership.away import read_away
from motley.membership.detector import RankStatus
from motley.membership.fault_causes import make_leave_fault, make_pause_fault
from motley.membership.protocol import AskStep, HostLeaves, Message, PauseRequest, encode

# Requests to a rank by signal; only its own user and root can send one.
LEAVE_SIGNAL = signal.SIGUSR1  # this machine was marked as away: see motley.membership.away
PAUSE_SIGNAL = signal.SIGUSR2  # save, and end
REQUESTS = (LEAVE_SIGNAL, PAUSE_SIGNAL)


def read_request(number: int) -> Message | None:
    """Return the message that this rank has to send to rank 0 after a signal, or None.

    Args:
        number: number of the signal, one of ``REQUESTS``.
    """
    if number == PAUSE_SIGNAL:
        return PauseRequest()
    away = read_away()
    return HostLeaves(away.words()) if away else None


class OwnPause:
    """This rank's side of a pause: the step before which the rank stops.

    The training thread asks before each step if the step may start, and the watching thread sets
    the step to stop before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: int | None = None
        self._asked = False
        self._at: int | None = None

    def begin(self, step: int) -> bool:
        """Return True if this rank may start the step.

        If a pause is requested, first wait until rank 0 has named the step to stop before.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._asked or self._at is not None)
            if self._at is not None and step >= self._at:
                return False
            self._begun = step
            return True

    def clear(self) -> None:
        """Drop all requests to this rank, since the group that made them no longer exists."""
        with self._changed:
            self._asked, self._at, self._begun = False, None, None
            self._changed.notify_all()

    def ask_step(self) -> int | None:
        """Let the training start no further step for now; return the last started step, or None."""
        with self._changed:
            self._asked = True
            return self._begun

    def stop_before(self, step: int | None) -> None:
        """Allow the training to start the steps before ``step``, and no later step."""
        with self._changed:
            self._asked, self._at = True, step
            self._changed.notify_all()


class PauseAgreement:
    """Rank 0's side of a pause: the requests, and the answers of the ranks.

    Args:
        size: number of ranks.

    Attributes:
        wanted: True once a rank has requested a pause.
        at: the step before which all ranks stop; None until rank 0 has chosen it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._leaving: dict[str, tuple[int, str]] = {}  # by host: one of its ranks, and the reason
        self._asked: set[int] = set()
        self._begun: dict[int, int | None] = {}
        self.wanted = False
        self.at: int | None = None

    def clear(self, size: int) -> None:
        """Drop all answers, and ask all ``size`` ranks of a new group again."""
        self._size, self.at = size, None
        self._asked.clear()
        self._begun.clear()

    def want(self, rank: int, host: str, leaves: str | None) -> None:
        """Record that a rank requests a pause.

        Args:
            rank: number of the rank in the launch.
            host: host of the rank.
            leaves: reason for which the host leaves; None: a user has requested the pause.
        """
        self.wanted = True
        if leaves is not None:
            self._leaving.setdefault(host, (rank, leaves))

    def ask(self, others: Mapping[socket.socket, RankStatus], own: OwnPause) -> bool:
        """Send AskStep to every connected rank that was not asked yet, if a pause is requested.

        Args:
            others: status of every rank but 0, by the connection to the rank.
            own: pause of rank 0.

        Returns:
            True if all ranks have answered by now.
        """
        if not self.wanted:
            return False
        for line, status in others.items():
            if self._is_new(status.rank):
                with contextlib.suppress(OSError):
                    line.sendall(encode(AskStep()))
        return self._is_new(0) and self.answer(0, own.ask_step())

    def _is_new(self, rank: int) -> bool:
        """Return True if a rank was not asked yet, and record that it is asked now."""
        new = rank not in self._asked
        self._asked.add(rank)
        return new

    def answer(self, rank: int, begun: int | None) -> bool:
        """Record the last step that a rank has started; return True if all ranks have answered."""
        self._begun[rank] = begun
        if len(self._begun) < self._size:
            return False
        steps = [step for step in self._begun.values() if step is not None]
        self.at = max(steps) + 1 if steps else None
        return True

    def fault(self, step: int | None) -> Fault:
        """Return the fault that states why the job ends.

        Args:
            step: last step whose state is saved; None: no state was saved.
        """
        if not self._leaving:
            return make_pause_fault(step)
        hosts = list(self._leaving)
        rank = self._leaving[hosts[0]][0]
        who = ", and ".join(f"{host} {words}" for host, (_, words) in self._leaving.items())
        return make_leave_fault(rank, hosts, step, who)

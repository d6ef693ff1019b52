"""The coordinator's part in a regroup: all surviving ranks form a new process group.

The coordinator first makes all survivors copy their training state, and then makes them continue.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

from motley.faults import Fault
from motley.membership.detector import RankStatus
from motley.membership.own_rank import OwnRank, format_fault
from motley.membership.protocol import Gathered, GoOn, KeepState, Message, StateKept
from motley.membership.survivors import RegroupState, Survivors, parts

# A launcher that does not let ranks outlive one of them ends the others within this time: Open MPI
# 4.1 takes 1 s.
_LAUNCHER_S = 5.0


class Regroup:
    """The steps of a regroup that the watching thread of rank 0 runs.

    Args:
        own: state of this rank.
        regrouping: the lost ranks, and the ranks that are ready to continue without them.
        broadcast: function that sends a message to all other ranks.
        record: function that records an event of the run.
    """

    def __init__(
        self,
        own: OwnRank,
        regrouping: RegroupState,
        broadcast: Callable[[Message], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self._own, self._regrouping = own, regrouping
        self._broadcast, self._record = broadcast, record
        self._last: tuple[Fault, float] | None = None  # the last loss, and when the others went on

    @property
    def is_running(self) -> bool:
        """True from the loss of a rank until all ranks are sent the list of survivors."""
        return self._regrouping.first is not None

    @property
    def waits(self) -> bool:
        """True from the loss of a rank until all survivors have left the broken group."""
        return self._regrouping.waits

    @property
    def recent_loss(self) -> Fault | None:
        """Fault of a rank that was lost so recently that the launcher may still end all ranks.

        None: no rank was lost so recently.
        """
        if self._last is None or time.monotonic() > self._last[1] + _LAUNCHER_S:
            return None
        return self._last[0]

    def note_host_alive(self, rank: int) -> None:
        """Record that the host of a lost rank lives; see RegroupState."""
        self._regrouping.note_host_alive(rank)

    def lose(self, rank: int, fault: Fault, left: Collection[RankStatus]) -> bool:
        """Make the other ranks copy their state after a loss; return False if the job must end.

        Args:
            rank: number of the lost rank in the present group.
            fault: fault of the lost rank.
            left: status of each other rank.
        """
        running = self.is_running
        if not self._regrouping.lose(rank, fault, left):
            return False
        if not running:
            self._broadcast(KeepState())
            self._own.send(StateKept(self._own.keep_state()))
        return True

    def note_kept(self, status: RankStatus, problem: str) -> Fault | None:
        """Record a rank's answer to KeepState.

        Args:
            status: status of the rank.
            problem: the reason why the rank could not copy its state; empty if the copy succeeded.

        Returns:
            The fault that ends the job if the rank could not copy its state, else None.
        """
        if problem:
            return self._regrouping.first
        self._regrouping.note_kept(status.rank)
        return None

    def gather(self, status: RankStatus, value: str) -> None:
        """Store a rank's value, and send the values of all ranks once all have arrived."""
        if (values := self._regrouping.gather(status.rank, value)) is not None:
            for part in parts(values):
                self._broadcast(Gathered(part))
            self._own.change.gathered.put(values)

    def overdue(self, left: Collection[RankStatus]) -> Fault | None:
        """Return the fault that ends the job if a rank delays the regroup too long, or None."""
        return self._regrouping.overdue(left)

    def go_on(self, left: Collection[RankStatus]) -> Survivors | None:
        """Make the remaining ranks form a new group with new numbers, once all are ready.

        Returns:
            The survivors; None if some rank is not ready yet.
        """
        survivors = self._regrouping.survivors(left)
        if survivors is None:
            return None
        own, lost = self._own, survivors.lost
        faults = self._regrouping.faults
        lines = [format_fault(fault) for fault in faults]
        own.print(
            "\n".join(lines) + (f"; {len(survivors.ranks)} of {own.place.size} ranks continue")
        )
        for fault in faults:
            self._record({"kind": "lost", "rank": fault.rank, "host": fault.host,
                          "step": fault.step, "error": fault.error})  # fmt: skip
        self._regrouping.begin_anew(survivors)
        self._last = lost, time.monotonic()
        self._broadcast(GoOn(survivors))
        for status in left:
            status.rank = survivors.ranks.index(status.rank)
            status.done = status.rescues = False
        own.go_on(survivors)
        return survivors

"""How rank 0 ends a job: the first cause is recorded and said, what all hold saved, all told."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

from motley.faults import Fault, FaultKind
from motley.launch.background_writer import BackgroundWriter
from motley.launch.job_faults import daemon_gone
from motley.launch.own_rank import OwnRank, line_of
from motley.launch.save_before_end import save_before_end
from motley.launch.watchdog import RankStatus

# Faults after which what the others hold is right, and worth to be saved.
RESCUED = {*FaultKind} - {
    FaultKind.NOT_FINITE, FaultKind.REFUSED, FaultKind.STOPPED,
    FaultKind.LEFT, FaultKind.PAUSED,  # all was saved before
}  # fmt: skip
_SESSION_S = 0.2  # from the death of a rank by its daemon's to the end of the session to its host
_HOST_LOST_S = 1.0  # that mpirun may take, which would wait for its daemon there
_RECORD_S = 5.0  # that the record of a fault may take; the job ends anyway


class JobEnd:
    """The end of a job, from rank 0's watching thread.

    Args:
        on_fault: records the first cause. tell_all: sends a message to all other ranks.
    """

    def __init__(
        self,
        own: OwnRank,
        writer: BackgroundWriter,
        on_fault: Callable[[Fault], None],
        tell_all: Callable[[dict[str, Any]], None],
    ) -> None:
        self._own, self._writer = own, writer
        self._on_fault, self._tell_all = on_fault, tell_all

    def end(
        self, fault: Fault, phases: Mapping[int, str], others: Mapping[socket.socket, RankStatus]
    ) -> NoReturn:
        """Record the first cause, say it, and end all ranks.

        Args:
            phases: what each rank last said that it is at, by its number in the launch.
            others: all ranks but 0.
        """
        fault = self._launchers_loss(fault)
        fault = replace(fault, phase=fault.phase or phases.get(fault.rank, ""))
        self._writer.write(partial(self._on_fault, fault))
        self._writer.flush(_RECORD_S)
        if fault.details:
            self._own.print(fault.details)
        self._own.print(line_of(fault))
        if fault.kind in RESCUED and not fault.signal:
            save_before_end(self._own, others, fault.rank, self._tell_all)
        if fault.kind is FaultKind.HOST_LOST and self._own.reaper:
            self._own.reaper.tell(timeout_s=_HOST_LOST_S)
        self._tell_all({"stop": fault.code})
        time.sleep(0.1)  # let the others read it
        self._own.leave(fault.code)

    def _launchers_loss(self, fault: Fault) -> Fault:
        """The same, unless the launcher has lost the host of a rank that died, which dies of it."""
        own = self._own
        if fault.kind is not FaultKind.KILLED or fault.host == own.host or not own.reaper:
            return fault
        own.reaper.tell(fault=asdict(fault))  # should mpirun end this rank meanwhile
        address = own.listening[own.numbers.index(fault.rank)].address
        if not own.reaper.lost_session({fault.host, address}, _SESSION_S):
            return fault
        own.stopped = True  # mpirun passes nothing on any more
        return daemon_gone(fault.rank, fault.host, fault.step)

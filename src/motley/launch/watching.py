"""The thread in which a rank watches, by its one connection to the first rank, or by all of theirs
if it is the first itself: from the start on, or once rank 0 is lost. See motley.launch.supervisor.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from motley.faults import Fault, fault_of
from motley.launch import fault_handler
from motley.launch.background_writer import BackgroundWriter
from motley.launch.handshakes import Handshakes, Listening, greeting
from motley.launch.launcher_reaper import LauncherReaper
from motley.launch.own_rank import OwnRank, line_of
from motley.launch.survivors import Regrouping, standby_of
from motley.launch.watch_all import ARRIVE_S, AllRanksWatch
from motley.launch.watch_first import FirstRankWatch

_CONNECT_S = 30.0  # that rank 0 may take to answer, while all start


class Watching:
    """One rank's: :meth:`listen`, then :meth:`start`.

    Args:
        own: what the rank says of itself. on_fault, on_event: see Supervisor.
    """

    def __init__(
        self,
        own: OwnRank,
        on_fault: Callable[[Fault], None],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._own, self._on_fault, self._on_event = own, on_fault, on_event
        self._writer: BackgroundWriter | None = None  # on the first rank
        self._watch: AllRanksWatch | FirstRankWatch | None = None  # once it has started

    def listen(self, address: str) -> Listening:
        """See Supervisor."""
        listener = socket.create_server((address, 0), backlog=1024)
        self._handshakes = Handshakes(listener, self._own.host, self._own.size)
        return self._handshakes.listening

    def start(self) -> None:
        """Connect, and watch from now on."""
        self._watch = self._connected(0, _CONNECT_S) if self._own.rank else self._as_first()
        threading.Thread(target=self._guard, name="supervisor", daemon=True).start()

    @property
    def started(self) -> bool:
        """Whether a fault of this rank would be heard."""
        return self._watch is not None

    @property
    def lines(self) -> list[socket.socket]:
        """Its connections."""
        return self._watch.lines if self._watch else []

    def flush(self) -> None:
        """Wait until what was told is recorded; on the first rank.

        Raises:
            Exception: what kept it from being recorded.
        """
        if self._writer is not None:
            self._writer.flush()
            if self._writer.error is not None:  # of what was told last
                raise self._writer.error

    def _as_first(self, lost: Fault | None = None) -> AllRanksWatch:
        """Be the rank that watches all.

        Args:
            lost: why rank 0, which has been so far, cannot.
        """
        own, self._writer = self._own, BackgroundWriter()
        self._handshakes.expect(range(own.rank + 1, own.size))
        regrouping = Regrouping(own.machines, own.survives)
        return AllRanksWatch(
            own, self._handshakes, self._writer, self._on_fault, self._on_event,
            standby_of(own.machines), regrouping, lost,
        )  # fmt: skip

    def _connected(self, first: int, limit_s: float) -> FirstRankWatch:
        """Be watched by the rank that does."""
        own, to = self._own, self._own.listening[first]
        line = socket.create_connection((to.address, to.port), timeout=limit_s)
        line.sendall(greeting(to.token, own.rank, own.host))
        line.settimeout(None)
        fault_handler.write_to(line)
        return FirstRankWatch(own, line, to.host, self._on_fault)

    def _without_first(self, watch: FirstRankWatch, lost: Fault) -> AllRanksWatch | FirstRankWatch:
        """The same, now that rank 0 is lost and the next one takes its part."""
        own = self._own
        if own.rank == 1:
            own.reaper = own.reaper or LauncherReaper(own.rank, own.number, own.host)
            return self._as_first(lost)
        try:
            connected = self._connected(1, ARRIVE_S)
        except OSError:  # it is lost too
            watch.end(lost)
        if own.rescue is not None:
            own.say({"rescuer": True})
        own.say({"first_lost": asdict(lost)})
        own.say({"regroups": True, "group": own.group})
        return connected

    def _guard(self) -> None:
        """A watching thread that fails must not die in silence: nobody else notices failures or
        acts on signals."""
        try:
            while isinstance(self._watch, FirstRankWatch) and (lost := self._watch.run()):
                self._watch = self._without_first(self._watch, lost)
            if isinstance(self._watch, AllRanksWatch):
                self._watch.run()
        except Exception as error:
            fault = fault_of(error, self._own.number, self._own.host, self._own.step)
            if isinstance(self._watch, AllRanksWatch):
                self._watch.end_job(fault)
            self._own.print(line_of(fault))
            self._own.leave(fault.code)
        finally:
            fault_handler.end()

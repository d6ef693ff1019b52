"""The supervisor: every rank keeps one TCP connection to rank 0 for as long as it lives.

MPI and the process group cannot report which rank failed first: a killed rank makes all others fail
too, and NCCL waits for minutes. Each rank therefore sends its phase to rank 0, its own failure with
the error message, and a note when it is done. Heartbeats are sent twice a second, or once a second
in a job of a thousand ranks. Rank 0 detects a connection that breaks without a message, a rank that
falls silent, and a job that makes no progress. Rank 0 prints the first cause in one line and ends
the job. A rank that receives nothing from rank 0 ends itself.

    rank k (member.py)                    rank 0 (coordinator.py)

    {"heartbeat": [17, ...]}  ----------> stored; if none comes for 15 s, see detector.py
                            <------------ {"heartbeat": null}, or which ranks may be silent
    {"fault": {...}}        ------------> if it is the first cause: print, record, stop all
    (connection breaks)     ------------> "rank 3 on b died without a message at step 17"
    Fatal Python error: ... ------------> the same, with a crash's traceback
    Timeout (0:00:06)! ...  ------------> a long call holds the GIL, so no other thread runs;
                                          the rank lives (messages.py); inform the standby
    {"event": {...}}        ------------> recorded by another thread
    {"done": true}          ------------> once all are done: {"finish": true} to all ranks
                            <------------ {"stop": code}

If all ranks can continue without a lost rank (survivors.py), the job does not end:

                            <------------ {"keep": true}: copy the state out of the group
    {"kept": ""}            ------------> once all have sent it: {"regroup": {...}} to all survivors
    {"gather": value}       ------------> once all have sent it: {"gathered": [values]} to all

If rank 0 itself is lost, rank 1 replaces it. All other survivors connect to the port of rank 1.
Rank 1 then makes all survivors copy their state and continue in the same way. The module pause.py
describes how all ranks stop together at an agreed step.
"""

import atexit
import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from motley.faults import Fault, Phase, make_fault
from motley.membership import messages
from motley.membership.away import read_away
from motley.membership.coordinator import ARRIVE_S, FIRST_CAUSE_S, BackgroundWriter, Coordinator
from motley.membership.detector import Heartbeat
from motley.membership.member import Member
from motley.membership.messages import Handshakes, Listening, greeting
from motley.membership.own_rank import HOLD_S, OwnRank, format_fault
from motley.membership.pause import LEAVE_SIGNAL
from motley.membership.protocol import (
    CanRegroup,
    CanRescue,
    Done,
    FirstRankLost,
    GatherValue,
    Paused,
    RankFailed,
    RankLeft,
    RunEvent,
)
from motley.membership.reaper import LauncherReaper, outlived_by_launcher
from motley.membership.survivors import (
    GroupPlace,
    RankLostError,
    RegroupState,
    Survivors,
    choose_standby,
    packed,
    unpacked,
)

_CONNECT_S = 30.0  # seconds in which rank 0 has to answer while all ranks start


class Watching:
    """The watching thread of one rank. Call :meth:`listen`, then :meth:`start`.

    Args:
        own: state of this rank.
        on_fault: see :class:`Supervisor`.
        on_event: see :class:`Supervisor`.
    """

    def __init__(
        self,
        own: OwnRank,
        on_fault: Callable[[Fault], None],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._own, self._on_fault, self._on_event = own, on_fault, on_event
        self._writer: BackgroundWriter | None = None  # on the first rank
        self._watch: Coordinator | Member | None = None  # once it has started

    def listen(self, address: str) -> Listening:
        """Open the port of this rank; see :meth:`Supervisor.listen`."""
        listener = socket.create_server((address, 0), backlog=1024)
        self._handshakes = Handshakes(listener, self._own.place.host, self._own.place.size)
        return self._handshakes.listening

    def start(self) -> None:
        """Connect to rank 0, and start the watching thread."""
        self._watch = self._connected(0, _CONNECT_S) if self._own.place.rank else self._as_first()
        threading.Thread(target=self._guard, name="supervisor", daemon=True).start()

    @property
    def started(self) -> bool:
        """True if a fault of this rank would reach rank 0."""
        return self._watch is not None

    @property
    def lines(self) -> list[socket.socket]:
        """All connections of the watching thread to other ranks."""
        return self._watch.lines if self._watch else []

    def flush(self) -> None:
        """Wait until all events are recorded. Only the first rank records events.

        Raises:
            Exception: the error that kept an event from being recorded.
        """
        if self._writer is not None:
            self._writer.flush()
            if self._writer.error is not None:  # of the last records
                raise self._writer.error

    def _as_first(self, lost: Fault | None = None) -> Coordinator:
        """Start the coordinator on this rank.

        Args:
            lost: fault of the former rank 0; None at the start of the job.
        """
        own, self._writer = self._own, BackgroundWriter()
        place = own.place
        self._handshakes.expect(range(place.rank + 1, place.size))
        regrouping = RegroupState(place.machines, place.survives)
        return Coordinator(
            own, self._handshakes, self._writer, self._on_fault, self._on_event,
            choose_standby(place.machines), regrouping, lost,
        )  # fmt: skip

    def _connected(self, first: int, limit_s: float) -> Member:
        """Connect to the coordinator as a member.

        Args:
            first: number of the coordinator in the group.
            limit_s: seconds to wait for the connection.
        """
        own, to = self._own, self._own.place.listening[first]
        line = socket.create_connection((to.address, to.port), timeout=limit_s)
        line.sendall(greeting(to.token, own.place.rank, own.place.host))
        line.settimeout(None)
        messages.write_to(line)
        return Member(own, line, to.host, self._on_fault)

    def _without_first(self, watch: Member, lost: Fault) -> Coordinator | Member:
        """Return this rank's new coordinator or member, after rank 1 has replaced rank 0.

        Args:
            watch: the member that has watched rank 0 so far.
            lost: fault of rank 0.
        """
        own = self._own
        if own.place.rank == 1:
            own.reaper = own.reaper or _make_reaper(own.place)
            return self._as_first(lost)
        try:
            connected = self._connected(1, ARRIVE_S)
        except OSError:  # rank 1 is lost too
            watch.end(lost)
        if own.hooks.rescue is not None:
            own.send(CanRescue())
        own.send(FirstRankLost(lost))
        own.send(CanRegroup(group=own.change.group))
        return connected

    def _guard(self) -> None:
        """Run the watching thread, and end the job if an error ends the thread.

        Without the watching thread, no part of this rank detects failures or acts on signals.
        """
        try:
            while isinstance(self._watch, Member) and (lost := self._watch.run()):
                self._watch = self._without_first(self._watch, lost)
            if isinstance(self._watch, Coordinator):
                self._watch.run()
        except Exception as error:
            fault = make_fault(error, self._own.place.number, self._own.place.host, self._own.step)
            if isinstance(self._watch, Coordinator):
                self._watch.end_job(fault)
            self._own.print(format_fault(fault))
            self._own.leave(fault.code)
        finally:
            messages.end()


# Seconds between checks for a lost rank, while this rank waits for the others to finish.
_LOOK_S = 0.2
_SAVE_S = 600.0  # seconds that the launcher of a host that has left may wait for the other hosts


class Supervisor:
    """The supervision of a job on one rank. All ranks call :meth:`listen`, then :meth:`join`.

    Attributes:
        on_fault: function that is called once, from another thread, with the first cause. Rank 0
            calls it. If rank 0 died, the standby calls it, the rank that reports in place of rank
            0.
        on_event: function that is called on rank 0, from another thread, with each event that a
            rank reports.
    """

    def __init__(self, place: GroupPlace) -> None:
        self.on_fault: Callable[[Fault], None] = lambda fault: None
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self._own = OwnRank(place)
        self._watching = Watching(self._own, self._record_fault, self._record_event)

    @property
    def step(self) -> int | None:
        """Current step of the training. The training loop sets it; each heartbeat sends it."""
        return self._own.step

    @step.setter
    def step(self, step: int) -> None:
        first, self._own.step = self._own.step is None, step
        if first:  # should the launcher be killed at once
            self._own.hasten_heartbeat()

    def begin_step(self, step: int) -> bool:
        """Return True if this rank may start the step. False: call :meth:`pause` instead."""
        return self._own.pause.begin(step)

    def pause(self, said: str, first: bool) -> NoReturn:
        """Wait for the end of the job, after the state is saved. All ranks that train call this.

        Args:
            said: description of the saved state, for the user.
            first: True on the rank that has written the state.
        """
        own = self._own
        if first:
            own.send(Paused(said))
        elif own.place.rank and read_away() and outlived_by_launcher():
            if own.reaper:
                own.reaper.send(timeout_s=_SAVE_S)
            own.send(RankLeft())
            own.leaves.set()
        while True:
            time.sleep(HOLD_S)  # the watching thread ends this process

    # -- connecting

    def listen(self, address: str) -> Listening:
        """Open the port to which other ranks connect if this rank later replaces rank 0.

        Connections that have not sent the token are dropped: see motley.membership.messages.
        """
        return self._watching.listen(address)

    def join(self, listening: Sequence[Listening], survives: bool = False) -> None:
        """Connect this rank and start watching; all ranks call it after ``listen``.

        Args:
            listening: result of :meth:`listen` on each rank, by rank.
            survives: True if the launcher lets all other ranks live on when a rank dies.
        """
        own = self._own
        own.place = replace(own.place, listening=tuple(listening), survives=survives)
        is_lowest_here = own.place.machines[own.place.rank] == own.place.rank
        own.reaper = _make_reaper(own.place) if is_lowest_here else None
        own.inform_reaper()
        own.outbox.catch_signals()
        own.outbox.add_request(LEAVE_SIGNAL)  # the signal may have come before
        self._watching.start()

    def _record_fault(self, fault: Fault) -> None:
        with contextlib.suppress(Exception):  # the job must end, whatever the recorder does
            self.on_fault(fault)

    def _record_event(self, event: dict[str, Any]) -> None:
        self.on_event(event)

    def records_in(self, folder: Path) -> None:
        """Pass the folder of the run's records to the reaper.

        If rank 0 is killed, the reaper records the end of the run in this folder.
        """
        if self._own.place.rank == 0 and self._own.reaper:
            self._own.reaper.send(folder=str(folder.absolute()))

    # -- reports of a rank

    def set_status(self, phase: Phase, timeout_s: float | None, detail: str = "") -> None:
        """Set the phase of this rank, or report progress within it.

        Args:
            phase: the phase from now on.
            timeout_s: seconds in which some rank should make progress; see
                motley.membership.detector.
            detail: description that replaces the phase's usual description, as in "rank 3 is
                measuring links".

        Raises:
            RankLostError: the group of this rank is broken, so the present step must be repeated.
        """
        own = self._own
        self.check_group()
        own.heartbeat = Heartbeat(own.step, phase, own.heartbeat.moves + 1, timeout_s, detail)

    def finish(self) -> None:
        """Report that this rank is done. Wait until all ranks are done and all events are recorded.

        Raises:
            Exception: the error that kept events from being recorded, on rank 0.
            RankLostError: a rank that was not done is lost.
        """
        own = self._own
        if not own.finished.is_set():
            own.send_in_group(Done())
            while not own.finished.wait(_LOOK_S):
                self.check_group()
            self._watching.flush()
            if own.reaper:
                own.reaper.dismiss()

    def before_end(
        self,
        last_words: Callable[[], None],
        how_to_continue: Callable[[int | None], str],
        clear_line: str,
        if_lost: str = "",
    ) -> None:
        """Set the functions that the watching thread calls before this rank ends with the job.

        Args:
            last_words: function that writes the last records of this rank.
            how_to_continue: function of the number of finished steps that returns an instruction to
                the user on how to continue the run.
            clear_line: text that removes the progress bar from the terminal; empty: no bar.
            if_lost: instruction to the user on how to continue after a lost rank; empty: none.
        """
        self._own.hooks.clear_line, self._own.hooks.if_lost = clear_line, if_lost
        self._own.hooks.last_words, self._own.hooks.how_to_continue = last_words, how_to_continue

    def can_rescue(self, save: Callable[[], str], first: bool) -> None:
        """Declare that this rank can save the state before another rank's fault ends the job.

        Args:
            save: function that saves the state and returns a note on it for the user. Another
                thread calls it, while the training thread may be stuck in a collective.
            first: True on the rank that normally saves. If that rank and rank 0 are both lost, the
                standby rank saves instead.
        """
        self._own.hooks.rescue = save if first or self._own.place.is_standby else None
        if first and self._own.place.rank:
            self._own.send(CanRescue())

    # -- continuing without a lost rank

    def can_regroup(
        self, keep: Callable[[], None], free: Callable[[], None], without_first: bool
    ) -> None:
        """Declare that this rank can continue without a lost rank; see :meth:`get_survivors`.

        The job continues after a loss only if all surviving ranks have called this method.

        Args:
            keep: function that copies the training state out of the process group. Another thread
                calls it, while the training thread may be stuck in a collective.
            free: function that makes the training thread leave the collective, with any error.
                Another thread calls it.
            without_first: True if this rank can continue when rank 0 is lost too; equal on all
                ranks.
        """
        hooks = self._own.hooks
        hooks.keep, hooks.free, hooks.without_first = keep, free, without_first
        self._own.send_in_group(CanRegroup())

    def connections(self) -> list[socket.socket]:
        """Return the supervisor's connections, which must outlive the process group."""
        return self._watching.lines

    def check_group(self) -> None:
        """Raise RankLostError if a rank of the group is lost. This rank then has to regroup."""
        if self._own.change.survivors is not None:
            raise RankLostError(self._own.change.survivors.lost.line())

    def get_survivors(self, error: BaseException) -> Survivors:
        """Return the ranks with which to continue, after an error that a lost rank has caused.

        If no rank is lost, or the survivors cannot continue, end this process and the job.

        Args:
            error: the error that the training thread caught.
        """
        own = self._own
        if own.change.survivors is None and (own.hooks.keep is None or own.finished.is_set()):
            raise error
        if own.change.survivors is None:
            fault = make_fault(error, own.place.number, own.place.host, own.step)
            own.send_in_group(_format_end(fault, own))
            if not own.change.begun.wait(3 * FIRST_CAUSE_S) and own.held.is_set():
                own.change.begun.wait(HOLD_S)
        if own.change.survivors is None:
            self._end_with(error)
        own.change.freeing.join()
        return own.change.take()

    def end_without_lost(self, at_once: bool = False) -> None:
        """Make this process end without MPI_Finalize if a rank is lost.

        MPI_Finalize would wait for the lost rank.

        Args:
            at_once: True: end the process in this call. False: end the process when Python exits.
        """
        if self._own.change.group and at_once:
            self._own.leave(0)
        elif self._own.change.group:
            atexit.register(self._own.leave, 0)

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from every rank, by rank. Rank 0 relays the values, without MPI."""
        own = self._own
        self.check_group()
        own.send_in_group(GatherValue(packed(value)))
        while (result := own.change.gathered.get()) is None:
            self.check_group()  # if that passes, the None is from an earlier loss
        return [unpacked(text) for text in result]

    def record_event(self, event: dict[str, Any]) -> None:
        """Send an event to rank 0, which records it."""
        self._own.send(RunEvent(event))

    def fail(self, error: BaseException) -> NoReturn:
        """Report why this rank failed, and end this process and the job."""
        own = self._own
        if not self._watching.started:
            raise error  # mpi4py's runner ends all ranks
        fault = make_fault(error, own.place.number, own.place.host, own.step)
        if own.finished.is_set():  # no rank listens: the last events could not be recorded
            traceback.print_exception(error)
            own.print(format_fault(fault))
            own.leave(fault.code)
        own.send_in_group(_format_end(fault, own))
        time.sleep(3 * FIRST_CAUSE_S)  # rank 0 ends this process before that
        if own.held.is_set():
            time.sleep(HOLD_S)
        self._end_with(error)

    def _end_with(self, error: BaseException) -> NoReturn:
        traceback.print_exception(error)
        self._own.leave(1)


def _make_reaper(place: GroupPlace) -> LauncherReaper:
    return LauncherReaper(place.rank, place.number, place.host)


def _format_end(fault: Fault, own: OwnRank) -> RankFailed:
    return RankFailed(replace(fault, phase=own.heartbeat.phase.key))

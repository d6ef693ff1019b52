"""The coordinator, a thread of rank 0 that receives messages from all ranks.

The coordinator decides which rank failed first. The surviving ranks continue without that rank, or
the job ends and prints one line.

At the end of a failed job, the coordinator records and prints the first cause. Then it has a rank
save the training state, and orders all ranks to end. A separate thread writes to disk, so that a
slow disk delays no heartbeat.

The user stops a job by a signal to the launcher, which forwards the signal to all ranks at once, or
by a signal to one rank.
"""

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, NoReturn

from motley.faults import Fault, FaultKind
from motley.membership import messages, protocol
from motley.membership.detector import (
    SUSPECT_AFTER_S,
    RankStatus,
    SilentRanks,
    StopSignals,
    StragglerDetector,
    Watchdog,
)
from motley.membership.fault_causes import (
    RESUME,
    FirstCause,
    make_daemon_fault,
    make_death_fault,
)
from motley.membership.messages import Arrival, Handshakes
from motley.membership.own_rank import OwnRank, save_before_end
from motley.membership.pause import PauseAgreement
from motley.membership.protocol import (
    CoordinatorHeartbeat,
    Finish,
    Message,
    PauseBefore,
    SignalReceived,
    Stop,
    decode,
    encode,
)
from motley.membership.regroup import Regroup
from motley.membership.survivors import RegroupState


class BackgroundWriter:
    """A thread that runs functions one after another, such as writes to a disk.

    Attributes:
        error: the first error that a function raised; None if no function raised one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="background writer", daemon=True).start()

    def write(self, work: Callable[[], None]) -> None:
        """Queue ``work``, which runs after all functions that were queued earlier."""
        self._queue.put(work)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued functions have run. Return False after ``timeout_s``.

        Args:
            timeout_s: seconds to wait at most; None: no limit.
        """
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                work()
            except Exception as error:
                self.error = self.error or error


RESCUED = {*FaultKind} - {
    FaultKind.NOT_FINITE, FaultKind.REFUSED, FaultKind.STOPPED,
    FaultKind.LEFT, FaultKind.PAUSED,  # all was saved before
}  # fmt: skip
# Seconds between a rank's death, after that of its daemon, and the end of its host's session.
_SESSION_S = 0.2
# Seconds that mpirun may take to end; it would wait for its daemon on a lost host.
_HOST_LOST_S = 1.0
_RECORD_S = 5.0  # seconds that writing the record of a fault may take; the job ends anyway


_LOST = (FaultKind.KILLED, FaultKind.HOST_LOST, FaultKind.LINK_LOST)


class JobEnd:
    """The steps that end a job after a fault, run by the watching thread of rank 0.

    Args:
        own: state of this rank.
        writer: the thread that writes records.
        on_fault: function that records the first cause.
        tell_all: function that sends a message to all other ranks.
    """

    def __init__(
        self,
        own: OwnRank,
        writer: BackgroundWriter,
        on_fault: Callable[[Fault], None],
        tell_all: Callable[[Message], None],
    ) -> None:
        self._own, self._writer = own, writer
        self._on_fault, self._broadcast = on_fault, tell_all

    def end(
        self, fault: Fault, phases: Mapping[int, str], others: Mapping[socket.socket, RankStatus]
    ) -> NoReturn:
        """Record and print the first cause, and end all ranks.

        Args:
            fault: the fault that caused the end of the job.
            phases: last phase that each rank reported, by the rank's number in the launch.
            others: status of every rank but 0, by the connection to the rank.
        """
        fault = self._launchers_loss(fault)
        fault = replace(fault, phase=fault.phase or phases.get(fault.rank, ""))
        if fault.kind in _LOST and self._own.hooks.if_lost:
            advice, own = fault.advice, self._own.hooks.if_lost  # of a script without --resume
            known = RESUME in advice
            advice = advice.replace(RESUME, own) if known else f"{advice}; {own}"
            fault = replace(fault, advice=advice)
        self._writer.write(partial(self._on_fault, fault))
        self._writer.flush(_RECORD_S)
        self._own.print(fault.last_words())
        if fault.kind in RESCUED and not fault.signal:
            save_before_end(self._own, others, fault.rank, self._broadcast)
        if fault.kind is FaultKind.HOST_LOST and self._own.reaper:
            self._own.reaper.send(timeout_s=_HOST_LOST_S)
        self._broadcast(Stop(fault.code))
        time.sleep(0.1)  # let the others read it
        self._own.leave(fault.code)

    def _launchers_loss(self, fault: Fault) -> Fault:
        """Return the fault of a lost host if the launcher lost the rank's host, else ``fault``."""
        own = self._own
        if fault.kind is not FaultKind.KILLED or fault.host == own.place.host or not own.reaper:
            return fault
        own.reaper.send(fault=asdict(fault))  # should mpirun end this rank meanwhile
        place = own.place
        address = place.listening[place.numbers.index(fault.rank)].address
        if not own.reaper.lost_session({fault.host, address}, _SESSION_S):
            return fault
        own.stopped = True  # mpirun passes nothing on any more
        return make_daemon_fault(fault.rank, fault.host, fault.step)


# Seconds to wait for the first cause, after a failure that is probably the consequence of another.
FIRST_CAUSE_S = 2.0
# Seconds to wait after an abort: the state has to be saved before mpirun kills all ranks.
_ABORT_S = 0.2
_SIGNAL_S = 0.1  # seconds to wait after a signal: an mpirun that has to stop leaves the ranks 0.3 s
ARRIVE_S = 2.0  # seconds in which all surviving ranks connect to the next rank when rank 0 is lost
# Messages of many ranks are read together: this thread wakes at most 25 times a second, which
# costs the training in this process little, and still detects a death soon enough.
_GATHER_S, _GATHER_EACH_S = 0.04, 2e-4


class Coordinator:
    """The thread of rank 0 that watches all ranks.

    Another thread writes records, so that this thread never waits for a disk.

    Args:
        own: state of this rank.
        handshakes: receiver of the connections of all other ranks.
        writer: the thread that writes records.
        on_fault: function that records the first cause.
        on_event: function that records an event that a rank reports.
        standby: the rank that takes over when rank 0 fails.
        regrouping: the lost ranks, and the ranks that are ready to continue without them.
        lost: fault of the former rank 0 if this rank replaces it; None at the start of a job.
    """

    def __init__(
        self,
        own: OwnRank,
        handshakes: Handshakes,
        writer: BackgroundWriter,
        on_fault: Callable[[Fault], None],
        on_event: Callable[[dict[str, Any]], None],
        standby: int,
        regrouping: RegroupState,
        lost: Fault | None = None,
    ) -> None:
        self._witnesses = list[socket.socket]()
        self._own, self._handshakes, self._writer = own, handshakes, writer
        self._standby, self._write_event = standby, on_event
        self._job_end = JobEnd(own, writer, on_fault, self._broadcast)
        place, address = own.place, handshakes.listening.address
        self._me = RankStatus(place.rank, place.number, place.host, address=address)
        self._first_lost, self._since = lost, time.monotonic()
        self._others: dict[socket.socket, RankStatus] = {}
        self._watchdog = Watchdog(own.awake, place.number, place.host)
        self._silent_ranks, self._stragglers = SilentRanks(own.awake), StragglerDetector(own.awake)
        self._cause, self._signals = FirstCause(), StopSignals()
        self._regroup = Regroup(own, regrouping, self._broadcast, self._record)
        self._pause = PauseAgreement(place.size)
        self._selector = selectors.DefaultSelector()
        self._to_standby: socket.socket | None = None

    @property
    def lines(self) -> list[socket.socket]:
        """All connections: to ranks, to reapers of lost ranks, and to senders in the handshake.

        A reaper is a process that remains on a host after the host's rank has died.
        """
        return [*self._others, *self._witnesses, *self._handshakes.lines]

    def run(self) -> None:
        """Watch until all ranks are done.

        If a rank fails and the other ranks cannot continue without it, this method ends the process
        and the job.
        """
        own = self._own
        self._selector.register(own.outbox.wake_read, selectors.EVENT_READ)
        self._handshakes.register(self._selector)
        while True:
            due = self._cause.due_in(own.heartbeat_in())
            ready = [key.fileobj for key, _ in self._selector.select(due)]
            now = own.awake.look()
            for line in ready:
                if isinstance(line, socket.socket) and line in self._others:
                    self._read(line)
            for new in self._handshakes.arrivals(ready, now):
                self._welcome(new, now)
            if self._first_lost:
                self._await_others(self._first_lost)
            if self._regroup.waits:
                self._regroup_or_end()
            # After reading: a rank may have reported a better cause while this process was stopped.
            if cause := self._cause.due():
                # A stop of mpirun's, or an error of gloo's, may well be due to a silent rank.
                silent = self._watchdog.silent(self._statuses()[1:], SUSPECT_AFTER_S)
                self.end_job(silent or cause)
            self._watchdog.receive(self._me, own.heartbeat_now())
            for number in own.outbox.read_signals():
                self._handle(self._me, SignalReceived(number))
            while own.outbox.messages:
                self._handle(self._me, own.outbox.messages.pop(0))
            if self._pause.ask(self._others, own.pause):
                self._pause_all()
            if self._writer.error is not None:  # for instance, a full disk: a run needs its records
                raise self._writer.error
            if self._all_done():
                self._broadcast(Finish())
                own.finished.set()
                return
            if own.heartbeat_due():
                self._judge()
            if len(self._others) + 1 == own.place.size:  # a new rank is served at once
                time.sleep(min(_GATHER_S, _GATHER_EACH_S * own.place.size))

    def _welcome(self, new: Arrival, now: float) -> None:
        """Store a new connection, from a rank or from the reaper of a lost rank.

        Args:
            new: the connection. Its rank is ~K (negative) for the reaper of rank K, the process
                that reports that the host of the dead rank K lives.
            now: time of arrival, in seconds that this process was awake.
        """
        if new.rank < 0:
            self._witnesses.append(new.line)
            self._regroup.note_host_alive(~new.rank)
            return
        address = new.line.getpeername()[0]
        number = self._own.place.numbers[new.rank]
        status = RankStatus(new.rank, number, new.host, now, address=address, messages=new.messages)
        self._others[new.line] = status
        if new.rank == self._standby:
            self._watch_crash_file()
        for message in map(decode, new.pending):
            self._handle(status, message)

    def end_job(self, fault: Fault) -> NoReturn:
        """Record and print the first cause, and end all ranks."""
        phases = {status.number: status.heartbeat.phase.key for status in self._statuses()}
        self._job_end.end(fault, phases, self._others)

    def _regroup_or_end(self) -> None:
        """Continue without lost ranks once all survivors are ready, or end the job at a timeout."""
        remaining = self._statuses()
        if survivors := self._regroup.go_on(remaining):
            self._pause.clear(len(remaining))
            self._standby = survivors.standby
            self._watch_crash_file()
        elif fault := self._regroup.overdue(remaining):
            self.end_job(fault)

    def _watch_crash_file(self) -> None:
        """Let this rank's fault handler write to the standby, the rank that reports a crash."""
        for line, status in self._others.items():
            if status.rank == self._standby:
                self._to_standby = line
                messages.write_to(line)

    def _judge(self) -> None:
        """Report silent ranks. End the job if a rank stays silent, or no rank makes progress."""
        messages.get_on(self._to_standby)
        statuses = self._statuses()
        events = self._silent_ranks.changes(statuses[1:]) + self._stragglers.changes(statuses)
        for event in events:
            self._record(event)
        # Should mpirun end this rank first, the others have the rank to blame.
        silent = self._watchdog.silent(statuses[1:], SUSPECT_AFTER_S)
        self._broadcast(CoordinatorHeartbeat(silent))
        if self._own.reaper:
            suspect = silent or self._cause.fault
            lowest = sorted(statuses, key=lambda status: -status.rank)
            self._own.reaper.send(
                fault=asdict(suspect) if suspect else None, step=self._last_step(),
                hosts={name: s.number for s in lowest for name in (s.address, s.host)},
            )  # fmt: skip
        watchdog = self._watchdog
        fault = watchdog.silent(statuses[1:]) or watchdog.dead_link(statuses)
        if fault := fault or watchdog.stuck(statuses):
            self.end_job(fault)

    def _all_done(self) -> bool:
        """Return True if all ranks are done."""
        whole = len(self._others) + 1 == self._own.place.size
        return whole and self._me.done and all(status.done for status in self._others.values())

    def _statuses(self) -> list[RankStatus]:
        return [self._me, *self._others.values()]

    def _read(self, line: socket.socket) -> None:
        status = self._others[line]
        try:
            data = os.read(line.fileno(), 65536)  # recv() would first ask whether there is any
        except OSError:
            data = b""
        for message in map(decode, status.take(data, self._own.awake.seconds)):
            self._handle(status, message)
        if not data:
            self._selector.unregister(line)
            line.close()
            if status.left:
                del self._others[line]
                return
            spoke = self._cause.fault is not None and self._cause.fault.rank == status.number
            if not spoke and status.rank not in self._signals:
                # Ranks are within a step of each other, and rank 0's own is not half a second old.
                trains = status.regroups or status.heartbeat.step is not None
                step = self._last_step() if trains else None
                text = status.messages.last_words
                del self._others[line]
                self._lose(status.rank, make_death_fault(status.number, status.host, step, text))

    def _lose(self, rank: int, fault: Fault) -> None:
        """Let the survivors continue without a lost rank if they can; else end the job.

        Args:
            rank: number of the lost rank in the present group.
            fault: fault of the lost rank.
        """
        if self._regroup.lose(rank, fault, self._statuses()):
            self._cause.clear()  # a consequence of the loss
        elif fault.echo and not self._regroup.is_running:
            self._suspect(fault, _ABORT_S)
        else:
            self.end_job(fault)

    def _await_others(self, fault: Fault) -> None:
        """Continue without the former rank 0 once all other ranks are connected to this rank.

        The job ends if a rank has not connected within ``ARRIVE_S``.

        Args:
            fault: fault of the former rank 0.
        """
        others = self._others.values()
        if len(others) == self._own.place.size - 2 and all(status.regroups for status in others):
            self._first_lost, self._me.regroups = None, True
            self._lose(0, fault)
        elif time.monotonic() - self._since > ARRIVE_S:
            self.end_job(fault)

    def _handle(self, status: RankStatus, message: Message | None) -> None:
        """Act on a message. Drop messages that a rank sent before the last regroup."""
        if message is None or message.group not in (None, self._own.change.group):
            return
        if act := self.HANDLERS.get(type(message)):
            act(self, status, message)

    def _on_heartbeat(self, status: RankStatus, message: protocol.MemberHeartbeat) -> None:
        self._watchdog.receive(status, message.heartbeat)

    def _on_stop(self, status: RankStatus, message: Stop) -> None:
        """End this process, since another rank has reported that this rank is silent."""
        if self._own.reaper:
            self._own.reaper.send(fault=None)
        self._own.leave(message.code)

    def _on_done(self, status: RankStatus, message: protocol.Done) -> None:
        status.done = True

    def _on_can_regroup(self, status: RankStatus, message: protocol.CanRegroup) -> None:
        status.regroups = True

    def _on_can_rescue(self, status: RankStatus, message: protocol.CanRescue) -> None:
        status.rescues = True

    def _on_left(self, status: RankStatus, message: protocol.RankLeft) -> None:
        status.left = True

    def _on_state_kept(self, status: RankStatus, message: protocol.StateKept) -> None:
        if fault := self._regroup.note_kept(status, message.problem):
            self.end_job(fault)

    def _on_value(self, status: RankStatus, message: protocol.GatherValue) -> None:
        self._regroup.gather(status, message.value)

    def _on_first_lost(self, status: RankStatus, message: protocol.FirstRankLost) -> None:
        if self._first_lost and message.fault.kind is not FaultKind.KILLED:  # its last words
            self._first_lost = message.fault

    def _on_leave(self, status: RankStatus, message: protocol.HostLeaves) -> None:
        self._pause.want(status.number, status.host, message.reason)

    def _on_pause_request(self, status: RankStatus, message: protocol.PauseRequest) -> None:
        self._pause.want(status.number, status.host, None)

    def _on_step(self, status: RankStatus, message: protocol.StepBegun) -> None:
        if self._pause.answer(status.rank, message.step):
            self._pause_all()

    def _on_paused(self, status: RankStatus, message: protocol.Paused) -> None:
        if message.saved:
            self._own.print(f"motley: {message.saved}")
        self.end_job(self._pause.fault(self._pause.at))

    def _on_event(self, status: RankStatus, message: protocol.RunEvent) -> None:
        self._record(message.event)

    def _on_failure(self, status: RankStatus, message: protocol.RankFailed) -> None:
        if not (message.fault.echo or self._regroup.is_running):
            self.end_job(message.fault)
        self._suspect(message.fault, FIRST_CAUSE_S)

    def _on_signal(self, status: RankStatus, message: SignalReceived) -> None:
        self._own.stopped = True
        if (lost := self._regroup.recent_loss) and message.number == signal.SIGTERM:
            self.end_job(lost)
        step = self._last_step()
        ranks = self._statuses()
        stall = self._watchdog.describe_stall(ranks)
        known = ranks, step, stall, self._own.hooks.how_to_continue(step)
        self._suspect(self._signals.came(status, message.number, *known), _SIGNAL_S)

    HANDLERS: ClassVar[dict[type[Message], Callable[[Any, RankStatus, Any], None]]] = {
        protocol.MemberHeartbeat: _on_heartbeat,
        protocol.Done: _on_done,
        protocol.CanRegroup: _on_can_regroup,
        protocol.CanRescue: _on_can_rescue,
        protocol.RankLeft: _on_left,
        protocol.StateKept: _on_state_kept,
        protocol.GatherValue: _on_value,
        protocol.FirstRankLost: _on_first_lost,
        protocol.HostLeaves: _on_leave,
        protocol.PauseRequest: _on_pause_request,
        protocol.StepBegun: _on_step,
        protocol.Paused: _on_paused,
        protocol.RunEvent: _on_event,
        protocol.RankFailed: _on_failure,
        SignalReceived: _on_signal,
        Stop: _on_stop,
    }

    def _pause_all(self) -> None:
        """Stop all ranks before the same step, once each rank has reported its current step."""
        if self._pause.at is None:
            self.end_job(self._pause.fault(None))
        self._broadcast(PauseBefore(self._pause.at))
        self._own.pause.stop_before(self._pause.at)

    def _last_step(self) -> int | None:
        """Return the current step of the training, or None before step 1.

        If rank 0 does not train, return the highest step of any rank.
        """
        steps = [s.heartbeat.step for s in self._statuses() if s.heartbeat.step is not None]
        return self._own.step if self._own.step is not None else max(steps, default=None)

    def _suspect(self, fault: Fault, within_s: float) -> None:
        """End the job with ``fault`` unless a better cause comes within ``within_s`` seconds."""
        if self._regroup.is_running and not fault.signal:
            return  # the lost rank is the cause
        fault = self._cause.suspect(fault, within_s)
        if self._own.reaper:  # in case this process is killed before it reports the fault
            self._own.reaper.send(fault=asdict(fault))

    def _record(self, event: dict[str, Any]) -> None:
        self._writer.write(partial(self._write_event, event))

    def _broadcast(self, message: Message) -> None:
        data = encode(message)
        for line in self._others:
            with contextlib.suppress(OSError):
                line.sendall(data)

"""The thread of every rank but 0 that sends heartbeats to rank 0 and watches rank 0."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from motley.faults import Fault
from motley.membership import messages, protocol
from motley.membership.detector import HEARTBEAT_TIMEOUT_S
from motley.membership.fault_causes import make_alone_fault, make_death_fault, make_silent_fault
from motley.membership.messages import Listening, Messages
from motley.membership.own_rank import OwnRank
from motley.membership.protocol import (
    MemberHeartbeat,
    Message,
    Rescued,
    SignalReceived,
    StateKept,
    StepBegun,
    Stop,
    decode,
    encode,
)
from motley.membership.survivors import choose_standby

# After a signal, the time in which rank 0 finds out which other ranks got one. Then mpirun ends us.
STOP_S = 0.2
_STANDBY_FIRST_S = 2.0  # mpirun ends the standby as soon as another rank has left
_BUSY_MOST_S = 600.0  # seconds without messages of rank 0 in which a rank relies on the standby
_ASKED, _ANSWER_S = 2, 0.7  # how many other ranks are probed, one after another


class Member:
    """The thread of every rank but 0 that watches rank 0.

    Args:
        own: state of this rank.
        line: the connection to rank 0.
        host: host of rank 0.
        on_fault: function that is called with the fault of rank 0. Only the standby calls it, the
            rank that reports when rank 0 cannot.
    """

    def __init__(
        self,
        own: OwnRank,
        line: socket.socket,
        host: str,
        on_fault: Callable[[Fault], None],
    ) -> None:
        self._own, self._line, self._host = own, line, host
        self._on_fault = on_fault
        self._messages = Messages()
        self._silent: Fault | None = None  # of the rank that sent rank 0 nothing for a while
        self._gathered: list[str] = []
        self._leaves: tuple[float, int] | None = None  # by a signal: when, with which status
        self._heard_at = own.awake.look()
        self._to_standby: socket.socket | None = None  # while rank 0 is quiet

    @property
    def lines(self) -> list[socket.socket]:
        """All connections to other ranks."""
        return [self._line]

    def run(self) -> Fault | None:
        """Watch until all ranks are done.

        This process ends if rank 0 orders the end, or if rank 0 is lost and the job cannot
        continue.

        Returns:
            The fault of rank 0 if the other ranks can continue without it; None once all ranks are
            done.
        """
        own = self._own
        selector = selectors.DefaultSelector()
        selector.register(self._line, selectors.EVENT_READ)
        selector.register(own.outbox.wake_read, selectors.EVENT_READ)
        while not own.finished.is_set():
            selector.select(STOP_S / 4 if self._leaves else own.heartbeat_in())
            own.awake.look()
            try:
                self._handle_messages()  # before sending: rank 0 may have sent Stop, and ended
                for number in own.outbox.read_signals():
                    self._line.sendall(encode(SignalReceived(number)))
                    self._leaves = self._leaves or (time.monotonic() + STOP_S, 128 + number)
                if self._leaves and time.monotonic() > self._leaves[0]:
                    own.leave(self._leaves[1])
                while own.outbox.messages:
                    self._line.sendall(encode(own.outbox.messages.pop(0)))
                if own.leaves.is_set():
                    own.leave(0)
                if own.heartbeat_due():
                    messages.get_on(self._line)
                    self._line.sendall(encode(MemberHeartbeat(own.heartbeat_now())))
            except OSError:
                with contextlib.suppress(OSError):
                    self._handle_messages()
                text = self._messages.last_words  # rank 0's traceback, if rank 0 has crashed
                fault = make_death_fault(own.place.numbers[0], self._host, own.step, text)
                if self._goes_on():
                    return fault
                self.end(self._silent if self._silent and not text else fault)
            if own.held.is_set():
                continue
            quiet = own.awake.seconds - self._heard_at
            if quiet > HEARTBEAT_TIMEOUT_S and not self._standby_receives(quiet):
                # Should rank 0 come back, it need not report again what this rank reports now.
                with contextlib.suppress(OSError):
                    self._line.sendall(encode(Stop(1)))
                self.end(self._lost(quiet))

        return None

    def _standby_receives(self, quiet: float) -> bool:
        """Return True if the standby lives, the rank that reports when rank 0 cannot.

        If rank 0 were dead, the standby would have ended by now. If the standby lives, Python is
        only busy on rank 0: rank 0 then sends signs of life to the standby alone.

        Args:
            quiet: seconds since the last message from rank 0.
        """
        own = self._own
        if own.place.is_standby or quiet > _BUSY_MOST_S:
            return False
        if quiet <= HEARTBEAT_TIMEOUT_S + _STANDBY_FIRST_S:
            return True
        try:
            if self._to_standby is None:
                at = own.place.listening[choose_standby(own.place.machines)]
                self._to_standby = socket.create_connection((at.address, at.port), _ANSWER_S)
                self._to_standby.setblocking(False)
            return bool(self._to_standby.recv(1))  # the standby sends nothing here, until it ends
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _lost(self, seconds: float) -> Fault:
        """Return the fault for the silence of rank 0: its host is lost, or this host is cut off.

        This host is cut off if no other machine answers either. Only the standby rank probes the
        other machines, since only the standby rank reports the fault.

        Args:
            seconds: seconds since the last message of rank 0.
        """
        own = self._own
        known = {self._line.getpeername()[0], self._line.getsockname()[0]}
        others = [each for each in own.place.listening if each.address not in known][:_ASKED]
        if not own.place.is_standby or not others or any(map(_answers, others)):
            return make_silent_fault(own.place.numbers[0], self._host, own.step, seconds)
        named = ", ".join(dict.fromkeys([self._host, *(each.host for each in others)]))
        return make_alone_fault(own.place.number, own.place.host, own.step, seconds, named)

    def _goes_on(self) -> bool:
        """Return True if this rank can continue without rank 0, by all that this rank knows."""
        own, ends = self._own, self._silent is not None or self._leaves is not None
        can = own.place.survives and own.hooks.without_first and own.hooks.keep is not None
        return can and not (ends or own.held.is_set())

    def _handle_messages(self) -> None:
        """Act on the messages that rank 0 has sent.

        Raises:
            ConnectionError: rank 0 has closed the connection before all ranks were done.
        """
        own = self._own
        with contextlib.suppress(BlockingIOError):
            data = self._line.recv(65536, socket.MSG_DONTWAIT)
            self._heard_at = own.awake.seconds
            if self._to_standby is not None:
                self._to_standby.close()
                self._to_standby = None
            for message in map(decode, self._messages.feed(data)):
                if act := self.HANDLERS.get(type(message)):
                    act(self, message)
            if not data and not own.finished.is_set():
                raise ConnectionError

    def _stop(self, message: Stop) -> None:
        self._own.leave(message.code)

    def _hold(self, message: protocol.Hold) -> None:
        self._own.held.set()
        self._own.write_last_words()

    def _keep_state(self, message: protocol.KeepState) -> None:
        self._own.held.set()
        self._line.sendall(encode(StateKept(self._own.keep_state())))

    def _go_on(self, message: protocol.GoOn) -> None:
        self._gathered = []
        self._own.go_on(message.survivors)

    def _rescue(self, message: protocol.Rescue) -> None:
        self._line.sendall(encode(Rescued(self._own.save_what_is_known())))

    def _answer_step(self, message: protocol.AskStep) -> None:
        begun = StepBegun(self._own.pause.ask_step(), group=self._own.change.group)
        self._line.sendall(encode(begun))

    def _pause_before(self, message: protocol.PauseBefore) -> None:
        self._own.pause.stop_before(message.step)

    def _finish(self, message: protocol.Finish) -> None:
        self._own.finished.set()

    def _note_suspect(self, message: protocol.CoordinatorHeartbeat) -> None:
        self._silent = message.fault

    def _take_values(self, message: protocol.Gathered) -> None:
        self._gathered += message.values
        if len(self._gathered) == self._own.place.size:
            self._own.change.gathered.put(self._gathered)
            self._gathered = []

    HANDLERS: ClassVar[dict[type[Message | None], Callable[[Any, Any], None]]] = {
        Stop: _stop,
        protocol.Hold: _hold,
        protocol.KeepState: _keep_state,
        protocol.GoOn: _go_on,
        protocol.Gathered: _take_values,
        protocol.Rescue: _rescue,
        protocol.AskStep: _answer_step,
        protocol.PauseBefore: _pause_before,
        protocol.Finish: _finish,
        protocol.CoordinatorHeartbeat: _note_suspect,
    }

    def end(self, fault: Fault) -> NoReturn:
        """End this process, since rank 0 is lost. Only the standby rank reports the fault."""
        if self._own.place.is_standby:
            self._own.print(fault.last_words())
            with contextlib.suppress(Exception):
                self._on_fault(fault)
            if text := self._own.save_what_is_known():
                self._own.print(f"motley: {text}")
        self._own.leave(1)


def _answers(other: Listening) -> bool:
    """Return True if the host of another rank answers a connection attempt."""
    try:
        with socket.create_connection((other.address, other.port), timeout=_ANSWER_S):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False

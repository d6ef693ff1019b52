"""The lifeline: every rank keeps one TCP connection to rank 0 for as long as it lives.

MPI and the process group cannot say who failed first: a rank that is killed makes all
others fail too, and NCCL waits for minutes. So each rank tells rank 0 twice a second what
it is doing, its own failure in its own words, and that it is done. Rank 0 sees a connection
that breaks without a word, a rank that falls silent and a job that stands still; it names
the first cause in one line and ends the job. A rank that hears nothing of rank 0 ends itself.

    rank k                                rank 0
    {"beat": {"step": 17}}  ------------> remembered; no beat for 15 s: see motley.launch.watchdog
                            <------------ {"beat": null}, or who may be silent
    {"fault": {...}}        ------------> first cause? print, record, stop all
    (connection breaks)     ------------> "rank 3 on b died without a word at step 17"
    {"done": true}          ------------> all done? {"finish": true} to all
                            <------------ {"stop": code}
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NoReturn

from motley.faults import Fault, FaultKind, Phase, died, fault_of, silent
from motley.launch.handshakes import Handshakes, greeting
from motley.launch.launcher_reaper import Escort
from motley.launch.messages import Messages, encode
from motley.launch.watchdog import SILENCE, SUSPECT, TICK, Awake, Peer, Pulse, Vigil, whereabouts

_PATIENCE = 2.0  # seconds that a failure which looks like an echo waits for the first cause
_NOW = 0.0  # the same for a signal: once mpirun is told to stop, it leaves us 0.3 s
_STOPS = (signal.SIGTERM, signal.SIGINT)


class Lifeline:
    """One rank's end of it. Rank 0 calls :meth:`listen`, then all call :meth:`join`.

    Attributes:
        step: set by the training loop; sent to rank 0 with every beat.
        on_fault: called once, from another thread, with the first cause: on rank 0, or on
            the deputy when it is rank 0 that died.
        on_event: called on rank 0, from another thread, with what a rank tells.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.step: int | None = None
        self.on_fault: Callable[[Fault], None] = lambda fault: None
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self._pulse = Pulse()
        self._awake = Awake()
        self._next_beat = 0.0
        self._stopped = False  # some rank, by a signal
        self._mute: Fault | None = None  # as rank 0 last said
        self._escort: Escort | None = None
        self._watching = False
        self._finished = threading.Event()
        self._own: list[dict[str, Any]] = []  # messages of this rank, not yet sent
        self._heard = Messages()  # of rank 0
        self._pending: tuple[float, Fault] | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    # -- connecting

    def listen(self, address: str) -> tuple[int, str, str]:
        """Rank 0: open the door; returns its port, the word that opens it, and the host.

        Nobody is heard who has not said it: see motley.launch.handshakes.
        """
        self._door = socket.create_server((address, 0), backlog=1024)
        self._handshakes = Handshakes(self._door, range(1, self.size))
        return self._door.getsockname()[1], self._handshakes.token, self.host

    def join(self, address: str, door: tuple[int, str, str], deputy: int, first_here: bool) -> None:
        """Connect this rank and start watching; all ranks call it after ``listen``.

        Args:
            deputy: the rank that speaks when rank 0 cannot; best on another machine.
            first_here: this is the lowest rank of its machine.
        """
        port, word, self._first_host = door
        self._deputy = deputy
        self._escort = Escort() if first_here else None
        for number in _STOPS:
            signal.signal(number, _leave_to_watcher)
        # The C-level handler writes the signal's number here at once, even while the main
        # thread sits inside a collective and cannot run Python.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if self.rank == 0:
            watch = self._watch_all
        else:
            self._line = socket.create_connection((address, port), timeout=30)
            self._line.sendall(greeting(word, self.rank, self.host))
            self._line.settimeout(None)
            watch = self._watch_first
        self._watching = True
        threading.Thread(target=self._guard, args=(watch,), name="lifeline", daemon=True).start()

    def _guard(self, watch: Callable[[], None]) -> None:
        """A watcher that fails (a full disk under the events, say) must not die in silence:
        nobody else notices failures or acts on signals."""
        try:
            watch()
        except Exception as error:
            fault = fault_of(error, self.rank, self.host, self.step)
            if self.rank == 0:
                self._condemn(fault)
            self._print(_text(fault))
            self._leave(fault.code)

    # -- what a rank says

    def enter(self, phase: Phase, patience: float | None, detail: str = "") -> None:
        """Say what this rank is at from now on, or that it has got on with it.

        Args:
            patience: seconds in which some rank should move; see motley.launch.watchdog.
            detail: as in "rank 3 is measuring links", in place of the phase's own words.
        """
        self._pulse = Pulse(self.step, phase, self._pulse.moves + 1, patience, detail)

    def finish(self) -> None:
        """Say that this rank is done, and wait until all are."""
        if not self._finished.is_set():
            self._say({"done": True})
            self._finished.wait()
            if self._escort:
                self._escort.dismiss()

    def tell(self, event: dict[str, Any]) -> None:
        """Have rank 0 record an event."""
        self._say({"event": event})

    def fail(self, error: BaseException) -> NoReturn:
        """Say why this rank failed, and end with the job."""
        if not self._watching or self._finished.is_set():  # nobody listens
            raise error  # mpi4py's runner ends all ranks
        fault = fault_of(error, self.rank, self.host, self.step)
        self._say({"fault": asdict(replace(fault, phase=self._pulse.phase.key))})
        time.sleep(3 * _PATIENCE)  # rank 0 ends this process before that
        traceback.print_exception(error)
        self._leave(1)

    def _say(self, message: dict[str, Any]) -> None:
        self._own.append(message)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _beat(self) -> dict[str, Any]:
        return replace(self._pulse, step=self.step).message()

    def _until_due(self) -> float:
        """Seconds until there is something to do."""
        due = min(self._next_beat, self._pending[0] if self._pending else self._next_beat)
        return max(0.0, due - time.monotonic())

    def _beat_due(self) -> bool:
        due = time.monotonic() >= self._next_beat
        if due:
            self._next_beat = time.monotonic() + TICK
        return due

    def _print(self, text: str) -> None:
        if self._escort and self._escort.say(text if self._stopped else "") and self._stopped:
            return
        with contextlib.suppress(OSError):  # mpirun may be gone, and its pipe with it
            print(text, file=sys.stderr, flush=True)

    def _leave(self, code: int) -> NoReturn:
        """End now: the main thread may be stuck in a collective that never returns."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _signals(self) -> list[int]:
        """Numbers of the stop signals that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            # Every signal with a Python handler arrives here; DataLoader has one for SIGCHLD.
            return [number for number in os.read(self._wake_read, 4096) if number in _STOPS]
        return []

    # -- every rank but 0

    def _watch_first(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._line, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        self._heard_at = self._awake.look()
        while not self._finished.is_set():
            selector.select(self._until_due())
            self._awake.look()
            try:
                self._hear_first()  # before speaking: rank 0 may have said stop, and left
                for number in self._signals():
                    self._line.sendall(encode({"signal": number}))
                    self._leave(128 + number)
                while self._own:
                    self._line.sendall(encode(self._own.pop(0)))
                if self._beat_due():
                    self._line.sendall(encode({"beat": self._beat()}))
            except OSError:
                with contextlib.suppress(OSError):
                    self._hear_first()
                self._replace_first(self._mute or died(0, self._first_host, self.step))
            # The deputy first: mpirun ends it as soon as another rank has left.
            quiet = self._awake.seconds - self._heard_at
            if quiet > SILENCE + (0 if self.rank == self._deputy else 2):
                # Should rank 0 come back, it need not say again what we say now.
                with contextlib.suppress(OSError):
                    self._line.sendall(encode({"stop": 1}))
                self._replace_first(silent(0, self._first_host, self.step, quiet))

    def _hear_first(self) -> None:
        """Act on what rank 0 has said; ConnectionError where it is gone."""
        with contextlib.suppress(BlockingIOError):
            data = self._line.recv(65536, socket.MSG_DONTWAIT)
            self._heard_at = self._awake.seconds
            for message in self._heard.feed(data):
                if "stop" in message:
                    self._leave(message["stop"])
                elif "finish" in message:
                    self._finished.set()
                elif message["beat"]:
                    self._mute = Fault.read(message["beat"])
                else:
                    self._mute = None
            if not data and not self._finished.is_set():
                raise ConnectionError

    def _replace_first(self, fault: Fault) -> NoReturn:
        """End, now that rank 0 cannot end us; one rank's line is enough."""
        if self.rank == self._deputy:
            self._print(_text(fault))
            with contextlib.suppress(Exception):
                self.on_fault(fault)
        self._leave(1)

    # -- rank 0

    def _watch_all(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_read, selectors.EVENT_READ)
        self._handshakes.register(selector)
        self._me = Peer(0, self.host)
        self._peers: dict[socket.socket, Peer] = {}
        self._vigil = Vigil(self._awake, self.host)
        while True:
            ready = [key.fileobj for key, _ in selector.select(self._until_due())]
            now = self._awake.look()
            for line in ready:
                if isinstance(line, socket.socket) and line in self._peers:
                    self._read(line, selector)
            for new in self._handshakes.arrivals(ready, now):
                peer = self._peers[new.line] = Peer(new.rank, new.host, now, messages=new.messages)
                for message in new.pending:
                    self._hear(peer, message)
            # Only now: whoever knows more may have said so while this process was stopped.
            if self._pending and time.monotonic() >= self._pending[0]:
                # A stop of mpirun's, or an error of gloo's, may well be due to a mute rank.
                mute = self._vigil.silent(self._ranks()[1:], SUSPECT)
                self._condemn(mute or self._pending[1])
            self._hear(self._me, {"beat": self._beat()})
            for number in self._signals():
                self._hear(self._me, {"signal": number})
            while self._own:
                self._hear(self._me, self._own.pop(0))
            ranks = self._ranks()
            if sum(peer.done for peer in ranks) == self.size:
                self._tell_all({"finish": True})
                self._finished.set()
                return
            if self._beat_due():
                # Should mpirun end us first, others know whom to blame.
                mute = self._vigil.silent(ranks[1:], SUSPECT)
                self._tell_all({"beat": asdict(mute) if mute else None})
                if self._escort:
                    self._escort.say(_text(mute) if mute else "")
                if fault := self._vigil.silent(ranks[1:]) or self._vigil.stuck(ranks):
                    self._condemn(fault)

    def _ranks(self) -> list[Peer]:
        return [self._me, *self._peers.values()]

    def _read(self, line: socket.socket, selector: selectors.BaseSelector) -> None:
        peer = self._peers[line]
        try:
            data = line.recv(65536)
        except OSError:
            data = b""
        peer.heard = self._awake.seconds
        for message in peer.messages.feed(data):
            self._hear(peer, message)
        if not data:
            selector.unregister(line)
            line.close()
            if not self._pending_from(peer):
                # Ranks are within a step of each other, and rank 0's own is not half a second old.
                step = None if peer.pulse.step is None else self._last_step()
                self._condemn(died(peer.rank, peer.host, step))

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        if "beat" in message:
            self._vigil.beat(peer, Pulse.read(message["beat"]))
        elif "stop" in message:  # we were away, and another rank has spoken
            self._leave(message["stop"])
        elif "done" in message:
            peer.done = True
        elif "event" in message:
            self.on_event(message["event"])
        elif "fault" in message:
            fault = Fault.read(message["fault"])
            if not fault.echo:
                self._condemn(fault)
            self._suspect(fault, _PATIENCE)
        elif "signal" in message:
            self._stopped = True
            name = signal.Signals(message["signal"]).name
            _, where = whereabouts(self._ranks())
            fault = Fault(
                peer.rank, peer.host, self._last_step(), f"stopped by {name}, when {where}",
                "continue with --resume auto", echo=True, kind=FaultKind.KILLED,
                signal=message["signal"],
            )  # fmt: skip
            self._suspect(fault, _NOW)

    def _last_step(self) -> int | None:
        """The step that training is at; rank 0 itself may be left out of it."""
        steps = [peer.pulse.step for peer in self._ranks() if peer.pulse.step is not None]
        return self.step if self.step is not None else max(steps, default=None)

    def _suspect(self, fault: Fault, patience: float) -> None:
        """Blame ``fault`` unless a better cause turns up in time."""
        deadline = time.monotonic() + patience
        if self._pending is None:
            self._pending = (deadline, fault)
        else:
            self._pending = (min(deadline, self._pending[0]), self._pending[1])

    def _pending_from(self, peer: Peer) -> bool:
        return self._pending is not None and self._pending[1].rank == peer.rank

    def _condemn(self, fault: Fault) -> NoReturn:
        phases = {peer.rank: peer.pulse.phase.key for peer in self._ranks()}
        fault = replace(fault, phase=fault.phase or phases.get(fault.rank, ""))
        with contextlib.suppress(Exception):  # the job must end, whatever the recorder does
            self.on_fault(fault)
        if fault.details:
            self._print(fault.details)
        self._print(_text(fault))
        self._tell_all({"stop": fault.code})
        time.sleep(0.1)  # let the others read it
        self._leave(fault.code)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in self._peers:
            with contextlib.suppress(OSError):
                line.sendall(encode(message))


def _leave_to_watcher(number: int, frame: object) -> None:
    """The watcher's thread acts on the wake-up byte; the main thread may be stuck in C."""


def _text(fault: Fault) -> str:
    return f"motley: {fault.line()}"

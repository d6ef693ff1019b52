"""The state of this rank that its supervisor reports: its phase, step, messages and end. Before a
job ends by a lost rank, a surviving one saves the state that all of them hold.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import NoReturn

from motley.faults import Fault
from motley.membership.detector import (
    AwakeClock,
    Heartbeat,
    RankStatus,
    dead_peers,
    heartbeat_interval_s,
)
from motley.membership.messages import Listening
from motley.membership.pause import REQUESTS, OwnPause, request_of
from motley.membership.protocol import Hold, Message, Rescue, Rescued, decode, encode
from motley.membership.reaper import LauncherReaper
from motley.membership.survivors import Survivors, machines_of

_LINKS_S = 2.0  # between looks at what this process's connections do
_STOPS = (signal.SIGTERM, signal.SIGINT)


class OwnRank:
    """Shared by the training's thread, which says things, and the watching one, which sends them.

    Attributes:
        rank: the number in the group that is left.
        numbers: the number in the launch of each rank of that group. Faults and events name ranks
            by it, since it never changes.
        step: that training is at; None before the first.
        heartbeat: what the next one says, but for the step.
        awake: this process's waking time.
        outbox: messages to rank 0, not yet sent.
        finished: all ranks are done.
        stopped: some rank was, by a signal.
        reaper: on the lowest rank of each machine.
        rescue: saves what this rank knows before it ends, and says what it did; None: it cannot.
        last_words: writes what this rank has not written yet, before it ends with the job.
        how_to_continue: a run that somebody stops, as far as this rank knows; for people.
        held: rank 0 waits for a rescue, and ends this rank after it.
        keep: keeps the state apart from the group, to go on without a lost rank; None: it cannot.
        free: has the training's thread leave a collective that waits for the lost rank.
        freeing: does so; until it has, the group must not be left in another way.
        group: how often this rank has gone on without others; what was said before is void.
        trains_in: the same, as far as the training's thread knows: it may fail in the broken group
            while the other thread goes on.
        machines: which machine each rank is on, by its lowest rank.
        listening: where each rank hears the others when it is the first.
        standby: it speaks when rank 0 cannot.
        survives: mpirun lets ranks outlive one of them. without_first: and rank 0 too.
        survivors: with whom the training's thread is to go on, until it does; None: all is well.
        gathered: what :meth:`Supervisor.gather` waits for; None: in vain.
        pause: where this rank stops, if somebody has asked for it.
        leaves: it ends now, before the others, once it has said so.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.numbers = list(range(size))
        self.step: int | None = None
        self.heartbeat = Heartbeat()
        self.awake = AwakeClock()
        self.outbox: list[Message] = []
        self.finished = threading.Event()
        self.stopped = False
        self.reaper: LauncherReaper | None = None
        self.rescue: Callable[[], str] | None = None
        self.last_words: Callable[[], None] = lambda: None
        self.how_to_continue: Callable[[], str] = lambda: "continue with --resume auto"
        self.held = threading.Event()
        self.keep: Callable[[], None] | None = None
        self.free: Callable[[], None] = lambda: None
        self.freeing = threading.Thread()
        self.group = self.trains_in = 0
        self.machines: list[int] = []
        self.listening: list[Listening] = []
        self.standby = self.survives = self.without_first = False
        self.survivors: Survivors | None = None
        self.regrouped = threading.Event()
        self.gathered = SimpleQueue[list[str] | None]()
        self.pause = OwnPause()
        self.leaves = threading.Event()
        self._rescuing = threading.RLock()
        self._regrouping = threading.Lock()
        self._next_heartbeat = self._look_at_links = 0.0
        self._unanswered: list[str] = []
        self.wake_read, self._wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self._wake_write, False)

    def catch_signals(self) -> None:
        """Have the watching thread act on stop signals, from now on."""
        for number in (*_STOPS, *REQUESTS):
            signal.signal(number, _leave_to_watching_thread)
        for number in REQUESTS:
            signal.siginterrupt(number, False)  # the training goes on
        # The C-level handler writes the signal's number here at once, even while the main
        # thread sits inside a collective and cannot run Python.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def signals(self) -> list[int]:
        """Numbers of the stop signals that came since the last call; says what others ask for."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            found = os.read(self.wake_read, 4096)
        for number in set(REQUESTS).intersection(found):
            self.say_request(number)
        # Every signal with a Python handler arrives here; DataLoader has one for SIGCHLD.
        return [number for number in found if number in _STOPS]

    def say_request(self, number: int) -> None:
        """Say what such a signal asks for, if it does."""
        if (request := request_of(number)) is not None:
            self.outbox.append(request)

    def say(self, message: Message) -> None:
        """Have the watching thread send a message to rank 0."""
        self.outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        """The watching thread, if it waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def say_of_group(self, message: Message) -> None:
        """The same, of something that is void once a rank is lost; from the training's thread."""
        self.say(replace(message, group=self.trains_in))

    @property
    def number(self) -> int:
        """Number of this rank in the launch."""
        return self.numbers[self.rank]

    def heartbeat_now(self) -> Heartbeat:
        """The heartbeat of now."""
        if time.monotonic() > self._look_at_links:
            self._look_at_links = time.monotonic() + _LINKS_S
            self._unanswered = dead_peers()
        return replace(self.heartbeat, step=self.step, unanswered=self._unanswered)

    def hasten_heartbeat(self) -> None:
        """Have the next one be now."""
        self._next_heartbeat = 0.0
        self._wake()

    def heartbeat_in(self) -> float:
        """Seconds until the next heartbeat."""
        return max(0.0, self._next_heartbeat - time.monotonic())

    def heartbeat_due(self) -> bool:
        """Whether it is time for one; the next is an interval later."""
        due = self.heartbeat_in() == 0.0
        if due:
            self._next_heartbeat = time.monotonic() + heartbeat_interval_s(self.size)
        return due

    def print(self, text: str) -> None:
        """Say last words to the user, also where mpirun passes nothing on any more."""
        line = text if self.stopped else ""
        if self.reaper and self.reaper.tell(line=line, fault=None, ended=True) and self.stopped:
            return
        with contextlib.suppress(OSError):  # mpirun may be gone, and its pipe with it
            print(text, file=sys.stderr, flush=True)

    def save_what_is_known(self) -> str:
        """Do :attr:`rescue`, whatever it raises; from the watching thread. What was done."""
        self.write_last_words()  # first: whoever started this rank may soon end it
        if self.rescue is None:
            return ""
        with self._rescuing:
            try:
                return self.rescue()
            except Exception as error:  # of a device that is gone, or a full disk
                return f"the last step could not be saved: {error}"

    def keep_state(self) -> str:
        """Do :attr:`keep`, from the watching thread; why it cannot, empty if it has."""
        try:
            with self._rescuing:
                if self.keep is None:
                    return "it does not train yet"
                self.keep()
        except Exception as error:  # of a device that is gone, or of memory
            return str(error)
        return ""

    def go_on(self, survivors: Survivors) -> None:
        """Take the new number, and have the training's thread go on with those who are left."""
        ranks = survivors.ranks
        self.rank, self.size = ranks.index(self.rank), len(ranks)
        self.numbers = [self.numbers[rank] for rank in ranks]
        self.machines = machines_of(self.machines, ranks)
        self.listening = [self.listening[rank] for rank in ranks]
        self.standby = self.rank == survivors.standby
        self.tell_reaper()
        self.held.clear()
        self.pause.forget()
        self.freeing = threading.Thread(target=self.free, name="free", daemon=True)
        self.freeing.start()  # not from here: it may hang too
        with self._regrouping:
            self.group += 1
            self.survivors = survivors
            self.regrouped.set()
        self.gathered.put(None)

    def take_survivors(self) -> Survivors:
        """With whom the training's thread goes on, which knows of them from now on."""
        with self._regrouping:
            survivors, self.survivors = self.survivors, None
            self.trains_in = self.group
            self.regrouped.clear()
        assert survivors is not None
        return survivors

    def tell_reaper(self) -> None:
        """Tell it of this rank's number, and who would have to know that its host outlives it."""
        if self.reaper is None:
            return
        to = 0 if self.rank else 1  # who is the first then
        others = self.survives and to < self.size
        known = self.listening[to] if others else None
        self.reaper.tell(
            rank=self.rank,
            number=self.number,
            supervisor=known and (known.address, known.port, known.token),
        )

    def write_last_words(self) -> None:
        """Do :attr:`last_words`; the job must end, whatever the disk does."""
        with contextlib.suppress(Exception):
            self.last_words()

    def leave(self, code: int) -> NoReturn:
        """End now: the main thread may be stuck in a collective that never returns."""
        if self.reaper:
            self.reaper.tell(ended=True)
        with self._rescuing:  # not before it has saved what it can
            try:
                self.write_last_words()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def line_of(fault: Fault) -> str:
    """What the user reads of a fault."""
    return f"motley: {fault.line()}"


def _leave_to_watching_thread(number: int, frame: object) -> None:
    """It acts on the wake-up byte; the main thread may be stuck in C."""


HOLD_S = 60.0  # that it may take
# Open MPI 5 kills the others 0.5 s after a rank is lost, 4.1 after 2 s: too soon for a large model.
_CUT_SHORT = (
    "motley: the last step is not saved: the launcher ended all ranks while one wrote it; --resume "
    "auto goes on from the checkpoint before, and --save-every 1m makes more of them"
)


def save_before_end(
    own: OwnRank,
    others: Mapping[socket.socket, RankStatus],
    lost: int,
    tell_all: Callable[[Message], None],
) -> None:
    """Have the state saved, by rank 0 or another rank that can, while the others wait.

    Args:
        others: all ranks but 0. lost: who cannot, by its number in the launch.
    """
    able = [line for line, each in others.items() if each.rescues and each.number != lost]
    if not able and own.rescue is None:
        return
    tell_all(Hold())
    reaper = None if own.stopped else own.reaper  # which else has a line to print already
    if reaper:
        reaper.tell(line=_CUT_SHORT)
    said = own.save_what_is_known() if own.rescue else _ask(able[0], others[able[0]])
    if reaper:
        reaper.tell(line="")
    if said:
        own.print(f"motley: {said}")


def _ask(line: socket.socket, status: RankStatus) -> str:
    """What a rank says that it has saved."""
    with contextlib.suppress(OSError):
        line.sendall(encode(Rescue()))
        line.settimeout(HOLD_S)
        while data := line.recv(65536):
            for message in map(decode, status.messages.feed(data)):
                if isinstance(message, Rescued):
                    return message.saved
    return ""

"""The state of this rank that its supervisor reports: phase, step, messages and end.

Before a lost rank ends a job, a surviving rank saves the state that all of them hold.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from motley.membership.pause import REQUESTS, OwnPause, read_request
from motley.membership.protocol import Hold, Message, Rescue, Rescued, decode, encode
from motley.membership.reaper import LauncherReaper
from motley.membership.survivors import GroupPlace, Survivors

_LINKS_S = 2.0  # between looks at what this process's connections do
_STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class TrainingHooks:
    """Functions that the training sets and the watching thread calls.

    Attributes:
        rescue: saves the state of this rank before it ends, and returns what it did; None: it
            cannot.
        last_words: writes records of this rank that are not written yet.
        how_to_continue: returns how a stopped run goes on, for people.
        keep: copies the state apart from the group, to go on without a lost rank; None: it cannot.
        free: has the training's thread leave a collective that waits for the lost rank.
        without_first: the state can also go on without rank 0.
    """

    rescue: Callable[[], str] | None = None
    last_words: Callable[[], None] = lambda: None
    how_to_continue: Callable[[], str] = lambda: "continue with --resume auto"
    keep: Callable[[], None] | None = None
    free: Callable[[], None] = lambda: None
    without_first: bool = False


class Outbox:
    """Messages of this rank to rank 0, and the pipe that wakes the watching thread to send them.

    Attributes:
        messages: not yet sent; the watching thread takes them.
        wake_read: end of the pipe that the watching thread waits for.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
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

    def read_signals(self) -> list[int]:
        """Return the stop signals that came since the last call; send the other ones' requests."""
        result = b""
        with contextlib.suppress(BlockingIOError):
            result = os.read(self.wake_read, 4096)
        for number in set(REQUESTS).intersection(result):
            self.add_request(number)
        # Every signal with a Python handler arrives here; DataLoader has one for SIGCHLD.
        return [number for number in result if number in _STOPS]

    def add_request(self, number: int) -> None:
        """Add the message that a signal asks for, if it asks for one."""
        if (request := read_request(number)) is not None:
            self.messages.append(request)

    def add(self, message: Message) -> None:
        """Have the watching thread send a message to rank 0."""
        self.messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the watching thread, if it waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")


class GroupChange:
    """The passage of this rank from a group that a lost rank has broken to the next one.

    The watching thread begins the passage, and the training thread completes it.

    Attributes:
        group: number of regroups that this rank has begun. Messages of earlier groups are void.
        trains_in: number of regroups that the training thread has completed. This thread may fail
            in the broken group while the watching thread goes on.
        survivors: the ranks with which the training thread has to go on, until it does; None: no
            rank is lost.
        begun: set while there are survivors to go on with.
        gathered: receives the values of :meth:`Supervisor.gather`; None: the group broke meanwhile.
        freeing: makes the training thread leave a collective. Until this is done, the group must
            not be left in another way.
    """

    def __init__(self) -> None:
        self.group = self.trains_in = 0
        self.survivors: Survivors | None = None
        self.begun = threading.Event()
        self.gathered = SimpleQueue[list[str] | None]()
        self.freeing = threading.Thread()
        self._lock = threading.Lock()

    def begin(self, survivors: Survivors, free: Callable[[], None]) -> None:
        """Have the training's thread leave the broken group, and go on with the survivors."""
        self.freeing = threading.Thread(target=free, name="free", daemon=True)
        self.freeing.start()  # not from here: it may hang too
        with self._lock:
            self.group += 1
            self.survivors = survivors
            self.begun.set()
        self.gathered.put(None)

    def take(self) -> Survivors:
        """Return the survivors to the training's thread, which is in their group from now on."""
        with self._lock:
            survivors, self.survivors = self.survivors, None
            self.trains_in = self.group
            self.begun.clear()
        assert survivors is not None
        return survivors


class OwnRank:
    """This rank, as the training's thread and the watching thread share it.

    The training's thread sets ``step``, ``heartbeat`` and ``hooks``, and adds messages. The
    watching thread sets everything else.

    Attributes:
        place: in the present group; replaced in one piece.
        step: that training is at; None before the first.
        heartbeat: what the next one says, but for the step.
        awake: this process's waking time.
        finished: all ranks are done.
        stopped: some rank was, by a signal.
        reaper: on the lowest rank of each machine.
        held: rank 0 waits for a rescue, and ends this rank after it.
        pause: the step boundary at which this rank stops, if a pause was requested.
        leaves: it ends now, before the others, once its messages are sent.
    """

    def __init__(self, place: GroupPlace) -> None:
        self.place = place
        self.step: int | None = None
        self.heartbeat = Heartbeat()
        self.awake = AwakeClock()
        self.hooks, self.outbox, self.change = TrainingHooks(), Outbox(), GroupChange()
        self.finished = threading.Event()
        self.stopped = False
        self.reaper: LauncherReaper | None = None
        self.held = threading.Event()
        self.pause = OwnPause()
        self.leaves = threading.Event()
        self._rescuing = threading.RLock()
        self._next_heartbeat = self._look_at_links = 0.0
        self._unanswered: list[str] = []

    def send(self, message: Message) -> None:
        """Have the watching thread send a message to rank 0."""
        self.outbox.add(message)

    def send_in_group(self, message: Message) -> None:
        """Send a message that is void once a rank is lost; from the training's thread."""
        self.send(replace(message, group=self.change.trains_in))

    def heartbeat_now(self) -> Heartbeat:
        """Return the current heartbeat."""
        if time.monotonic() > self._look_at_links:
            self._look_at_links = time.monotonic() + _LINKS_S
            self._unanswered = dead_peers()
        return replace(self.heartbeat, step=self.step, unanswered=self._unanswered)

    def hasten_heartbeat(self) -> None:
        """Have the next one be now."""
        self._next_heartbeat = 0.0
        self.outbox.wake()

    def heartbeat_in(self) -> float:
        """Return the seconds until the next heartbeat."""
        return max(0.0, self._next_heartbeat - time.monotonic())

    def heartbeat_due(self) -> bool:
        """Return True if it is time for a heartbeat; the next is an interval later."""
        due = self.heartbeat_in() == 0.0
        if due:
            self._next_heartbeat = time.monotonic() + heartbeat_interval_s(self.place.size)
        return due

    def print(self, text: str) -> None:
        """Say last words to the user, also where mpirun passes nothing on any more."""
        line = text if self.stopped else ""
        if self.reaper and self.reaper.send(line=line, fault=None, ended=True) and self.stopped:
            return
        with contextlib.suppress(OSError):  # mpirun may be gone, and its pipe with it
            print(text, file=sys.stderr, flush=True)

    def save_what_is_known(self) -> str:
        """Call the hook ``rescue`` from the watching thread, and return a note on its result.

        The note also describes an error of the hook, which is not raised.
        """
        self.write_last_words()  # first: the launcher may soon end this rank
        if self.hooks.rescue is None:
            return ""
        with self._rescuing:
            try:
                return self.hooks.rescue()
            except Exception as error:  # of a device that is gone, or a full disk
                return f"the last step could not be saved: {error}"

    def keep_state(self) -> str:
        """Call the hook ``keep`` from the watching thread; return why it cannot, else ""."""
        try:
            with self._rescuing:
                if self.hooks.keep is None:
                    return "it does not train yet"
                self.hooks.keep()
        except Exception as error:  # of a device that is gone, or of memory
            return str(error)
        return ""

    def go_on(self, survivors: Survivors) -> None:
        """Take the new place, and have the training's thread go on with the survivors."""
        self.place = self.place.among(survivors.ranks)
        self.inform_reaper()
        self.held.clear()
        self.pause.clear()
        self.change.begin(survivors, self.hooks.free)

    def inform_reaper(self) -> None:
        """Send the reaper this rank's number, and the address of a rank to inform of its death.

        The other rank learns from the reaper that the host outlives this rank.
        """
        if self.reaper is None:
            return
        place = self.place
        to = 0 if place.rank else 1  # the first rank, if this one dies
        known = place.listening[to] if place.survives and to < place.size else None
        self.reaper.send(
            rank=place.rank,
            number=place.number,
            supervisor=known and (known.address, known.port, known.token),
        )

    def write_last_words(self) -> None:
        """Call the hook ``last_words``; the job must end, whatever the disk does."""
        with contextlib.suppress(Exception):
            self.hooks.last_words()

    def leave(self, code: int) -> NoReturn:
        """End now: the main thread may be stuck in a collective that never returns."""
        if self.reaper:
            self.reaper.send(ended=True)
        with self._rescuing:  # not before it has saved what it can
            try:
                self.write_last_words()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def format_fault(fault: Fault) -> str:
    """Return the line that the user reads of a fault."""
    return f"motley: {fault.line()}"


def _leave_to_watching_thread(number: int, frame: object) -> None:
    """Do nothing: the watching thread acts on the wake-up byte, and this one may be stuck in C."""


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
    """Make rank 0, or another rank that can, save the state while the others wait.

    Args:
        own: state of this rank.
        others: all ranks but 0.
        lost: number in the launch of the rank that cannot save.
        tell_all: sends a message to all other ranks.
    """
    able = [line for line, each in others.items() if each.rescues and each.number != lost]
    if not able and own.hooks.rescue is None:
        return
    tell_all(Hold())
    reaper = None if own.stopped else own.reaper  # which else has a line to print already
    if reaper:
        reaper.send(line=_CUT_SHORT)
    text = own.save_what_is_known() if own.hooks.rescue else _ask(able[0], others[able[0]])
    if reaper:
        reaper.send(line="")
    if text:
        own.print(f"motley: {text}")


def _ask(line: socket.socket, status: RankStatus) -> str:
    """Have a rank save its state, and return its answer."""
    with contextlib.suppress(OSError):
        line.sendall(encode(Rescue()))
        line.settimeout(HOLD_S)
        while data := line.recv(65536):
            for message in map(decode, status.messages.feed(data)):
                if isinstance(message, Rescued):
                    return message.saved
    return ""

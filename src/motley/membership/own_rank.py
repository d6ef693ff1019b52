"""The state of this rank that its supervisor reports: phase, step, messages and end.

The supervisor (motley.membership.supervisor) runs in the watching thread of each rank.

Before a lost rank ends a job, a surviving rank saves the state that all survivors hold.
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

_LINKS_S = 2.0  # seconds between two checks of this process's connections
_STOPS = (signal.SIGTERM, signal.SIGINT)
_BLOCKED = threading.local()  # signals that a thread blocked before it forked


@dataclass
class TrainingHooks:
    """Functions that the training thread sets and the watching thread calls.

    Attributes:
        rescue: function that saves the training state before this rank ends, and returns a note for
            the user on the saved state. None: this rank cannot save.
        last_words: function that writes the records that this rank has not written yet.
        how_to_continue: function of the number of finished steps that returns an instruction to the
            user on how to continue the run.
        if_lost: instruction to the user on how to continue after a lost rank; empty: none.
        keep: function that copies the training state out of the process group, so that this rank
            can continue without a lost rank. None: this rank cannot continue.
        free: function that makes the training thread leave a collective that waits for the lost
            rank.
        without_first: True if the training can also continue without rank 0.
        clear_line: text that removes this rank's progress bar from the terminal; empty: no bar.
    """

    rescue: Callable[[], str] | None = None
    last_words: Callable[[], None] = lambda: None
    how_to_continue: Callable[[int | None], str] = lambda _: "start it again with the same command"
    if_lost: str = ""
    keep: Callable[[], None] | None = None
    free: Callable[[], None] = lambda: None
    without_first: bool = False
    clear_line: str = ""


class Outbox:
    """Messages of this rank to rank 0, and the pipe that wakes the watching thread to send them.

    Attributes:
        messages: messages to send. The watching thread sends and removes them.
        wake_read: end of the pipe that the watching thread waits for.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.wake_read, self._wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self._wake_write, False)

    def catch_signals(self) -> None:
        """Let the watching thread act on stop signals from now on."""
        for number in (*_STOPS, *REQUESTS):
            signal.signal(number, _leave_to_watching_thread)
        for number in REQUESTS:
            signal.siginterrupt(number, False)  # interrupted system calls are repeated
        # The C-level handler writes the signal's number here at once, even while the main
        # thread sits inside a collective and cannot run Python.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        os.register_at_fork(
            before=_block_stops, after_in_parent=_unblock_stops,
            after_in_child=_leave_signals_to_parent,
        )  # fmt: skip

    def read_signals(self) -> list[int]:
        """Return the numbers of the stop signals that came since the last call.

        For other signals, queue the messages that they request.
        """
        result = b""
        with contextlib.suppress(BlockingIOError):
            result = os.read(self.wake_read, 4096)
        for number in set(REQUESTS).intersection(result):
            self.add_request(number)
        # Every signal with a Python handler arrives here; DataLoader has one for SIGCHLD.
        return [number for number in result if number in _STOPS]

    def add_request(self, number: int) -> None:
        """Queue the message to rank 0 that a signal such as a pause request stands for, if any."""
        if (request := read_request(number)) is not None:
            self.messages.append(request)

    def add(self, message: Message) -> None:
        """Let the watching thread send a message to rank 0."""
        self.messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the watching thread, if it waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")


class GroupChange:
    """The change of this rank to the next process group, after a lost rank broke its group.

    The watching thread starts the change, and the training thread completes it.

    Attributes:
        group: number of regroups that the watching thread has started. Messages that were sent in
            an earlier group are ignored.
        trains_in: number of regroups that the training thread has completed. The training thread
            may fail in the broken group while the watching thread has already changed to the next
            group.
        survivors: the ranks with which the training thread has to continue; None: no rank is lost,
            or the training thread has continued already.
        begun: event that is set while ``survivors`` is not None.
        gathered: queue of the results of :meth:`Supervisor.gather`. A result None means that the
            group broke meanwhile.
        freeing: thread that makes the training thread leave a collective. Until this thread has
            ended, no other code may leave the group.
    """

    def __init__(self) -> None:
        self.group = self.trains_in = 0
        self.survivors: Survivors | None = None
        self.begun = threading.Event()
        self.gathered = SimpleQueue[list[str] | None]()
        self.freeing = threading.Thread()
        self._lock = threading.Lock()

    def begin(self, survivors: Survivors, free: Callable[[], None]) -> None:
        """Make the training thread leave the broken group, and continue with the survivors.

        Args:
            survivors: the ranks of the next group.
            free: see :class:`TrainingHooks`.
        """
        self.freeing = threading.Thread(target=free, name="free", daemon=True)
        self.freeing.start()  # not from here: it may hang too
        with self._lock:
            self.group += 1
            self.survivors = survivors
            self.begun.set()
        self.gathered.put(None)

    def take(self) -> Survivors:
        """Return the survivors. The calling training thread belongs to their group from now on."""
        with self._lock:
            survivors, self.survivors = self.survivors, None
            self.trains_in = self.group
            self.begun.clear()
        assert survivors is not None
        return survivors


class OwnRank:
    """The state of this rank, which the training thread and the watching thread share.

    The training thread sets ``step``, ``heartbeat`` and ``hooks``, and adds messages. The watching
    thread sets everything else.

    Attributes:
        place: number of this rank in the present group, and the other ranks. A change replaces the
            whole object.
        step: current step of the training; None before step 1.
        heartbeat: content of the next heartbeat, except for the step.
        awake: clock of the time that this process was awake.
        hooks: functions that the training sets.
        outbox: messages to rank 0.
        change: the change to the next process group after the loss of a rank.
        finished: event that is set once all ranks are done.
        stopped: True once a signal has stopped some rank.
        reaper: connection to the reaper, a process that ends a hung launcher after this rank has
            died. Only the lowest rank of each machine has one; None on other ranks.
        held: event that is set while another rank saves the training state. Rank 0 then ends this
            rank.
        pause: the step boundary at which this rank stops, if a pause was requested.
        leaves: event that is set if this rank ends before the other ranks, once its messages are
            sent.
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
        """Let the watching thread send a message to rank 0."""
        self.outbox.add(message)

    def send_in_group(self, message: Message) -> None:
        """Send a message of the training thread. Rank 0 ignores it once a rank is lost."""
        self.send(replace(message, group=self.change.trains_in))

    def heartbeat_now(self) -> Heartbeat:
        """Return the current heartbeat."""
        if time.monotonic() > self._look_at_links:
            self._look_at_links = time.monotonic() + _LINKS_S
            self._unanswered = dead_peers()
        return replace(self.heartbeat, step=self.step, unanswered=self._unanswered)

    def hasten_heartbeat(self) -> None:
        """Make the watching thread send a heartbeat now."""
        self._next_heartbeat = 0.0
        self.outbox.wake()

    def heartbeat_in(self) -> float:
        """Return the seconds until the next heartbeat."""
        return max(0.0, self._next_heartbeat - time.monotonic())

    def heartbeat_due(self) -> bool:
        """Return True if it is time for a heartbeat. The next one is then due an interval later."""
        due = self.heartbeat_in() == 0.0
        if due:
            self._next_heartbeat = time.monotonic() + heartbeat_interval_s(self.place.size)
        return due

    def print(self, text: str) -> None:
        """Print a last line for the user, even if mpirun no longer forwards the output of ranks."""
        line = text if self.stopped else ""
        if self.reaper and self.reaper.send(line=line, fault=None, ended=True) and self.stopped:
            return
        with contextlib.suppress(OSError):  # mpirun may be gone, and its pipe with it
            print(f"{self.hooks.clear_line}{text}", file=sys.stderr, flush=True)

    def save_what_is_known(self) -> str:
        """Call the hook ``rescue`` from the watching thread, and return a note on the saved state.

        The note also describes an error of the hook, which is not raised.
        """
        self.write_last_words()  # first: the launcher may soon end this rank
        if self.hooks.rescue is None:
            return ""
        with self._rescuing:
            try:
                return self.hooks.rescue()
            except Exception as error:  # a device is gone, or a disk is full
                return f"the last step could not be saved: {error}"

    def keep_state(self) -> str:
        """Call the hook ``keep`` from the watching thread.

        Returns:
            The reason why the state could not be copied; empty after a successful copy.
        """
        try:
            with self._rescuing:
                if self.hooks.keep is None:
                    return "it does not train yet"
                self.hooks.keep()
        except Exception as error:  # a device is gone, or memory is short
            return str(error)
        return ""

    def go_on(self, survivors: Survivors) -> None:
        """Set this rank's place in the new group, and let the training thread continue in it."""
        self.place = self.place.among(survivors.ranks)
        self.inform_reaper()
        self.held.clear()
        self.pause.clear()
        self.change.begin(survivors, self.hooks.free)

    def inform_reaper(self) -> None:
        """Send the reaper this rank's number, and the address of the rank that watches all.

        If this rank dies, the reaper reports to that rank that the host still lives.
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
        """Call the hook ``last_words``. Ignore its errors, since the job must end anyway."""
        with contextlib.suppress(Exception):
            self.hooks.last_words()

    def leave(self, code: int) -> NoReturn:
        """End this process now, since the main thread may be stuck in a collective for ever.

        Args:
            code: exit status.
        """
        if self.reaper:
            self.reaper.send(ended=True)
        with self._rescuing:  # not before a running rescue has saved its state
            try:
                self.write_last_words()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def format_fault(fault: Fault) -> str:
    """Return the line that describes a fault to the user."""
    return f"motley: {fault.line()}"


def _leave_to_watching_thread(number: int, frame: object) -> None:
    """Do nothing in the main thread, which may be stuck in C.

    The watching thread acts on the signal, whose number C code writes to its pipe.
    """


def _block_stops() -> None:
    """Block stop signals in the thread that forks, until the child has set its own handlers."""
    _BLOCKED.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _unblock_stops() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED.before)


def _leave_signals_to_parent() -> None:
    """Let SIGTERM end a forked child, and do not report the child's signals as this rank's.

    ``multiprocessing.Pool`` ends its processes by SIGTERM. A forked process inherits the pipe into
    which this rank's signal handler writes.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_stops()


HOLD_S = 60.0  # seconds that saving the state may take
# Open MPI 5 kills the others 0.5 s after a rank is lost, Open MPI 4.1 after 2 s. A large model
# takes longer to save.
_CUT_SHORT = (
    "motley: the last step was not saved, because the launcher ended all ranks while one wrote "
    "it. --resume auto continues from the checkpoint before; --save-every 1m saves more often"
)


def save_before_end(
    own: OwnRank,
    others: Mapping[socket.socket, RankStatus],
    lost: int,
    tell_all: Callable[[Message], None],
) -> None:
    """Let rank 0, or another rank that can save, save the training state. Other ranks wait.

    Args:
        own: state of this rank.
        others: status of every rank but 0, by the connection to the rank.
        lost: number in the launch of the rank that cannot save.
        tell_all: function that sends a message to all other ranks.
    """
    able = [line for line, each in others.items() if each.rescues and each.number != lost]
    if not able and own.hooks.rescue is None:
        return
    tell_all(Hold())
    reaper = (
        None if own.stopped else own.reaper
    )  # a stopped rank's reaper already has a line to print
    if reaper:
        reaper.send(line=_CUT_SHORT)
    text = own.save_what_is_known() if own.hooks.rescue else _ask(able[0], others[able[0]])
    if reaper:
        reaper.send(line="")
    if text:
        own.print(f"motley: {text}")


def _ask(line: socket.socket, status: RankStatus) -> str:
    """Ask a rank to save the training state, and return its note; empty if no answer comes."""
    with contextlib.suppress(OSError):
        line.sendall(encode(Rescue()))
        line.settimeout(HOLD_S)
        while data := line.recv(65536):
            for message in map(decode, status.messages.feed(data)):
                if isinstance(message, Rescued):
                    return message.saved
    return ""

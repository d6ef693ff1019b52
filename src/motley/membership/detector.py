"""The detector of silent, stuck and slow ranks: rank 0 judges the heartbeats of all ranks.

A heartbeat shows that a process lives, and what its training is doing. A rank without heartbeats is
silent: its host froze, or a cable was pulled. If all ranks send heartbeats, but none of them makes
progress, the job hangs. ``motley watch`` shows silent ranks, and the straggler that all others wait
for, long before rank 0 reports a fault.

A faulty switch port, a wrong route or a firewall may separate two hosts while rank 0 receives from
both hosts. Then no rank is silent, but all ranks wait for one another: in a collective, at the end
of an epoch, or at the start. This module finds such a link by TCP: TCP retransmits data that the
peer has not acknowledged, and the kernel records the time since the last answer. The kernel of a
peer acknowledges data even if the peer's process is busy or stopped.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from motley.faults import Fault, FaultKind, Phase
from motley.membership.fault_causes import (
    make_alone_fault,
    make_hang_fault,
    make_link_fault,
    make_silent_fault,
    make_stop_fault,
)
from motley.membership.messages import Messages

HEARTBEAT_INTERVAL_S = 0.5  # also the interval at which deadlines are checked

_MOST_HEARTBEATS = 1000  # per second that rank 0 receives
_LONGEST_INTERVAL_S = 1.0  # a quarter of SUSPECT_AFTER_S

# Without a heartbeat, these end the job. The longest gaps measured were 1.5 s on five lab
# hosts of 0.3 to 1 CPUs, on two cores that had eight processes waiting. They were 1.2 s in
# DeepSpeed's first compilation by three ranks on two cores, and 0.5 s in torch.compile and the
# first CUDA and NCCL calls on an H200. A cable that was out for 7 s costs up to 13, for TCP
# doubles its waits.
HEARTBEAT_TIMEOUT_S = 15.0

# After this time without a heartbeat, a stop by mpirun is blamed on the silent rank. mpirun
# notices a cut cable after 6 to 11 s.
SUSPECT_AFTER_S = 4.0

# After a silence of some length, TCP may wait as long again before it sends what was lost.
SETTLED_S = HEARTBEAT_TIMEOUT_S

# A stop that comes after this time without progress is likely to be meant for a hang.
STALL_S = 10.0

# Seconds in which some rank should make progress in any phase but DATA.
PROGRESS_TIMEOUT_S = 1800.0
DATA = None  # a download may take any time


def step_timeout_s(usual: float) -> float:
    """Return the seconds after which a step without progress of any rank counts as stuck.

    Args:
        usual: usual duration of a step in seconds.
    """
    # Two minutes: a network disk's hiccup, or a kernel that is built for an epoch's last batch.
    return max(120.0, 20 * usual)


def heartbeat_interval_s(size: int) -> float:
    """Return the seconds between two heartbeats of one rank in a group of ``size`` ranks."""
    return max(HEARTBEAT_INTERVAL_S, min(size / _MOST_HEARTBEATS, _LONGEST_INTERVAL_S))


class AwakeClock:
    """A clock that counts only the seconds in which this process was awake.

    A frozen process receives nothing. The time in which it was frozen therefore does not show that
    another rank was silent.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """Advance the clock, and return the seconds that this process was awake.

        Call this method about every HEARTBEAT_INTERVAL_S seconds. A longer gap between two calls
        counts as four intervals at most.
        """
        now = time.monotonic()
        self.seconds += min(now - self._last, 4 * HEARTBEAT_INTERVAL_S)
        self._last = now
        return self.seconds


@dataclass
class Heartbeat:
    """The content of a heartbeat.

    Attributes:
        step: current step of the rank; None before step 1.
        phase: phase of the rank.
        moves: a counter that grows whenever the rank makes progress.
        timeout_s: seconds in which at least one rank should make progress; None if no limit is
            known.
        detail: words that describe the phase more exactly; may be empty.
        unanswered: addresses of machines that acknowledge nothing that this rank sends.
    """

    step: int | None = None
    phase: Phase = Phase.START
    moves: int = 0
    timeout_s: float | None = None
    detail: str = ""
    unanswered: list[str] = field(default_factory=list)

    @property
    def doing(self) -> str:
        """Description of the rank's phase for the user."""
        return self.detail or self.phase.words

    @property
    def waits(self) -> bool:
        """True if the rank has finished its part of the step, and waits for other ranks."""
        return self.phase is Phase.ALL_REDUCE

    def message(self) -> list[Any]:
        """Return the fields of the heartbeat as a JSON list, without their names.

        The message is short, because rank 0 of a thousand ranks reads up to two thousand a second.
        """
        rest = [self.detail, self.unanswered] if self.detail or self.unanswered else []
        return [self.step, self.phase.key, self.moves, self.timeout_s, *rest]

    @classmethod
    def read(cls, message: Sequence[Any]) -> "Heartbeat":
        """Return the heartbeat that :meth:`message` has encoded."""
        step, phase, *rest = message
        return cls(step, Phase.from_key(phase), *rest)


@dataclass
class RankStatus:
    """Rank 0's view of one rank.

    Attributes:
        rank: number of the rank in the present group.
        number: number of the rank in the launch.
        host: name of the rank's host.
        received_s: time of the rank's last message, in seconds that rank 0 was awake.
        wrote: time of the last bytes on the rank's connection, in seconds that rank 0 was awake.
            The rank's fault handler writes to this connection too (see motley.membership.messages).
        heartbeat: last heartbeat of the rank.
        done: True once the rank has finished its training.
        rescues: True if the rank can save the training state before the job ends, in place of rank
            0.
        regroups: True if the rank can continue after another rank is lost.
        address: address of the rank's machine in the network that all ranks share.
        left: True once the rank has no work left, because its host leaves the job.
        messages: decoder of the bytes that the rank sends.
    """

    rank: int
    number: int
    host: str
    received_s: float = 0.0
    wrote: float = 0.0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    done: bool = False
    rescues: bool = False
    regroups: bool = False
    address: str = ""
    left: bool = False
    messages: Messages = field(default_factory=Messages, repr=False)

    @property
    def lived(self) -> float:
        """Time of the rank's last sign of life, in seconds that rank 0 was awake."""
        return max(self.received_s, self.wrote)

    def take(self, data: bytes, now: float) -> list[dict[str, Any]]:
        """Append received bytes and return the complete messages.

        Args:
            data: the received bytes.
            now: time of arrival, in seconds that rank 0 was awake.
        """
        result = self.messages.feed(data)
        self.wrote, self.received_s = now, now if result else self.received_s
        return result


class Watchdog:
    """The detector of failed ranks, on rank 0.

    Args:
        awake: clock of the time that this process was awake.
        number: number of this rank in the launch.
        host: host of this rank.
    """

    def __init__(self, awake: AwakeClock, number: int, host: str) -> None:
        self._awake, self._number, self._host = awake, number, host
        self._moved = 0.0
        self._unsettled = -SETTLED_S

    def receive(self, status: RankStatus, heartbeat: Heartbeat) -> None:
        """Store a rank's heartbeat. If the heartbeat shows progress, also store the time."""
        if heartbeat != status.heartbeat:
            self._moved = self._awake.seconds
        status.heartbeat = heartbeat

    def silent(
        self, statuses: Sequence[RankStatus], limit: float = HEARTBEAT_TIMEOUT_S
    ) -> Fault | None:
        """Return the fault of ranks that sent no message for ``limit`` seconds, or None.

        Args:
            statuses: status of each rank but 0.
            limit: seconds without a message.
        """
        now = self._awake.seconds
        if now - min((status.lived for status in statuses), default=now) <= limit:
            return None
        statuses = sorted(
            statuses, key=lambda status: status.rank
        )  # a rank that is done still sends
        # The ranks of one switch fall silent together, but their last heartbeats differ in time.
        since = now - (limit - 4 * HEARTBEAT_INTERVAL_S)
        quiet = [status for status in statuses if status.lived < since]
        first, others = quiet[0], quiet[1:]
        away = {status.host for status in statuses} - {self._host}
        if len(away) > 1 and away <= {status.host for status in quiet}:
            name, step = _hosts(quiet), first.heartbeat.step
            return make_alone_fault(self._number, self._host, step, now - first.lived, name)
        like = f", and so {_are(others)} {_ranks(others)} on {_hosts(others)}" if others else ""
        return make_silent_fault(
            first.number, first.host, first.heartbeat.step, now - first.lived, like
        )

    def dead_link(self, ranks: Sequence[RankStatus]) -> Fault | None:
        """Return the fault of two machines that cannot reach each other, or None.

        Rank 0 receives messages from both of these machines.

        Args:
            ranks: status of each rank, rank 0 included.
        """
        now = self._awake.seconds
        if self.silent(ranks[1:], SUSPECT_AFTER_S):
            self._unsettled = now
        if now - self._unsettled < SETTLED_S:  # a host that was cut off is being answered again
            return None
        hosts = {status.address: status.host for status in ranks if status.address}
        for status in ranks:
            other = next((hosts[a] for a in status.heartbeat.unanswered if a in hosts), status.host)
            if other != status.host:
                return make_link_fault(status.number, status.host, status.heartbeat.step, other)
        return None

    def stuck(self, ranks: Sequence[RankStatus]) -> Fault | None:
        """Return the fault of the rank that blocks all others; None if any rank makes progress.

        Args:
            ranks: status of each rank, rank 0 included.
        """
        at_work = [status for status in ranks if not status.done]
        still = self._awake.seconds - self._moved
        for status in at_work:
            if status.heartbeat.timeout_s is None or still <= status.heartbeat.timeout_s:
                return None
        if not at_work:
            return None
        first, where = whereabouts(at_work)
        return make_hang_fault(first.number, first.host, first.heartbeat.step, still, where)

    def describe_stall(self, ranks: Sequence[RankStatus]) -> str:
        """Return the phases of all ranks in words if no rank made progress for STALL_S seconds.

        Else return an empty text.

        Args:
            ranks: status of each rank, rank 0 included.
        """
        still = self._awake.seconds - self._moved
        if still < STALL_S:
            return ""
        return f"{still:.0f} s without progress; {whereabouts(ranks)[1]}"


def whereabouts(statuses: Sequence[RankStatus]) -> tuple[RankStatus, str]:
    """Return the rank that all others wait for, and the phases of all ranks in words."""
    doing: dict[tuple[int, str], list[RankStatus]] = {}
    for status in sorted(statuses, key=lambda status: status.rank):
        step = -1 if status.heartbeat.step is None else status.heartbeat.step
        doing.setdefault((step, status.heartbeat.doing), []).append(status)
    behind = [key for key, (status, *_) in doing.items() if not status.heartbeat.waits] or list(
        doing
    )
    where = "; ".join(
        f"{_ranks(group)} {_are(group)} {what}" for (_, what), group in sorted(doing.items())
    )
    return doing[min(behind)][0], where


def _ranks(statuses: Sequence[RankStatus]) -> str:
    numbers = [str(status.number) for status in statuses]
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"ranks {shown}" if len(numbers) > 1 else f"rank {shown}"


def _are(statuses: Sequence[RankStatus]) -> str:
    return "are" if len(statuses) > 1 else "is"


def _hosts(statuses: Sequence[RankStatus]) -> str:
    names = list(dict.fromkeys(status.host for status in statuses))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


DEAD_AFTER_S = 18.0  # seconds without an acknowledgement of sent data
_LEAST_TRIES = 3  # retransmissions; TCP doubles the time between two
# Offsets in struct tcp_info, linux/tcp.h: tcpi_retransmits; tcpi_unacked; tcpi_last_ack_recv, ms.
_RETRANSMITS, _UNACKED, _LAST_ACK_MS = 2, 24, 56
_INFO_BYTES = 256
_getsockopt = ctypes.PyDLL(None).getsockopt  # it never waits, so it need not release Python's lock
_LOCAL = ("127.", "::1", "::ffff:127.")


def dead_peers(after_s: float = DEAD_AFTER_S, tries: int = _LEAST_TRIES) -> list[str]:
    """Return the addresses of machines that do not answer on this process's TCP connections.

    The call takes 2 ms for 1,000 connections.

    Args:
        after_s: seconds without an answer after which a machine counts as dead.
        tries: number of retransmissions after which a machine counts as dead. Both limits must be
            reached.
    """
    result = set()
    for number, info in _connections():
        if is_dead(info, after_s, tries):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
                result.add(str(line.getpeername()[0]).removeprefix("::ffff:"))
    return sorted(address for address in result if not address.startswith(_LOCAL))


def is_dead(info: bytes, after_s: float, tries: int = _LEAST_TRIES) -> bool:
    """Return True if the peer of a TCP connection has not answered retransmissions for too long.

    Args:
        info: struct tcp_info of the connection.
        after_s: seconds without an acknowledgement after which the peer counts as dead.
        tries: least number of retransmissions.
    """
    unacked = struct.unpack_from("=I", info, _UNACKED)[0]
    last_ack_ms = struct.unpack_from("=I", info, _LAST_ACK_MS)[0]
    tried = info[_RETRANSMITS]
    return bool(unacked and tried >= tries and last_ack_ms > 1000 * after_s)


def _connections() -> Iterator[tuple[int, bytes]]:
    """Yield the descriptor and struct tcp_info of each TCP socket of this process.

    Each descriptor is passed to getsockopt() without a socket object, since one rank of a thousand
    has about a thousand connections.
    """
    info, size = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  Path objects would double the time
        size.value = _INFO_BYTES
        where = ctypes.byref(info), ctypes.byref(size)
        if not _getsockopt(int(name), socket.IPPROTO_TCP, socket.TCP_INFO, *where):
            yield int(name), info.raw[: size.value]


REPORTED_AFTER_S = 2.5  # seconds without a heartbeat; gaps of 1.5 s are usual on a busy machine
# Without an answer to data that was sent again twice. A busy machine still acknowledges.
CUT_OFF_AFTER_S, _TRIES = 1.0, 2


def cut_off() -> Collection[str]:
    """Return the addresses of machines that acknowledge no data that this process sends."""
    return dead_peers(CUT_OFF_AFTER_S, _TRIES)


class SilentRanks:
    """The ranks whose heartbeats no longer reach rank 0.

    Args:
        awake: clock of the time that rank 0 was awake.
        cut_off: function that returns the addresses of unreachable machines; see :func:`cut_off`.
    """

    def __init__(self, awake: AwakeClock, cut_off: Callable[[], Collection[str]] = cut_off) -> None:
        self._awake, self._cut_off = awake, cut_off
        self._silent = set[int]()

    def changes(self, statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
        """Return events to record, for ranks that became silent and ranks that send again.

        Args:
            statuses: status of each rank but 0, without lost ranks.
        """
        now = self._awake.seconds
        late, soon = now - REPORTED_AFTER_S, now - CUT_OFF_AFTER_S
        first = min((each.received_s for each in statuses), default=now)
        if not self._silent and first >= soon:
            return []
        cut_off = self._cut_off() if first < soon else ()
        silent = {
            each.number: each for each in statuses
            if each.received_s < late or (each.received_s < soon and each.address in cut_off)
        }  # fmt: skip
        again = [each for each in statuses if each.number in self._silent - silent.keys()]
        new = [each for number, each in silent.items() if number not in self._silent]
        self._silent = {*silent}
        return [
            *({"kind": "silent", "rank": each.number, "host": each.host,
               "step": each.heartbeat.step, "seconds": round(now - each.received_s, 1)}
              for each in new),
            *({"kind": "heard_again", "rank": each.number, "host": each.host} for each in again),
        ]  # fmt: skip


# Seconds, and usual steps, without progress; the longer time counts.
_TOLD_AFTER_S, _TOLD_AFTER_STEPS = 1.0, 3.0
_LOOKS_BACK = 8  # steps whose median duration counts as usual
_LATELY_S = 1.5  # heartbeats come once a second or more often
# Phases in which a rank keeps the others waiting.
_OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class StragglerDetector:
    """The detector of the straggler, the rank that all other ranks wait for in a step.

    Args:
        awake: clock of the time that rank 0 was awake.
    """

    def __init__(self, awake: AwakeClock) -> None:
        self._awake = awake
        self._step: int | None = None
        self._since, self._told = 0.0, False
        self._took = deque[float](maxlen=_LOOKS_BACK)

    def changes(self, statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
        """Return a list with an event that names the step's straggler; empty if none is found.

        Each step's straggler is reported once.

        Args:
            statuses: status of each rank.
        """
        now = self._awake.seconds
        training = [each for each in statuses if each.heartbeat.step is not None and not each.done]
        step = max((each.heartbeat.step or 0 for each in training), default=None)
        if step != self._step:
            if step is not None and self._step is not None and step > self._step:
                self._took.append((now - self._since) / (step - self._step))
            self._step, self._since, self._told = step, now, False
        quiet = now - self._since
        if self._told or not self._took:
            return []
        if quiet <= max(_TOLD_AFTER_S, _TOLD_AFTER_STEPS * median(self._took)):
            return []
        behind = [each for each in training if not each.heartbeat.waits]
        clear = len(behind) < len(training) and len({each.host for each in behind}) == 1
        if not clear or not all(self._is_at_work(each) for each in behind):
            return []
        self._told = True
        first = min(behind, key=lambda each: each.number)
        return [
            {"kind": "waited_for", "rank": first.number, "host": first.host, "step": step,
             "seconds": round(quiet, 1), "doing": first.heartbeat.doing}
        ]  # fmt: skip

    def _is_at_work(self, status: RankStatus) -> bool:
        """Return True if the rank's last heartbeat is recent and reports that the rank works."""
        heard = status.rank == 0 or self._awake.seconds - status.received_s < _LATELY_S
        return heard and status.heartbeat.phase in _OWN


class StopSignals:
    """The ranks that received a stop signal, such as SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self._ranks = set[int]()

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def came(
        self,
        status: RankStatus,
        number: int,
        statuses: Sequence[RankStatus],
        step: int | None,
        stall: str,
        how_to_continue: str,
    ) -> Fault:
        """Record that a rank received a stop signal; return the fault that explains all signals.

        Args:
            status: status of the rank.
            number: number of the signal.
            statuses: status of each rank.
            step: current step of the training; None: before step 1.
            stall: phases of the ranks, in words, if no rank made progress before the signal; else
                empty.
            how_to_continue: instruction to the user on how to continue the run.
        """
        self._ranks.add(status.rank)
        if 0 in self._ranks or len(self._ranks) > 1:
            # The launcher passes Ctrl-C on as SIGTERM.
            others = ["a signal to the launcher"] * (number != signal.SIGINT)
            others += ["Slurm"] * ("SLURM_JOB_ID" in os.environ)
            by = " or ".join(["Ctrl-C", *others]) + (f" ({stall})" if stall else "")
            return make_stop_fault(step, number, by, how_to_continue)
        _, where = whereabouts(statuses)
        name = signal.Signals(number).name
        return Fault(
            status.number, status.host, step,
            f"stopped by {name}, which was sent to this rank alone while {where}",
            "continue with --resume auto", echo=True, kind=FaultKind.KILLED, signal=number,
        )  # fmt: skip


# Faults after which the state of the other ranks is valid, and worth saving.

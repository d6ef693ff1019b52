"""Who is silent, and who is stuck: rank 0 judges the heartbeats of all ranks.

A heartbeat says that a process lives, and what its training is doing. A rank without any is silent:
its host froze, or a cable was pulled. Heartbeats without any movement anywhere are a hang.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motley.faults import Fault, Phase
from motley.launch.job_faults import alone, link_lost, silent, stuck
from motley.launch.messages import Messages

HEARTBEAT_INTERVAL_S = 0.5  # and between looks at deadlines

_MOST_HEARTBEATS = 1000  # a second that rank 0 hears
_LONGEST_INTERVAL_S = 1.0  # a quarter of SUSPECT_AFTER_S

# Without a heartbeat, these end the job. The longest gaps that were measured: 1.5 s on five
# lab hosts of 0.3 to 1 CPUs, on two cores that had eight processes waiting; 1.2 s in DeepSpeed's
# first compilation by three ranks on two cores; 0.5 s in torch.compile and the first CUDA and
# NCCL calls on an H200. A cable that was out for 7 s costs up to 13, for TCP doubles its waits.
HEARTBEAT_TIMEOUT_S = 15.0

# Without a heartbeat, after these mpirun's own "stop" (it sees a cut cable after 6 to 11 s)
# is blamed on the silent rank.
SUSPECT_AFTER_S = 4.0

# After a silence that ended by itself, TCP may wait as long again before it sends what was lost.
SETTLED_S = HEARTBEAT_TIMEOUT_S

# Seconds in which some rank should move, whatever the training is at, but for DATA.
PROGRESS_TIMEOUT_S = 1800.0
DATA = None  # nobody knows how long a download takes


def step_timeout_s(usual: float) -> float:
    """Seconds in which some rank should move within a step.

    Args:
        usual: seconds that a step takes.
    """
    # Two minutes: a network disk's hiccup, or a kernel that is built for an epoch's last batch.
    return max(120.0, 20 * usual)


def heartbeat_interval_s(size: int) -> float:
    """Seconds between heartbeats of each of so many ranks."""
    return max(HEARTBEAT_INTERVAL_S, min(size / _MOST_HEARTBEATS, _LONGEST_INTERVAL_S))


class AwakeClock:
    """Seconds that this process was awake: it was frozen itself while nobody was heard."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """Call it about every HEARTBEAT_INTERVAL_S; far more than that was no waking time."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 4 * HEARTBEAT_INTERVAL_S)
        self._last = now
        return self.seconds


@dataclass
class Heartbeat:
    """What a heartbeat says.

    Attributes:
        phase: what the rank is at. detail: in words that say more than its own.
        moves: grows whenever the rank gets on with something.
        timeout_s: seconds in which some rank should move; None where nobody can tell.
        unanswered: addresses of machines that this rank sends to in vain.
    """

    step: int | None = None
    phase: Phase = Phase.START
    moves: int = 0
    timeout_s: float | None = None
    detail: str = ""
    unanswered: list[str] = field(default_factory=list)

    @property
    def doing(self) -> str:
        """What the rank is at, in words."""
        return self.detail or self.phase.words

    @property
    def waits(self) -> bool:
        """Whether the rank has done its own part of the step, and waits for the others."""
        return self.phase is Phase.ALL_REDUCE

    def message(self) -> list[Any]:
        """As JSON; without names, for rank 0 reads two thousand a second of as many ranks."""
        rest = [self.detail, self.unanswered] if self.detail or self.unanswered else []
        return [self.step, self.phase.key, self.moves, self.timeout_s, *rest]

    @classmethod
    def read(cls, message: Sequence[Any]) -> "Heartbeat":
        """Of a :meth:`message`."""
        step, phase, *rest = message
        return cls(step, Phase.of(phase), *rest)


@dataclass
class RankStatus:
    """Rank 0's view of one rank.

    Attributes:
        rank: its number in the group that is left. number: the one in the launch.
        heard: when it last said something, in rank 0's waking seconds.
        wrote: when it wrote anything, as a process does that lives (motley.launch.fault_handler).
        rescues: it can save the state, for rank 0 cannot.
        regroups: it can go on without another rank.
        address: of its machine, in the network that all share.
        left: its host leaves, and it has nothing left to do.
    """

    rank: int
    number: int
    host: str
    heard: float = 0.0
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
        """When it did, as far as is known, in rank 0's waking seconds."""
        return max(self.heard, self.wrote)

    def take(self, data: bytes, now: float) -> list[dict[str, Any]]:
        """What it has said in all, with these bytes.

        Args:
            now: in rank 0's waking seconds.
        """
        found = self.messages.feed(data)
        self.wrote, self.heard = now, now if found else self.heard
        return found


class Watchdog:
    """Rank 0's judgement.

    Args:
        awake: this process's waking time. number: of this rank in the launch. host: its machine.
    """

    def __init__(self, awake: AwakeClock, number: int, host: str) -> None:
        self._awake, self._number, self._host = awake, number, host
        self._moved = 0.0
        self._unsettled = -SETTLED_S

    def hear(self, status: RankStatus, heartbeat: Heartbeat) -> None:
        """Take a rank's heartbeat."""
        if heartbeat != status.heartbeat:
            self._moved = self._awake.seconds
        status.heartbeat = heartbeat

    def silent(
        self, statuses: Sequence[RankStatus], limit: float = HEARTBEAT_TIMEOUT_S
    ) -> Fault | None:
        """The fault of the rank that was not heard for ``limit`` seconds, if any.

        Args:
            statuses: all ranks but 0.
        """
        now = self._awake.seconds
        if now - min((status.lived for status in statuses), default=now) <= limit:
            return None
        statuses = sorted(statuses, key=lambda status: status.rank)  # who is done still says so
        # Those of one switch fall silent together, and no two heartbeats at the same instant.
        since = now - (limit - 4 * HEARTBEAT_INTERVAL_S)
        quiet = [status for status in statuses if status.lived < since]
        first, others = quiet[0], quiet[1:]
        away = {status.host for status in statuses} - {self._host}
        if len(away) > 1 and away <= {status.host for status in quiet}:
            name, step = _hosts(quiet), first.heartbeat.step
            return alone(self._number, self._host, step, now - first.lived, name)
        like = f", and so {_are(others)} {_ranks(others)} on {_hosts(others)}" if others else ""
        return silent(first.number, first.host, first.heartbeat.step, now - first.lived, like)

    def dead_link(self, ranks: Sequence[RankStatus]) -> Fault | None:
        """The fault of two machines that do not reach each other, though this one hears both.

        Args:
            ranks: all, with rank 0.
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
                return link_lost(status.number, status.host, status.heartbeat.step, other)
        return None

    def stuck(self, ranks: Sequence[RankStatus]) -> Fault | None:
        """The fault of the rank that all others wait for, if nobody moves.

        Args:
            ranks: all, with rank 0.
        """
        at_work = [status for status in ranks if not status.done]
        still = self._awake.seconds - self._moved
        for status in at_work:
            if status.heartbeat.timeout_s is None or still <= status.heartbeat.timeout_s:
                return None
        if not at_work:
            return None
        first, where = whereabouts(at_work)
        return stuck(first.number, first.host, first.heartbeat.step, still, where)


def whereabouts(statuses: Sequence[RankStatus]) -> tuple[RankStatus, str]:
    """Whom all others wait for, if they do; and what the ranks are doing, in words."""
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

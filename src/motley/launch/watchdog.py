"""Who is silent, and who is stuck: rank 0 judges the beats of all ranks.

A beat says that a process lives, and what its training is doing. A rank without beats is
silent: its host froze, or a cable was pulled. Beats without any movement anywhere are a hang.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from motley.faults import Fault, Phase, alone, silent, stuck
from motley.launch.messages import Messages

TICK = 0.5  # seconds between beats, and between looks at deadlines

# Seconds without a beat that end the job. The longest gaps that were measured: 1.5 s on five
# lab hosts of 0.3 to 1 CPUs, on two cores that had eight processes waiting; 1.2 s in DeepSpeed's
# first compilation by three ranks on two cores; 0.5 s in torch.compile and the first CUDA and
# NCCL calls on an H200. A cable that was out for 7 s costs up to 13, for TCP doubles its waits.
SILENCE = 15.0

# Seconds without a beat after which mpirun's own "stop" (it sees a cut cable after 6 to 11 s)
# is blamed on the silent rank.
SUSPECT = 4.0

# Seconds in which some rank should move, whatever the training is at, but for DATA.
PATIENCE = 1800.0
DATA = None  # nobody knows how long a download takes


def step_patience(usual: float) -> float:
    """Seconds in which some rank should move within a step.

    Args:
        usual: seconds that a step takes.
    """
    # Two minutes: a network disk's hiccup, or a kernel that is built for an epoch's last batch.
    return max(120.0, 20 * usual)


class Awake:
    """Seconds that this process was awake: it was frozen itself while nobody was heard."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """Call it about every TICK; what is far longer than that was no waking time."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 4 * TICK)
        self._last = now
        return self.seconds


@dataclass
class Pulse:
    """What a beat says.

    Attributes:
        phase: what the rank is at. detail: in words that say more than its own.
        moves: grows whenever the rank gets on with something.
        patience: seconds in which some rank should move; None where nobody can tell.
    """

    step: int | None = None
    phase: Phase = Phase.START
    moves: int = 0
    patience: float | None = None
    detail: str = ""

    @property
    def doing(self) -> str:
        """What the rank is at, in words."""
        return self.detail or self.phase.words

    def message(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "phase": self.phase.key}

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Pulse":
        """Of a :meth:`message`."""
        pulse = cls(**message)
        return replace(pulse, phase=Phase.of(message["phase"]))


@dataclass
class Peer:
    """Rank 0's view of one rank.

    Attributes:
        heard: when, in rank 0's waking seconds.
    """

    rank: int
    host: str
    heard: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)
    done: bool = False
    messages: Messages = field(default_factory=Messages, repr=False)


class Vigil:
    """Rank 0's judgement.

    Args:
        awake: this process's waking time. host: name of its machine.
    """

    def __init__(self, awake: Awake, host: str) -> None:
        self._awake, self._host = awake, host
        self._moved = 0.0

    def beat(self, peer: Peer, pulse: Pulse) -> None:
        """Take a rank's beat."""
        if pulse != peer.pulse:
            self._moved = self._awake.seconds
        peer.pulse = pulse

    def silent(self, peers: Iterable[Peer], limit: float = SILENCE) -> Fault | None:
        """The fault of the rank that was not heard for ``limit`` seconds, if any.

        Args:
            peers: all ranks but 0.
        """
        now = self._awake.seconds
        peers = sorted(peers, key=lambda peer: peer.rank)  # who is done still beats
        if not any(now - peer.heard > limit for peer in peers):
            return None
        # Those of one switch fall silent together, and no two beats at the same instant.
        mute = [peer for peer in peers if now - peer.heard > limit - 4 * TICK]
        first, others = mute[0], mute[1:]
        away = {peer.host for peer in peers} - {self._host}
        if len(away) > 1 and away <= {peer.host for peer in mute}:
            return alone(0, self._host, first.pulse.step, now - first.heard, _hosts(mute))
        like = f", and so {_are(others)} {_ranks(others)} on {_hosts(others)}" if others else ""
        return silent(first.rank, first.host, first.pulse.step, now - first.heard, like)

    def stuck(self, ranks: Sequence[Peer]) -> Fault | None:
        """The fault of the rank that all others wait for, if nobody moves.

        Args:
            ranks: all, with rank 0.
        """
        at_work = [peer for peer in ranks if not peer.done]
        still = self._awake.seconds - self._moved
        for peer in at_work:
            if peer.pulse.patience is None or still <= peer.pulse.patience:
                return None
        if not at_work:
            return None
        first, where = whereabouts(at_work)
        return stuck(first.rank, first.host, first.pulse.step, still, where)


def whereabouts(peers: Sequence[Peer]) -> tuple[Peer, str]:
    """Whom all others wait for, if they do; and what the ranks are doing, in words."""
    doing: dict[tuple[int, str], list[Peer]] = {}
    for peer in sorted(peers, key=lambda peer: peer.rank):
        step = -1 if peer.pulse.step is None else peer.pulse.step
        doing.setdefault((step, peer.pulse.doing), []).append(peer)
    behind = [
        key for key, (peer, *_) in doing.items() if peer.pulse.phase is not Phase.ALL_REDUCE
    ] or list(doing)
    where = "; ".join(
        f"{_ranks(group)} {_are(group)} {what}" for (_, what), group in sorted(doing.items())
    )
    return doing[min(behind)][0], where


def _ranks(peers: Sequence[Peer]) -> str:
    numbers = [str(peer.rank) for peer in peers]
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"ranks {shown}" if len(numbers) > 1 else f"rank {shown}"


def _are(peers: Sequence[Peer]) -> str:
    return "are" if len(peers) > 1 else "is"


def _hosts(peers: Sequence[Peer]) -> str:
    names = list(dict.fromkeys(peer.host for peer in peers))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

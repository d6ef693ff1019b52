"""The messages between the coordinator, rank 0, and the members, all other ranks.

Each is a frozen dataclass. On the wire it is a JSON object with the name of its class and its
fields. A message of an unknown kind is dropped with one line, and so is an unknown field without a
word: ranks of versions that differ by one understand each other.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from motley.faults import Fault
from motley.membership import messages
from motley.membership.detector import Heartbeat
from motley.membership.survivors import Survivors
from motley.text import typed_command


@dataclass(frozen=True)
class Message:
    """A message from one rank to another.

    Attributes:
        group: how often the sender had gone on without lost ranks. A message of an earlier group is
            void. None: the message holds in any group.
    """

    group: int | None = field(default=None, kw_only=True)


# -- from a member to the coordinator


@dataclass(frozen=True)
class MemberHeartbeat(Message):
    """The sender lives, and this is its state."""

    heartbeat: Heartbeat


@dataclass(frozen=True)
class Done(Message):
    """The sender has finished its training."""


@dataclass(frozen=True)
class CanRescue(Message):
    """The sender can save the state before the job ends."""


@dataclass(frozen=True)
class CanRegroup(Message):
    """The sender can go on without a lost rank."""


@dataclass(frozen=True)
class StateKept(Message):
    """The sender has kept its state apart from the group.

    Attributes:
        problem: why it could not; empty if it could.
    """

    problem: str


@dataclass(frozen=True)
class GatherValue(Message):
    """The sender's value of those that all ranks exchange, as survivors.packed() writes it."""

    value: str


@dataclass(frozen=True)
class FirstRankLost(Message):
    """Rank 0 is lost, as the sender saw it."""

    fault: Fault


@dataclass(frozen=True)
class RankLeft(Message):
    """The sender ends now, since its host leaves."""


@dataclass(frozen=True)
class HostLeaves(Message):
    """The sender's host is to leave the job, for a reason in words."""

    reason: str


@dataclass(frozen=True)
class PauseRequest(Message):
    """A user asked the sender to have the job pause."""


@dataclass(frozen=True)
class StepBegun(Message):
    """The last step that the sender has begun; None before the first."""

    step: int | None


@dataclass(frozen=True)
class Paused(Message):
    """The sender has saved the state; in words for people, which may be empty."""

    saved: str


@dataclass(frozen=True)
class RunEvent(Message):
    """An event for the run's records."""

    event: dict[str, Any]


@dataclass(frozen=True)
class RankFailed(Message):
    """The sender has failed."""

    fault: Fault


@dataclass(frozen=True)
class SignalReceived(Message):
    """The sender got a signal that stops it."""

    number: int


@dataclass(frozen=True)
class Rescued(Message):
    """The sender has saved the state; in words for people."""

    saved: str


# -- from either


@dataclass(frozen=True)
class Stop(Message):
    """The receiver ends now, with this exit status."""

    code: int


# -- from the coordinator to a member


@dataclass(frozen=True)
class CoordinatorHeartbeat(Message):
    """The coordinator lives. The fault is the one to blame if it died now."""

    fault: Fault | None


@dataclass(frozen=True)
class Hold(Message):
    """A rank saves the state: the receiver waits until it gets a stop."""


@dataclass(frozen=True)
class KeepState(Message):
    """A rank is lost: the receiver keeps its state, and answers StateKept."""


@dataclass(frozen=True)
class GoOn(Message):
    """The receiver goes on with these ranks."""

    survivors: Survivors


@dataclass(frozen=True)
class Gathered(Message):
    """Values of some ranks, in their order; several such messages hold all."""

    values: list[str]


@dataclass(frozen=True)
class Rescue(Message):
    """The receiver saves the state, and answers Rescued."""


@dataclass(frozen=True)
class AskStep(Message):
    """The job is to pause: the receiver answers StepBegun, and begins no other step."""


@dataclass(frozen=True)
class PauseBefore(Message):
    """The receiver trains until this step, which it does not begin."""

    step: int


@dataclass(frozen=True)
class Finish(Message):
    """All ranks are done."""


KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}
# Rank 0 reads a thousand heartbeats a second of as many ranks.
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in KINDS.values()}
_WRITERS: dict[type, Callable[[Any], Any]] = {
    Fault: asdict, Heartbeat: Heartbeat.message, Survivors: Survivors.message,
}  # fmt: skip
_READERS: dict[str, Callable[[Any], Any]] = {
    "fault": Fault.read, "heartbeat": Heartbeat.read, "survivors": Survivors.read,
}  # fmt: skip
_reported: set[str] = set()


def encode(message: Message) -> bytes:
    """Return a message as a line for the wire."""
    content: dict[str, Any] = {"kind": type(message).__name__}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if name != "group" or value is not None:
            content[name] = _WRITERS.get(type(value), lambda plain: plain)(value)
    return messages.encode(content)


def decode(content: Mapping[str, Any]) -> Message | None:
    """Return the message of a line; None, and one line for people, if its kind is unknown."""
    name = str(content.get("kind"))
    try:
        kind = KINDS[name]
        return kind(**{
            name: _READERS[name](value) if name in _READERS and value is not None else value
            for name, value in content.items() if name in _FIELDS[kind]
        })  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        if name not in _reported:
            _reported.add(name)
            print(
                f"motley: a message of the unknown kind {name[:40]!r} is dropped: some rank runs "
                "another version of Motley; compare them with: "
                + typed_command("bash setup/test_cn_connection.sh"),
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return None

"""The messages between the coordinator (rank 0) and the members (all other ranks).

Each message is a frozen dataclass. On the wire it is a JSON object with the name of its class and
its fields. A message of an unknown kind is dropped, and one line is printed. Unknown fields are
ignored. Ranks of consecutive versions can therefore work together.
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
        group: number of regroups that the sender had completed. The receiver ignores a message from
            before its own last regroup. None: the receiver never ignores the message.
    """

    group: int | None = field(default=None, kw_only=True)


# -- from a member to the coordinator


@dataclass(frozen=True)
class MemberHeartbeat(Message):
    """A sign of life of the sender, with the sender's step and phase."""

    heartbeat: Heartbeat


@dataclass(frozen=True)
class Done(Message):
    """A report that the sender has finished its training."""


@dataclass(frozen=True)
class CanRescue(Message):
    """A report that the sender can save the training state before the job ends."""


@dataclass(frozen=True)
class CanRegroup(Message):
    """A report that the sender can continue without a lost rank."""


@dataclass(frozen=True)
class StateKept(Message):
    """A report that the sender has tried to copy the training state out of the process group.

    Attributes:
        problem: the reason why the state could not be copied; empty if the copy succeeded.
    """

    problem: str


@dataclass(frozen=True)
class GatherValue(Message):
    """One rank's value for an all-gather, encoded by survivors.packed()."""

    value: str


@dataclass(frozen=True)
class FirstRankLost(Message):
    """A report that the sender has lost rank 0.

    Attributes:
        fault: the fault of rank 0, as the sender saw it.
    """

    fault: Fault


@dataclass(frozen=True)
class RankLeft(Message):
    """A report that the sender ends now, because the sender's host leaves."""


@dataclass(frozen=True)
class HostLeaves(Message):
    """A report that the sender's host is to leave the job.

    Attributes:
        reason: the reason, in words for the user.
    """

    reason: str


@dataclass(frozen=True)
class PauseRequest(Message):
    """A request to pause the job, because a user has signalled the sender."""


@dataclass(frozen=True)
class StepBegun(Message):
    """An answer to AskStep: the last step that the sender has started; None before step 1."""

    step: int | None


@dataclass(frozen=True)
class Paused(Message):
    """A report that the sender has saved the state for a pause.

    Attributes:
        saved: note for the user on the saved state; may be empty.
    """

    saved: str


@dataclass(frozen=True)
class RunEvent(Message):
    """An event that rank 0 writes to the records of the run."""

    event: dict[str, Any]


@dataclass(frozen=True)
class RankFailed(Message):
    """A report that the sender has failed, with its fault."""

    fault: Fault


@dataclass(frozen=True)
class SignalReceived(Message):
    """A report that the sender got a stop signal.

    Attributes:
        number: number of the signal.
    """

    number: int


@dataclass(frozen=True)
class Rescued(Message):
    """A report that the sender has saved the state, in answer to Rescue.

    Attributes:
        saved: note for the user on the saved state.
    """

    saved: str


# -- in both directions


@dataclass(frozen=True)
class Stop(Message):
    """An order that the receiver ends its process now.

    Attributes:
        code: exit status of the receiver.
    """

    code: int


# -- from the coordinator to a member


@dataclass(frozen=True)
class CoordinatorHeartbeat(Message):
    """A sign of life of the coordinator.

    Attributes:
        fault: fault of a rank that is silent now. If mpirun then ends the coordinator, this fault
            is the cause. None: no rank is silent.
    """

    fault: Fault | None


@dataclass(frozen=True)
class Hold(Message):
    """An order to wait for the message Stop, while another rank saves the state."""


@dataclass(frozen=True)
class KeepState(Message):
    """An order to copy the training state, since a rank is lost. The answer is StateKept."""


@dataclass(frozen=True)
class GoOn(Message):
    """An order that the receiver continues training with the surviving ranks."""

    survivors: Survivors


@dataclass(frozen=True)
class Gathered(Message):
    """The results of an all-gather for consecutive ranks. A result may take several messages."""

    values: list[str]


@dataclass(frozen=True)
class Rescue(Message):
    """An order to save the training state. The receiver answers with Rescued."""


@dataclass(frozen=True)
class AskStep(Message):
    """A question before a pause: which step has the receiver started last?

    The receiver answers with StepBegun, and starts no further step for now.
    """


@dataclass(frozen=True)
class PauseBefore(Message):
    """An order to stop before a step.

    Attributes:
        step: the first step that the receiver does not start.
    """

    step: int


@dataclass(frozen=True)
class Finish(Message):
    """A report that all ranks are done."""


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
    """Return a message as one line of bytes for the wire."""
    content: dict[str, Any] = {"kind": type(message).__name__}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if name != "group" or value is not None:
            content[name] = _WRITERS.get(type(value), lambda plain: plain)(value)
    return messages.encode(content)


def decode(content: Mapping[str, Any]) -> Message | None:
    """Return the message in a decoded line; None if its kind is unknown.

    Each unknown kind is reported to the user once.
    """
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
                f"motley: a message of the unknown kind {name[:40]!r} is dropped, because a rank "
                "runs another version of Motley; compare the versions with: "
                + typed_command("bash setup/test_cn_connection.sh"),
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return None

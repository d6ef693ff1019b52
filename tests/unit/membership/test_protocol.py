"""Messages between ranks: each arrives as it was, and another version's harms nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.faults import Fault, FaultKind, Phase
from motley.membership import protocol
from motley.membership.coordinator import Coordinator
from motley.membership.detector import Heartbeat
from motley.membership.member import Member
from motley.membership.messages import Messages
from motley.membership.survivors import Survivors

FAULT = Fault(2, "a", 7, "died", kind=FaultKind.KILLED)
VALUES: dict[str, Any] = {
    "heartbeat": Heartbeat(17, Phase.ALL_REDUCE, 3, 120.0, unanswered=["10.0.0.3"]),
    "fault": FAULT, "survivors": Survivors((0, 1), FAULT, standby=1), "problem": "no memory",
    "value": "x", "values": ["x", ""], "reason": "leaves", "step": 4, "saved": "step 4",
    "event": {"kind": "silent", "rank": 1}, "number": 15, "code": 143,
}  # fmt: skip


@pytest.mark.parametrize("kind", protocol.KINDS.values(), ids=protocol.KINDS.keys())
@pytest.mark.parametrize("group", [None, 3])
def test_each_message_arrives_as_it_was(kind: type[protocol.Message], group: int | None) -> None:
    names = [name for name in kind.__dataclass_fields__ if name != "group"]
    sent = kind(**{name: VALUES[name] for name in names}, group=group)
    (received,) = Messages().feed(protocol.encode(sent))
    assert protocol.decode(received) == sent


def test_nothing_is_sent_where_nothing_is_blamed() -> None:
    (received,) = Messages().feed(protocol.encode(protocol.CoordinatorHeartbeat(None)))
    assert protocol.decode(received) == protocol.CoordinatorHeartbeat(None)


def test_another_versions_message_is_dropped_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(3):
        assert protocol.decode({"kind": "Teleport", "to": 3}) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the unknown kind 'Teleport' is dropped" in said
    newer = {"kind": "Stop", "code": 1, "why": "a field of the next version"}
    assert protocol.decode(newer) == protocol.Stop(1)


@given(st.dictionaries(st.sampled_from(["kind", "code", "fault", "x"]), st.integers()))
def test_a_message_without_its_fields_is_dropped(content: dict[str, int]) -> None:
    assert protocol.decode({**content, "kind": "RankFailed"}) is None
    assert protocol.decode({"kind": "Gathered"}) is None


def test_each_side_has_a_handler_for_what_the_other_sends() -> None:
    answered = {protocol.Rescued}  # own_rank.save_before_end() reads the answer
    handled = {*Coordinator.HANDLERS, *Member.HANDLERS} | answered
    assert handled == {*protocol.KINDS.values()}

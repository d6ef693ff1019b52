"""What is known of a link that is dead, and of ranks that were left."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.faults import Fault, FaultKind
from motley.launch.world import words
from motley.membership.detector import dead_peers, is_dead
from motley.membership.messages import MOST_BYTES, Listening
from motley.membership.own_rank import OwnRank
from motley.membership.protocol import Gathered, GatherValue, RankFailed, encode
from motley.membership.survivors import GroupPlace, Survivors, parts


def info(unacked: int, tries: int, last_ack_s: float) -> bytes:
    """A struct tcp_info."""
    made = bytearray(256)
    made[2] = tries
    struct.pack_into("=I", made, 24, unacked)
    struct.pack_into("=I", made, 56, round(1000 * last_ack_s))
    return bytes(made)


@pytest.mark.parametrize(
    ("unacked", "tries", "last_ack_s", "dead"),
    [
        (1, 6, 19.0, True),
        (1, 6, 17.0, False),  # not for long enough
        (0, 0, 500.0, False),  # nothing to answer
        (1, 1, 19.0, False),  # only just sent, after a pause
    ],
)
def test_a_link_is_dead_when_what_was_sent_again_stays_unanswered(
    unacked: int, tries: int, last_ack_s: float, dead: bool
) -> None:
    assert is_dead(info(unacked, tries, last_ack_s), 18.0) is dead


def test_what_is_connected_on_this_machine_is_no_dead_link_and_stays_open() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as line:
        assert dead_peers(0.0) == []
        line.sendall(b"x")


def test_leftovers_are_said_with_their_processes_and_the_fix() -> None:
    said = words("b", [4711, 4712])
    assert "b still has 2 ranks of earlier runs (processes 4711, 4712)" in said
    assert said.endswith("end them with: bash setup/clean_cn.sh")


@given(st.lists(st.integers(0, MOST_BYTES // 2).map(lambda size: size * "x"), max_size=5))
def test_what_is_gathered_travels_in_few_messages_that_fit(texts: list[str]) -> None:
    made = [*parts(texts)]
    assert [text for part in made for text in part] == texts
    assert all(len(encode(Gathered(part))) <= MOST_BYTES for part in made)
    assert len([*parts(1000 * ["x" * 60])]) == 1


def test_what_is_said_of_the_broken_group_is_void_even_if_the_others_went_on_meanwhile() -> None:
    listening = (Listening("127.0.0.1", 1, "secret", "a"),) * 3
    own = OwnRank(GroupPlace(0, "a", (0, 1, 2), (0, 0, 0), listening))
    lost = Fault(2, "a", 7, "died", kind=FaultKind.KILLED)
    own.go_on(Survivors((0, 1), lost, standby=1))  # from the watching thread
    own.send_in_group(RankFailed(lost))  # from the training's
    own.change.freeing.join()
    assert own.change.take().ranks == (0, 1)
    own.send_in_group(GatherValue(""))
    assert [message.group for message in own.outbox.messages] == [
        own.change.group - 1,
        own.change.group,
    ]

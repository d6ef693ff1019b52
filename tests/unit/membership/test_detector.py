"""Who is silent and who is stuck, judged from beats."""

import time

import pytest

from motley.faults import FaultKind, Phase
from motley.membership.detector import (
    CUT_OFF_AFTER_S,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    REPORTED_AFTER_S,
    SETTLED_S,
    SUSPECT_AFTER_S,
    AwakeClock,
    Heartbeat,
    RankStatus,
    SilentRanks,
    StragglerDetector,
    Watchdog,
    heartbeat_interval_s,
    step_timeout_s,
)
from motley.membership.messages import Messages
from motley.membership.protocol import Done, MemberHeartbeat, decode, encode


class Hand:
    """A clock that is set by hand."""

    seconds = 0.0

    def look(self) -> float:
        return self.seconds


def world(*hosts: str) -> tuple[Hand, Watchdog, list[RankStatus]]:
    clock = Hand()
    statuses = [RankStatus(rank, rank, host) for rank, host in enumerate(hosts)]
    watchdog = Watchdog(clock, 0, hosts[0])  # type: ignore[arg-type]
    for status in statuses:
        watchdog.receive(status, Heartbeat(17, Phase.FORWARD, 1, 120.0))
    return clock, watchdog, statuses


def hear(clock: Hand, at: float, *statuses: RankStatus) -> None:
    clock.seconds = at
    for status in statuses:
        status.received_s = at


def test_many_ranks_say_that_they_live_less_often_yet_far_more_often_than_one_is_missed() -> None:
    assert heartbeat_interval_s(5) == HEARTBEAT_INTERVAL_S
    assert 1000 / heartbeat_interval_s(1000) <= 1000
    assert heartbeat_interval_s(100_000) <= SUSPECT_AFTER_S / 4


@pytest.mark.parametrize("more", [{}, {"detail": "measuring links"}, {"unanswered": ["10.0.0.3"]}])
def test_a_heartbeat_arrives_as_it_was(more: dict[str, object]) -> None:
    sent = Heartbeat(17, Phase.ALL_REDUCE, 3, 120.0, **more)  # type: ignore[arg-type]
    (received,) = Messages().feed(encode(MemberHeartbeat(sent)))
    assert decode(received) == MemberHeartbeat(sent)


def test_silence_is_judged_after_the_limit_and_names_all_of_a_switch() -> None:
    clock, watchdog, (_, one, two, three) = world("a", "b", "c", "d")
    hear(clock, 1.0, two)
    hear(clock, HEARTBEAT_TIMEOUT_S - 0.1, three)
    assert watchdog.silent([one, two, three]) is None
    assert watchdog.silent([one, two, three], SUSPECT_AFTER_S) is not None
    hear(clock, HEARTBEAT_TIMEOUT_S + 0.1, three)
    fault = watchdog.silent([three, two, one])
    assert fault and (fault.rank, fault.host, fault.step, fault.code) == (1, "b", 17, 1)
    assert fault.kind is FaultKind.HOST_LOST
    assert "and so is rank 2 on c" in fault.line() and "--resume auto" in fault.line()
    one.done = two.done = True  # as one that is left out; they beat until all are done
    assert watchdog.silent([one, two, three]) == fault


def test_who_writes_what_it_is_busy_with_lives_but_is_not_heard() -> None:
    clock, watchdog, (_, one, two) = world("a", "b", "c")
    busy = b"Timeout (0:00:06)!\nThread 0x7f (most recent call first):\n  File 'big.json'\n"
    hear(clock, HEARTBEAT_TIMEOUT_S + 1, two)
    assert watchdog.silent([one, two])
    assert one.take(busy, clock.seconds) == [] and one.received_s == 0.0
    assert watchdog.silent([one, two]) is None and one.messages.last_words == busy.decode()
    # A crash is told by what came last, however often it was busy before, or got on since.
    crash = b"Fatal Python error: Aborted\n"
    for again in (busy, busy, crash):
        one.take(again, clock.seconds)
    assert one.messages.last_words == crash.decode()
    assert one.take(encode(Done()), 99.0) and one.received_s == 99.0
    assert one.messages.last_words == ""


def test_a_host_that_hears_no_other_is_named_itself() -> None:
    clock, watchdog, (_, beside, one, two) = world("a", "a", "b", "c")
    hear(clock, HEARTBEAT_TIMEOUT_S + 1, beside)
    fault = watchdog.silent([beside, one, two])
    assert fault and (fault.rank, fault.host) == (0, "a") and "(b, c)" in fault.error


def test_two_hosts_that_lose_each_other_are_named_once_nobody_is_silent() -> None:
    clock, watchdog, ranks = world("a", "b", "c")
    for number, status in enumerate(ranks):
        status.address = f"10.0.0.{number}"
    in_vain = Heartbeat(17, Phase.ALL_REDUCE, 2, 120.0, unanswered=["10.0.0.2", "10.9.9.9"])
    watchdog.receive(ranks[1], in_vain)
    hear(clock, SETTLED_S, ranks[1])
    assert watchdog.dead_link(ranks) is None  # c is silent, and may be the cause
    hear(clock, SETTLED_S + 1, *ranks)
    assert watchdog.dead_link(ranks) is None  # it is back, and TCP is still waiting
    hear(clock, 2 * SETTLED_S + 1, *ranks)
    fault = watchdog.dead_link(ranks)
    assert fault and (fault.kind, fault.rank) == (FaultKind.LINK_LOST, 1)
    assert "b and c no longer reach each other" in fault.error
    watchdog.receive(ranks[1], Heartbeat(17, Phase.ALL_REDUCE, 2, 120.0))
    assert watchdog.dead_link(ranks) is None


def test_a_hang_names_the_rank_that_does_not_wait() -> None:
    clock, watchdog, ranks = world("a", "b", "c")
    for status in (ranks[0], ranks[2]):
        watchdog.receive(status, Heartbeat(17, Phase.ALL_REDUCE, 2, 120.0))
    watchdog.receive(ranks[1], Heartbeat(17, Phase.DATA, 2, 120.0))
    clock.seconds = 119
    assert watchdog.stuck(ranks) is None
    watchdog.receive(
        ranks[0], Heartbeat(17, Phase.ALL_REDUCE, 2, 120.0)
    )  # lives, but does not move
    clock.seconds = 121
    fault = watchdog.stuck(ranks)
    assert fault and (fault.kind, fault.rank, fault.step) == (FaultKind.HANG, 1, 17)
    assert "rank 1 is loading samples; ranks 0, 2 are waiting for the others" in fault.error
    watchdog.receive(ranks[1], Heartbeat(17, Phase.DATA, 3, 120.0))
    assert watchdog.stuck(ranks) is None  # one that moves is enough


def test_nobody_is_stuck_while_one_may_take_for_ever_or_all_are_done() -> None:
    clock, watchdog, ranks = world("a", "b")
    watchdog.receive(ranks[1], Heartbeat(None, Phase.PREPARE, 2, None))
    clock.seconds = 1e6
    assert watchdog.stuck(ranks) is None
    ranks[1].done = True
    assert watchdog.stuck(ranks) is not None
    ranks[0].done = True
    assert watchdog.stuck(ranks) is None


def test_patience_is_in_proportion() -> None:
    assert step_timeout_s(0.1) == 120 and step_timeout_s(60) == 1200


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    awake = AwakeClock()
    for _ in range(4):
        now += 0.5
        awake.look()
    now += 3600  # Ctrl-Z
    assert awake.look() == 4.0


def test_who_is_cut_off_is_told_sooner() -> None:
    clock, _, (_, one, two) = world("a", "b", "c")
    one.address = two.address = "10.0.0.2"
    dead = list[str]()
    unheard = SilentRanks(clock, lambda: dead)  # type: ignore[arg-type]
    hear(clock, 10.0, one, two)
    clock.seconds = 10.1 + CUT_OFF_AFTER_S
    two.received_s = clock.seconds
    assert unheard.changes([one, two]) == []  # a busy machine acknowledges what it is sent
    dead.append("10.0.0.2")
    (said,) = unheard.changes([one, two])
    assert (said["kind"], said["rank"], said["seconds"]) == ("silent", 1, CUT_OFF_AFTER_S + 0.1)
    dead.clear()
    (again,) = unheard.changes([one, two])
    assert again["kind"] == "heard_again"


def test_who_is_not_heard_is_told_once_and_so_is_that_it_is_heard_again() -> None:
    clock, _, (_, one, two, three) = world("a", "b", "b", "c")
    unheard = SilentRanks(clock)  # type: ignore[arg-type]
    hear(clock, 10.0, one, two, three)
    hear(clock, 10.0 + REPORTED_AFTER_S, two)
    assert unheard.changes([one, two, three]) == []
    hear(clock, 10.1 + REPORTED_AFTER_S, two)
    said = [
        {
            "kind": "silent",
            "rank": rank,
            "host": host,
            "step": 17,
            "seconds": REPORTED_AFTER_S + 0.1,
        }
        for rank, host in ((1, "b"), (3, "c"))
    ]
    assert unheard.changes([one, two, three]) == said
    assert unheard.changes([one, two, three]) == []
    hear(clock, 13.0, one, two)
    again = [{"kind": "heard_again", "rank": 1, "host": "b"}]
    assert unheard.changes([one, two]) == again  # 3 is lost, which is told otherwise
    assert unheard.changes([one, two]) == [] == unheard.changes([])


def test_who_keeps_all_others_from_a_step_is_told_once_while_they_wait() -> None:
    clock, watchdog, ranks = world("a", "b", "c", "c")
    waited_for = StragglerDetector(clock)  # type: ignore[arg-type]

    def at(seconds: float, step: int, *computing: int, heard: bool = True) -> list[int]:
        clock.seconds = seconds
        for status in ranks:
            at_work = status.rank in computing
            phase = Phase.FORWARD if at_work else Phase.ALL_REDUCE
            watchdog.receive(status, Heartbeat(step, phase, step, 120.0))
            status.received_s = seconds if heard or not at_work else 0.0
        found = waited_for.changes(ranks)
        assert all(each["step"] == step and each["doing"] == "computing" for each in found)
        return [each["rank"] for each in found]

    assert at(0.0, 0, 2) == at(50.0, 0, 2) == []  # the first step: nobody knows what is usual
    for step in range(1, 10):
        assert at(50 + step / 2, step, 2) == []
    assert at(55.9, 9, 2) == []  # a second and a half are three usual steps
    assert at(56.1, 9, 2, 3) == [2]  # of the host
    assert at(57.0, 9, 2, 3) == []
    # Nobody knows where two hosts compute, where all wait for the wire, nor of one that is silent.
    assert at(57.5, 10, 2, 3) == at(59.2, 10, 1, 2) == []
    assert at(59.3, 10) == at(59.4, 10, 1, heard=False) == []
    assert at(59.5, 10, 0) == [0]

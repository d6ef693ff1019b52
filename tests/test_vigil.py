"""Who is silent and who is stuck, judged from beats."""

import time

import pytest

from motley.faults import FaultKind, Phase
from motley.launch.watchdog import SILENCE, SUSPECT, Awake, Peer, Pulse, Vigil, step_patience


class Hand:
    """A clock that is set by hand."""

    seconds = 0.0

    def look(self) -> float:
        return self.seconds


def world(*hosts: str) -> tuple[Hand, Vigil, list[Peer]]:
    clock = Hand()
    peers = [Peer(rank, host) for rank, host in enumerate(hosts)]
    vigil = Vigil(clock, hosts[0])  # type: ignore[arg-type]
    for peer in peers:
        vigil.beat(peer, Pulse(17, Phase.FORWARD, 1, 120.0))
    return clock, vigil, peers


def hear(clock: Hand, at: float, *peers: Peer) -> None:
    clock.seconds = at
    for peer in peers:
        peer.heard = at


def test_silence_is_judged_after_the_limit_and_names_all_of_a_switch() -> None:
    clock, vigil, (_, one, two, three) = world("a", "b", "c", "d")
    hear(clock, 1.0, two)
    hear(clock, SILENCE - 0.1, three)
    assert vigil.silent([one, two, three]) is None
    assert vigil.silent([one, two, three], SUSPECT) is not None
    hear(clock, SILENCE + 0.1, three)
    fault = vigil.silent([three, two, one])
    assert fault and (fault.rank, fault.host, fault.step, fault.code) == (1, "b", 17, 1)
    assert fault.kind is FaultKind.HOST_LOST
    assert "and so is rank 2 on c" in fault.line() and "--resume auto" in fault.line()
    one.done = two.done = True  # as one that is left out; they beat until all are done
    assert vigil.silent([one, two, three]) == fault


def test_a_host_that_hears_no_other_is_named_itself() -> None:
    clock, vigil, (_, beside, one, two) = world("a", "a", "b", "c")
    hear(clock, SILENCE + 1, beside)
    fault = vigil.silent([beside, one, two])
    assert fault and (fault.rank, fault.host) == (0, "a") and "(b, c)" in fault.error


def test_a_hang_names_the_rank_that_does_not_wait() -> None:
    clock, vigil, ranks = world("a", "b", "c")
    for peer in (ranks[0], ranks[2]):
        vigil.beat(peer, Pulse(17, Phase.ALL_REDUCE, 2, 120.0))
    vigil.beat(ranks[1], Pulse(17, Phase.DATA, 2, 120.0))
    clock.seconds = 119
    assert vigil.stuck(ranks) is None
    vigil.beat(ranks[0], Pulse(17, Phase.ALL_REDUCE, 2, 120.0))  # lives, but does not move
    clock.seconds = 121
    fault = vigil.stuck(ranks)
    assert fault and (fault.kind, fault.rank, fault.step) == (FaultKind.HANG, 1, 17)
    assert "rank 1 is loading images; ranks 0, 2 are waiting for the others" in fault.error
    vigil.beat(ranks[1], Pulse(17, Phase.DATA, 3, 120.0))
    assert vigil.stuck(ranks) is None  # one that moves is enough


def test_nobody_is_stuck_while_one_may_take_for_ever_or_all_are_done() -> None:
    clock, vigil, ranks = world("a", "b")
    vigil.beat(ranks[1], Pulse(None, Phase.PREPARE, 2, None))
    clock.seconds = 1e6
    assert vigil.stuck(ranks) is None
    ranks[1].done = True
    assert vigil.stuck(ranks) is not None
    ranks[0].done = True
    assert vigil.stuck(ranks) is None


def test_patience_is_in_proportion() -> None:
    assert step_patience(0.1) == 120 and step_patience(60) == 1200


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    awake = Awake()
    for _ in range(4):
        now += 0.5
        awake.look()
    now += 3600  # Ctrl-Z
    assert awake.look() == 4.0

"""What links carry: who meets whom, what follows from it, and the measurement on loopback."""

import socket
import threading
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.measure import link_speed as traffic
from motley.plan.forecast import choose_machines
from motley.plan.speeds import Flow, Links, Port, SpeedTable, rounds
from motley.plan.wire import AllReduceCost, FewerCost

WORD = b"0123456789abcdef"


def links(carries: dict[str, float | tuple[float, float]]) -> Links:
    """Machines that send and receive so many bytes a second, through a switch without limits."""
    names = dict(enumerate(carries))
    ways = {m: rate if isinstance(rate, tuple) else (rate, rate)
            for m, rate in enumerate(carries.values())}  # fmt: skip
    return Links(names, {
        (a, b): Flow(min(ways[a][0], ways[b][1]), 1e-4) for a in names for b in names if a != b
    })  # fmt: skip


@given(st.lists(st.integers(0, 99), unique=True, max_size=12))
def test_all_meet_once_and_nobody_two_at_a_time(machines: list[int]) -> None:
    table = rounds(machines)
    met = [frozenset(pair) for pairs in table for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(machines, 2)))
    assert all(len({m for pair in pairs for m in pair}) == 2 * len(pairs) for pairs in table)
    assert len(table) <= len(machines)


def test_a_slow_port_is_named_and_which_way_it_is_slow() -> None:
    lab = links({"a": 950e6, "b": 950e6, "c": 115e6, "d": 950e6})
    assert lab.remarks() == ["c's link carries 115 MB/s, the others' 950 MB/s"]
    one_way = links({"a": 950e6, "b": (20e6, 900e6), "c": 950e6})
    assert "carries 20 MB/s when it sends (900 MB/s when it receives)" in one_way.remark(1)
    assert links({"a": 1e8, "b": 1e8}).remarks() == [] == Links({0: "a"}, {}).remarks()


@given(st.lists(st.sampled_from((1e8, 2e8, 3e8, 9e8)), min_size=2, max_size=9))
def test_a_link_is_compared_with_the_middle_one_of_the_others(rates: list[float]) -> None:
    lab = links({str(machine): (rate, rate) for machine, rate in enumerate(rates)})
    for machine in lab.hosts:
        others = sorted(lab.carries(other) for other in lab.hosts if other != machine)
        usual = others[len(others) // 2]
        assert bool(lab.remark(machine)) == (lab.carries(machine) < 0.7 * usual)
        if said := lab.remark(machine):
            assert said.endswith(f"the others' {usual / 1e6:,.0f} MB/s")


def test_what_does_not_pass_is_said() -> None:
    lab = links({"a": 1e8, "b": 1e8, "c": 1e8})
    lab = replace(lab, flows={**lab.flows, (1, 2): Flow(0.0, 1e-4, "large ones do not")})
    assert lab.broken() == ["from b to c: large ones do not"] == lab.remarks()[-1:]
    assert links({"a": 1e8, "b": 1e8}).broken() == []


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    lab = links({"a": 1e9, "b": 1e9, "c": 1e8})
    assert lab.ring_s(1e9, 3) == pytest.approx(2 * 2 / 3 * 10)
    assert lab.ring_s(1e9, 2, {0, 1}) == pytest.approx(1)
    assert lab.ring_s(1e9, 4, {0}) == 0


def test_the_real_lab_goes_without_the_host_on_the_slow_port() -> None:
    # shared/tesla_lab.json: ViT-B/16 in fp32, N = 80; 4.8 s of all-reduce among all five.
    rates = {"ecetesla0": 23.7, "ecetesla1": 78.9, "ecetesla2": 78.9, "ecetesla3": 28.0,
             "ecetesla4": 78.9}  # fmt: skip
    speeds = [SpeedTable((1, 16), (1 / rate, 16 / rate), 0.02) for rate in rates.values()]
    lab = links({name: 115e6 if name == "ecetesla3" else 1000e6 for name in rates})
    wire = AllReduceCost(0.001, 4.8, size=346e6)
    few = wire.among(range(5), [0, 1, 2, 4], lab)
    assert few.transfer_s == pytest.approx(0.53, rel=0.05)  # as that lab's own log has it
    choice = choose_machines(80, range(5), speeds, wire, lab)
    assert 3 not in choice.ranks and {1, 2, 4} <= set(choice.ranks)
    assert choice.with_all.step_s > 4.8 and choice.chosen.step_s < 0.9
    # What the four take alone was measured: the slow link does not tell.
    known = replace(wire, fewer=FewerCost((0, 1, 2, 4), 0.7))
    assert known.among(range(5), [0, 1, 2, 4], lab).transfer_s == pytest.approx(0.7)
    two = known.among(range(5), [1, 2], lab).transfer_s
    assert two == pytest.approx(0.346 + (0.7 - 0.519) * (1 / 2) / (3 / 4))
    assert known.among(range(5), [1, 3], lab) == wire.among(range(5), [1, 3], lab)
    half = replace(wire, size=173e6).among_fewer(known.fewer, known)
    assert half.fewer == FewerCost((0, 1, 2, 4), 0.35)
    # Without a look at the links, one host alone seems best.
    assert len(choose_machines(80, range(5), speeds, wire).ranks) == 1


def meet(caller_word: bytes = WORD) -> tuple[Flow, Flow]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(5)
        thread = threading.Thread(target=traffic.answer, args=(door, WORD))
        thread.start()
        try:
            if caller_word != WORD:
                traffic.call(door.getsockname(), caller_word)
            return traffic.call(door.getsockname(), WORD)
        finally:
            thread.join()


def test_two_machines_measure_both_ways() -> None:
    for flow in meet():
        assert flow.bytes_per_s > 1e7 and 0 < flow.latency_s < 0.1 and not flow.error


def test_a_stranger_is_sent_away_and_who_is_expected_is_answered() -> None:
    there, back = meet(b"x" * len(WORD))
    assert there.bytes_per_s > 1e7 and not back.error


def test_large_messages_that_do_not_arrive_are_told_from_a_silent_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "_TIMEOUT_S", 0.5)

    def echo_only(door: socket.socket) -> None:  # what a dropped large packet looks like
        line, _ = door.accept()
        with line:
            line.recv(len(WORD), socket.MSG_WAITALL)
            for _ in range(traffic._PINGS):
                line.sendall(line.recv(1))
            over.wait(5)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=echo_only, args=(door,))
        thread.start()
        address = door.getsockname()
        there, back = traffic.call(address, WORD)
        over.set()
        thread.join()
        assert there.bytes_per_s == back.bytes_per_s == 0
        assert "large ones do not" in there.error and "MTU" in back.error
        assert "does not answer" in traffic.call(address, WORD)[0].error
    assert "cannot connect" in traffic.call(address, WORD)[0].error


def test_the_leaf_is_the_one_machine_behind_a_far_slower_link() -> None:
    assert links({"a": 1e9, "b": 1e8, "c": 1e9}).slow_rank() == 1
    assert links({"a": 1e9, "b": 1e9, "c": (1e9, 1e8)}).slow_rank() == 2  # one way is enough
    assert links({"a": 1e9, "b": 6e8, "c": 1e9}).slow_rank() is None  # not so much slower
    assert links({"a": 1e8, "b": 1e8, "c": 1e9}).slow_rank() is None  # two are
    assert links({"a": 1e9, "b": 1e8}).slow_rank() is None  # of two, a ring sends no more


def test_why_a_link_is_slow_is_said_where_it_is_known() -> None:
    names = dict(enumerate("abcd"))
    slow = links({"a": 1.1e9, "b": 1.1e9, "c": 115e6, "d": 1.1e9})
    fast = Port("eth0", 10_000)

    def remarks(*ports: Port) -> list[str]:
        return replace(slow, ports=dict(zip(names, ports, strict=True))).remarks()

    (port,) = remarks(fast, fast, Port("eno1", 1_000), fast)
    assert port.endswith("; its port eno1 has 1,000 Mbit/s")
    (wrong,) = remarks(fast, fast, Port("eno1", 1_000, faster="eth7 (10,000 Mbit/s)"), fast)
    assert "its faster port eth7 (10,000 Mbit/s) is not on the subnet" in wrong
    limit, busy = remarks(fast, fast, Port("eth0", 10_000, others_send=400e6), fast)
    assert limit == slow.remark(2) and busy == "other programs on c send 400 MB/s"
    assert remarks(fast, fast, fast, Port("eth0", None, 1e3, 1e3)) == slow.remarks()


def test_a_slow_switch_is_told_from_slow_ports() -> None:
    lab = links({"a": 110e6, "b": 112e6, "c": 111e6})
    (said,) = replace(lab, ports={m: Port("eth0", 10_000) for m in range(3)}).remarks()
    assert "no link carries more than 111 MB/s" in said and "10,000 Mbit/s or more" in said
    for mbit in (1_000, None):
        assert replace(lab, ports={m: Port("eth0", mbit) for m in range(3)}).remarks() == []


def test_an_interface_says_what_it_carries_and_what_others_send_through_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.socket() as line:
        line.connect(door.getsockname())
        other, _ = door.accept()
        with other:
            over = threading.Event()

            def stream() -> None:
                while not over.is_set():
                    line.sendall(bytes(1 << 16))
                    other.recv(1 << 16, socket.MSG_WAITALL)

            thread = threading.Thread(target=stream)
            thread.start()
            busy = traffic.Traffic("lo").read_port()
            over.set()
            thread.join()
    assert busy.interface == "lo" and busy.others_send > 1e6 and busy.others_receive > 1e6
    assert traffic.Traffic("none0").read_port() == Port("none0")

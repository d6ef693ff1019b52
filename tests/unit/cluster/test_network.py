"""Which interfaces machines reach each other by, and what is said where they cannot."""

import pytest

from motley.cluster import network
from motley.cluster.facts import Interface
from motley.cluster.network import (
    Network,
    Receiver,
    choose_networks,
    list_networks,
    measure,
    pick_network,
)
from motley.errors import MotleyError

DOCKER = Interface("docker0", "172.17.0.1", 16)
LOOPBACK = Interface("lo", "127.0.0.1", 8)


def test_the_shared_subnet_is_found_under_three_interface_names() -> None:
    # The real lab's names; docker0 is listed first on every host with one and the same address.
    lab = {
        0: (DOCKER, LOOPBACK, Interface("eno1", "129.97.92.168", 24)),
        1: (DOCKER, LOOPBACK, Interface("enp4s0f1", "129.97.92.169", 24)),
        4: (DOCKER, Interface("enp0s31f6", "129.97.92.187", 24), LOOPBACK),
    }
    names = {0: "ecetesla0", 1: "ecetesla1", 4: "ecetesla3"}
    assert choose_networks(lab, names, {}) == {
        0: Network("eno1", "129.97.92.168"),
        1: Network("enp4s0f1", "129.97.92.169"),
        4: Network("enp0s31f6", "129.97.92.187"),
    }


def test_the_users_interface_is_preferred() -> None:
    hosts = {
        0: (Interface("slow", "10.0.0.1", 24), Interface("fast", "10.1.0.1", 24)),
        1: (Interface("slow", "10.0.0.2", 24), Interface("fast", "10.1.0.2", 24)),
    }
    chosen = choose_networks(hosts, {0: "a", 1: "b"}, {0: {"NCCL_SOCKET_IFNAME": "fast"}})
    assert chosen[1] == Network("fast", "10.1.0.2")


def test_no_shared_subnet_is_an_error_that_shows_what_was_found() -> None:
    hosts = {
        0: (DOCKER, Interface("eth0", "10.0.0.1", 24)),
        1: (DOCKER, Interface("eth0", "10.9.0.2", 24)),
    }
    with pytest.raises(MotleyError, match=r"a: docker0 .*; b: .*eth0 10\.9\.0\.2/24"):
        choose_networks(hosts, {0: "a", 1: "b"}, {})


def test_one_machine_talks_over_loopback() -> None:
    assert choose_networks({0: (DOCKER,)}, {0: "a"}, {}) == {0: Network("lo", "127.0.0.1")}


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "GLOO_SOCKET_IFNAME",
            "eno1",
            "GLOO_SOCKET_IFNAME=eno1 on b names an interface that this host does not have",
        ),
        ("GLOO_SOCKET_IFNAME", "en", "on a names an interface that"),
        ("NCCL_SOCKET_IFNAME", "=en", "on a names an interface that"),
        ("NCCL_SOCKET_IFNAME", "ib", "it has docker0, eno1"),
        ("NCCL_SOCKET_IFNAME", "en", ""),
        ("NCCL_SOCKET_IFNAME", "^docker", ""),
        ("GLOO_SOCKET_IFNAME", "eno1,enp4s0f1", ""),
    ],
)
def test_an_interface_of_the_user_that_a_host_lacks_is_said(
    variable: str, value: str, says: str
) -> None:
    hosts = {
        0: (DOCKER, Interface("eno1", "10.0.0.1", 24)),
        1: (DOCKER, Interface("enp4s0f1", "10.0.0.2", 24)),
    }
    names, environ = {0: "a", 1: "b"}, {m: {variable: value} for m in (0, 1)}
    if not says:
        assert choose_networks(hosts, names, environ)[1] == Network("enp4s0f1", "10.0.0.2")
        return
    with pytest.raises(MotleyError, match=says):
        choose_networks(hosts, names, environ)


def test_two_hosts_with_one_address_are_named() -> None:
    hosts = {m: (DOCKER, Interface("eth0", a, 24)) for m, a in
             enumerate(("10.0.0.1", "10.0.0.2", "10.0.0.1"))}  # fmt: skip
    with pytest.raises(MotleyError, match=r"a and c both have the address 10\.0\.0\.1"):
        choose_networks(hosts, {0: "a", 1: "b", 2: "c"}, {})


def test_each_host_may_have_an_interface_of_its_own_named() -> None:
    # As setup/test_mpi.sh writes them where homes are private.
    hosts = {
        0: (Interface("slow0", "10.1.0.1", 24), Interface("eno1", "10.0.0.1", 24)),
        1: (Interface("slow1", "10.1.0.2", 24), Interface("enp4s0f1", "10.0.0.2", 24)),
    }
    own = {0: {"GLOO_SOCKET_IFNAME": "eno1"}, 1: {"GLOO_SOCKET_IFNAME": "enp4s0f1"}}
    chosen = choose_networks(hosts, {0: "a", 1: "b"}, own)
    assert chosen == {0: Network("eno1", "10.0.0.1"), 1: Network("enp4s0f1", "10.0.0.2")}


def test_one_address_twice_where_nobody_would_meet_anyway_is_not_the_cause() -> None:
    usb = Interface("usb0", "169.254.0.1", 16)
    hosts = {
        0: (usb, Interface("eth0", "10.0.0.1", 24)),
        1: (usb, Interface("eth0", "10.9.0.1", 24)),
        2: (Interface("eth0", "10.9.0.2", 24),),
    }
    with pytest.raises(MotleyError, match="share no subnet"):
        choose_networks(hosts, {0: "a", 1: "b", 2: "c"}, {})


TWO = [{0: Network("a0", "10.0.0.1"), 1: Network("a0", "10.0.0.2")},
       {0: Network("b0", "10.1.0.1"), 1: Network("b0", "10.1.0.2")}]  # fmt: skip
NAMES = {0: "alpha", 1: "beta"}
DEAF = "gets no answer within 3 s"


@pytest.mark.parametrize(
    ("answers", "chosen", "says"),
    [
        ({0: [1e8, 1e8], 1: [1e8, 1.4e8]}, 0, "network a0 (10.0.0.1 on alpha): 100 MB/s"),
        ({0: [2e6, 1e8], 1: [1e8, 1e8]}, 1, "not taken: a0 (10.0.0.1 on alpha): 2 MB/s"),
        ({0: [1e9, 1e6], 1: [DEAF, 1e6]}, 1, "beta -> alpha gets no answer"),
    ],
    ids=["the first of two alike", "the fastest", "the one that works"],
)
def test_the_fastest_network_that_works_is_taken(
    answers: dict[int, list[float | str]], chosen: int, says: str
) -> None:
    number, words = pick_network(TWO, answers, NAMES)
    assert number == chosen and says in words


def test_where_no_network_works_each_is_named() -> None:
    with pytest.raises(MotleyError, match=r"no network connects all hosts \(a0 .*; b0 .* alpha ->"):
        pick_network(TWO, {0: [DEAF, DEAF], 1: [DEAF, 1e6]}, NAMES)


def test_a_network_is_measured_and_one_that_is_closed_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "SECONDS", 0.05)
    with Receiver(["127.0.0.1", "203.0.113.9"]) as receiver:
        (port, none) = receiver.ports
        targets = [("127.0.0.1", port), ("127.0.0.1", none), ("127.0.0.1", 1)]
        found = measure(targets, receiver.token)
        stranger = network.connect("127.0.0.1", port, "0" * len(receiver.token))
    assert stranger == "is answered by another program"
    assert isinstance(found[0], float) and found[0] > 1e6
    assert found[1:] == ["opens no port there", "fails: Connection refused"]


def test_all_networks_are_listed_and_those_of_containers_last() -> None:
    hosts = {
        m: (Interface("br-1", f"172.18.0.{m + 1}", 16), Interface("a0", f"10.0.0.{m + 1}", 24),
            Interface("b0", f"10.1.0.{m + 1}", 24))
        for m in (0, 1)
    }  # fmt: skip
    assert list_networks(hosts, NAMES, {}) == TWO
    only = {m: each[:1] for m, each in hosts.items()}
    assert list_networks(only, NAMES, {})[0][0].interface == "br-1"


def test_a_host_with_ipv6_alone_is_named() -> None:
    hosts = {0: (Interface("eth0", "10.0.0.1", 24),), 1: (LOOPBACK,)}
    with pytest.raises(
        MotleyError, match="beta has only the IPv4 address of its loopback interface"
    ):
        list_networks(hosts, NAMES, {})

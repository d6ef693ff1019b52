"""Which of their interfaces machines reach each other by. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from motley.cluster.facts import Interface
from motley.errors import MotleyError

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc", "podman")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """Where one machine sits on the shared subnet: interface and address."""

    interface: str
    address: str


def choose_networks(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> dict[int, Network]:
    """Find one subnet on which every machine has an address of its own.

    Interface names may differ on every machine (eno1, enp4s0f1). An address that two
    machines both have (docker0's 172.17.0.1) is no way to reach either, so such a subnet
    is never chosen. One machine alone talks to itself over loopback.

    Args:
        machines: interfaces of each machine.
        names: host name of each machine, for errors.
        environs: of machines: an interface that the user set there for gloo or NCCL is preferred.

    Raises:
        MotleyError: there is none, or a machine lacks the user's interface.
    """
    wanted = named_interfaces(machines, names, environs)
    if len(machines) == 1:
        return {machine: Network("lo", "127.0.0.1") for machine in machines}
    one, first = next(iter(machines.items()))
    candidates = sorted(
        (interface for interface in first if not interface.network.is_loopback),
        key=lambda interface: (
            interface.name not in wanted[one],
            interface.name.startswith(VIRTUAL),
        ),
    )
    for candidate in candidates:
        found = {
            machine: interface
            for machine, interfaces in machines.items()
            for interface in interfaces
            if interface.network == candidate.network
        }
        addresses = {interface.address for interface in found.values()}
        if len(found) == len(addresses) == len(machines):
            return {machine: Network(at.name, at.address) for machine, at in found.items()}
    for candidate in candidates:
        at = {machine: interface.address for machine, interfaces in machines.items()
              for interface in interfaces if interface.network == candidate.network}  # fmt: skip
        twice = [(a, b) for a, b in combinations(at, 2) if at[a] == at[b]]
        if len(at) == len(machines) and twice and not candidate.name.startswith(VIRTUAL):
            a, b = twice[0]
            raise MotleyError(
                f"{names[a]} and {names[b]} both have the address {at[a]}; give one of them another"
            )
    seen = "; ".join(
        f"{names[machine]}: {', '.join(f'{at.name} {at.address}/{at.prefix}' for at in interfaces)}"
        for machine, interfaces in machines.items()
    )
    raise MotleyError(
        f"the hosts share no subnet on which each has its own address ({seen}); connect them to "
        "one network, or leave out of hosts.txt who is not on it"
    )


def named_interfaces(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> dict[int, list[str]]:
    """The interfaces that the user names for gloo or NCCL on each machine; MotleyError where one
    has none of its own. NCCL takes the beginning of a name too, and ``^`` before what it must
    not take."""
    wanted: dict[int, list[str]] = {}
    for machine, interfaces in machines.items():
        has, wanted[machine] = [interface.name for interface in interfaces], []
        for variable in VARIABLES:
            value = environs.get(machine, {}).get(variable, "")
            if not value or value.startswith("^"):
                continue
            asked = value.removeprefix("=").split(",")
            exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
            if not any(name == word if exact else name.startswith(word)
                       for name in has for word in asked):  # fmt: skip
                raise MotleyError(
                    f"{variable}={value} on {names[machine]}, which has no such interface (it has "
                    f"{', '.join(has)}); unset {variable}: the interface of each host is found"
                )
            wanted[machine] += asked
    return wanted

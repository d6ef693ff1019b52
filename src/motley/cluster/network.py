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
    """Return the first of :func:`list_networks`: the likeliest, where none is tried."""
    return list_networks(machines, names, environs)[0]


def list_networks(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> list[dict[int, Network]]:
    """Find the subnets on which every machine has an address of its own, the likelier first.

    Interface names may differ on every machine (eno1, enp4s0f1). An address that two
    machines both have (docker0's 172.17.0.1) is no way to reach either, so such a subnet
    is never chosen. One machine alone talks to itself over loopback. An interface that is named as
    those of containers are counts only where there is no other.

    Args:
        machines: interfaces of each machine.
        names: host name of each machine, for errors.
        environs: of machines: one that the user set there for gloo or NCCL is the only one.

    Raises:
        MotleyError: there is none, or a machine lacks the user's interface.
    """
    wanted = named_interfaces(machines, names, environs)
    if len(machines) == 1:
        return [{machine: Network("lo", "127.0.0.1") for machine in machines}]
    one, first = next(iter(machines.items()))
    candidates = [interface for interface in first if not interface.network.is_loopback]
    candidates.sort(key=lambda interface: interface.name.startswith(VIRTUAL))
    shared: list[dict[int, Network]] = []
    for candidate in candidates:
        found = {
            machine: interface
            for machine, interfaces in machines.items()
            for interface in interfaces
            if interface.network == candidate.network
        }
        addresses = {interface.address for interface in found.values()}
        if len(found) == len(addresses) == len(machines):
            shared.append({m: Network(at.name, at.address) for m, at in found.items()})
    of_user = [each for each in shared if each[one].interface in wanted[one]]
    real = [each for each in shared if not each[one].interface.startswith(VIRTUAL)]
    if shared:
        return of_user or real or shared
    raise MotleyError(_why_none(machines, names, candidates))


def _why_none(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    candidates: Sequence[Interface],
) -> str:
    """Return why machines share no subnet, and what to do."""
    own = {
        machine: {at for at in interfaces if not at.network.is_loopback}
        for machine, interfaces in machines.items()
    }
    for machine, interfaces in own.items():
        if not interfaces:
            return (
                f"{names[machine]} has no IPv4 address beside its loopback's, and ranks meet over "
                "IPv4 alone; give it one (ip addr add 10.0.0.1/24 dev eth0), also where it has "
                "IPv6, or leave it out of hosts.txt"
            )
    for candidate in candidates:
        at = {machine: interface.address for machine, interfaces in machines.items()
              for interface in interfaces if interface.network == candidate.network}  # fmt: skip
        twice = [(a, b) for a, b in combinations(at, 2) if at[a] == at[b]]
        if len(at) == len(machines) and twice and not candidate.name.startswith(VIRTUAL):
            a, b = twice[0]
            return (
                f"{names[a]} and {names[b]} both have the address {at[a]}; give one of them another"
            )
    seen = "; ".join(
        f"{names[machine]}: {', '.join(f'{at.name} {at.address}/{at.prefix}' for at in interfaces)}"
        for machine, interfaces in machines.items()
    )
    return (
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

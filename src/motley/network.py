"""Which of their interfaces machines reach each other by. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from motley.errors import MotleyError
from motley.facts import Interface

_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc", "podman")
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """Where one machine sits on the shared subnet: interface and address."""

    interface: str
    address: str


def choose_networks(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environ: Mapping[str, str],
) -> dict[int, Network]:
    """Find one subnet on which every machine has an address of its own.

    Interface names may differ on every machine (eno1, enp4s0f1). An address that two
    machines both have (docker0's 172.17.0.1) is no way to reach either, so such a subnet
    is never chosen. One machine alone talks to itself over loopback.

    Args:
        machines: interfaces of each machine.
        names: host name of each machine, for errors.
        environ: an interface that the user set for gloo or NCCL is preferred.

    Raises:
        MotleyError: there is none, or a machine lacks the user's interface.
    """
    wanted = named_interfaces(machines, names, environ)
    if len(machines) == 1:
        return {machine: Network("lo", "127.0.0.1") for machine in machines}
    first = next(iter(machines.values()))
    candidates = sorted(
        (interface for interface in first if not interface.network.is_loopback),
        key=lambda interface: (
            interface.name not in wanted,
            interface.name.startswith(_VIRTUAL),
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
    for a, b in combinations(machines, 2):
        for one, other in product(machines[a], machines[b]):
            if one.address == other.address and not (
                one.network.is_loopback or one.name.startswith(_VIRTUAL)
            ):
                raise MotleyError(
                    f"{names[a]} and {names[b]} both have the address {one.address} "
                    f"({one.name}, {other.name}): give one of them another"
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
    environ: Mapping[str, str],
) -> Collection[str]:
    """The interfaces that the user names for gloo or NCCL; MotleyError where a machine has none
    of them. NCCL takes the beginning of a name too, and ``^`` before what it must not take."""
    wanted: list[str] = []
    for variable in _VARIABLES:
        value = environ.get(variable, "")
        if not value or value.startswith("^"):
            continue
        asked = value.removeprefix("=").split(",")
        exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
        for machine, interfaces in machines.items():
            has = [interface.name for interface in interfaces]
            if not any(name == word if exact else name.startswith(word)
                       for name in has for word in asked):  # fmt: skip
                raise MotleyError(
                    f"{variable}={value}, but {names[machine]} has no such interface (it has "
                    f"{', '.join(has)}); unset {variable}: the interface of each host is found"
                )
        wanted += asked
    return wanted

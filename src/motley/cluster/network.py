"""The networks that hosts share, and a trial of each network.

A network is described by the interface of each host through which the other hosts reach that host.
The trial opens connections and measures the rate of the slowest connection.

In the trial each host opens a port on each network, and sends to the next host in a ring. A
connection must start with the receiver's token, or is dropped. Neither MPI nor any package is
needed.

python -m motley.cluster.network listen ADDRESS...   # prints a port for each, and a token
python -m motley.cluster.network connect             # prints "NAME ok", or "NAME why not"
python -m motley.cluster.network measure             # prints bytes per second, or the error

To connect and measure, stdin has JSON: [[NAME, ADDRESS, PORT, TOKEN], ...].
"""

import hmac
import json
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from motley.cluster.facts import Interface
from motley.errors import MotleyError

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc", "podman")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """The interface of one machine on a shared subnet, and the interface's address."""

    interface: str
    address: str


def choose_networks(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> dict[int, Network]:
    """Return the most probable network, the first of :func:`list_networks`, without a trial."""
    return list_networks(machines, names, environs)[0]


def list_networks(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> list[dict[int, Network]]:
    """Return the subnets on which every machine has its own address, the most probable first.

    A subnet is described by each machine's interface. The names of the interfaces may differ (eno1,
    enp4s0f1). If two machines have the same address (docker0's 172.17.0.1), neither machine can be
    reached by this address, and the subnet is never chosen. One machine alone uses loopback.
    Interfaces whose names are typical of containers are used only if no other subnet exists.

    Args:
        machines: interfaces of each machine.
        names: host name of each machine, for errors.
        environs: environment variables of each machine. If the user has set a machine's interface
            for gloo or NCCL, no other interface of that machine is used.

    Raises:
        MotleyError: the machines share no subnet, or a machine lacks the interface that the user
            has set.
    """
    wanted = named_interfaces(machines, names, environs)
    if len(machines) == 1:
        return [{machine: Network("lo", "127.0.0.1") for machine in machines}]
    one, first = next(iter(machines.items()))
    candidates = [interface for interface in first if not interface.network.is_loopback]
    candidates.sort(key=lambda interface: interface.name.startswith(VIRTUAL))
    shared: list[dict[int, Network]] = []
    for candidate in candidates:
        result = {
            machine: interface
            for machine, interfaces in machines.items()
            for interface in interfaces
            if interface.network == candidate.network
        }
        addresses = {interface.address for interface in result.values()}
        if len(result) == len(addresses) == len(machines):
            shared.append({m: Network(at.name, at.address) for m, at in result.items()})
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
    """Return an error message that explains why machines share no subnet, with the fix."""
    own = {
        machine: {at for at in interfaces if not at.network.is_loopback}
        for machine, interfaces in machines.items()
    }
    for machine, interfaces in own.items():
        if not interfaces:
            return (
                f"{names[machine]} has only the IPv4 address of its loopback interface, and "
                "ranks connect over IPv4; give it an IPv4 address (ip addr add 10.0.0.1/24 dev "
                "eth0), even if it has IPv6, or remove it from hosts.txt"
            )
    for candidate in candidates:
        at = {machine: interface.address for machine, interfaces in machines.items()
              for interface in interfaces if interface.network == candidate.network}  # fmt: skip
        twice = [(a, b) for a, b in combinations(at, 2) if at[a] == at[b]]
        if len(at) == len(machines) and twice and not candidate.name.startswith(VIRTUAL):
            a, b = twice[0]
            return (
                f"{names[a]} and {names[b]} both have the address {at[a]}; give one of them "
                "another address"
            )
    seen = "; ".join(
        f"{names[machine]}: {', '.join(f'{at.name} {at.address}/{at.prefix}' for at in interfaces)}"
        for machine, interfaces in machines.items()
    )
    return (
        f"the hosts share no subnet on which each has its own address ({seen}); connect them to "
        "one network, or remove the hosts that are not on it from hosts.txt"
    )


def named_interfaces(
    machines: Mapping[int, Sequence[Interface]],
    names: Mapping[int, str],
    environs: Mapping[int, Mapping[str, str]],
) -> dict[int, list[str]]:
    """Return the interfaces that the user names for gloo or NCCL on each machine.

    A value for NCCL may also be the beginning of a name, or have ``^`` before a name that NCCL must
    not use.

    Raises:
        MotleyError: a machine has no interface with the given name.
    """
    wanted: dict[int, list[str]] = {}
    for machine, interfaces in machines.items():
        has, wanted[machine] = [interface.name for interface in interfaces], []
        for variable in VARIABLES:
            value = environs.get(machine, {}).get(variable, "")
            if not value or value.startswith("^"):
                continue
            requested = value.removeprefix("=").split(",")
            exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
            if not any(name == word if exact else name.startswith(word)
                       for name in has for word in requested):  # fmt: skip
                raise MotleyError(
                    f"{variable}={value} on {names[machine]} names an interface that this host "
                    f"does not have (it has {', '.join(has)}); unset {variable}, and Motley "
                    "chooses the interface of each host"
                )
            wanted[machine] += requested
    return wanted


CONNECT_S = 3.0  # seconds for a connection, and again for the greeting
SECONDS = 0.2  # seconds of sending
GREETING = b"motley"
_TOKEN = 32  # characters
# Connections to one port: from one host, or from all hosts in a trial of pairs.
_MOST_CONNECTIONS = 256
_CHUNK = 1 << 16  # bytes
_BUFFER = 1 << 18  # bytes of the send buffer: small, so that a slow network shows early
_MOST = 1 << 27  # bytes
_REPLY_S = 6.0
_COUNT = struct.Struct("!Q")
_FASTER = 1.5  # factor by which a later network has to be faster, since rates vary

Answer = float | str  # bytes per second, or the error


class Receiver:
    """A receiver that listens on several addresses and counts received bytes; a context manager.

    Args:
        addresses: addresses of this machine.

    Attributes:
        ports: one port for each address; 0 if none can be opened.
        token: text that a connection has to start with.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.token = secrets.token_hex(_TOKEN // 2)
        self._servers = [_open(address) for address in addresses]
        self.ports = [server.getsockname()[1] if server else 0 for server in self._servers]
        for server in filter(None, self._servers):
            threading.Thread(target=_serve, args=(server, self.token), daemon=True).start()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        for server in filter(None, self._servers):
            server.close()


def _open(address: str) -> socket.socket | None:
    try:
        return socket.create_server((address, 0), backlog=128)
    except OSError:
        return None


def _serve(server: socket.socket, token: str) -> None:
    for _ in range(_MOST_CONNECTIONS):
        try:
            connection, _ = server.accept()
        except OSError:  # the server is closed
            return
        threading.Thread(target=_count, args=(connection, token), daemon=True).start()


def _count(connection: socket.socket, token: str) -> None:
    """Count the bytes of a peer that has sent the token, and send the count back to the peer."""
    try:
        with connection:
            connection.settimeout(_REPLY_S)
            text = connection.recv(_TOKEN, socket.MSG_WAITALL)
            if not hmac.compare_digest(text, token.encode()):
                return
            connection.sendall(GREETING)
            total, end = 0, time.monotonic() + 2 * _REPLY_S
            while (data := connection.recv(_CHUNK)) and time.monotonic() < end:
                total += len(data)
            connection.sendall(_COUNT.pack(total))
    except OSError:
        pass


def connect(address: str, port: int, token: str) -> socket.socket | str:
    """Return a connection to a :class:`Receiver`, or a description of the error."""
    try:
        connection = socket.create_connection((address, port), CONNECT_S)
    except TimeoutError:
        return f"gets no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return f"fails: {error.strerror}"
    try:
        connection.sendall(token.encode())
        text = connection.recv(len(GREETING), socket.MSG_WAITALL)
    except OSError:
        text = b""
    if text == GREETING:
        return connection
    connection.close()
    return "is answered by another program"


def measure(targets: Sequence[tuple[str, int]], token: str) -> list[Answer]:
    """Send data to one host over each network, and return the rate or error of each network.

    All connections are opened at once, and used one after another.

    Args:
        targets: addresses and ports of one :class:`Receiver`.
        token: token of that receiver.
    """
    connections: list[socket.socket | str] = ["opens no port there"] * len(targets)

    def one(number: int) -> None:
        connections[number] = connect(*targets[number], token)

    threads = [
        threading.Thread(target=one, args=(number,))
        for number, (_, port) in enumerate(targets)
        if port
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each if isinstance(each, str) else _send(each) for each in connections]


def _send(connection: socket.socket) -> Answer:
    chunk, sent = bytes(_CHUNK), 0
    try:
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            connection.settimeout(_REPLY_S)
            began = time.monotonic()
            while time.monotonic() < began + SECONDS and sent < _MOST:
                connection.sendall(chunk)
                sent += len(chunk)
            connection.shutdown(socket.SHUT_WR)
            (count,) = _COUNT.unpack(connection.recv(_COUNT.size))
            return float(count / (time.monotonic() - began))
    except (OSError, struct.error):
        return "breaks off under load"


def next_in_ring(machine: int, machines: Sequence[int]) -> int:
    """Return the machine to which ``machine`` sends in a ring."""
    return machines[(machines.index(machine) + 1) % len(machines)]


def pick_network(
    candidates: Sequence[Mapping[int, Network]],
    answers: Mapping[int, Sequence[Answer]],
    names: Mapping[int, str],
) -> tuple[int, str]:
    """Return the index of the fastest network that connects all, and a sentence on each network.

    Args:
        candidates: networks, the most probable first.
        answers: results of each machine for each candidate, from :func:`measure`.
        names: names of the machines.

    Raises:
        MotleyError: none of the networks connects all machines.
    """
    rates: list[float | None] = []
    words = []
    machines = list(answers)
    for number, candidate in enumerate(candidates):
        first = candidate[machines[0]]
        where = f"{first.interface} ({first.address} on {names[machines[0]]})"
        failed = [
            f"{names[machine]} -> {names[next_in_ring(machine, machines)]} {answer}"
            for machine in machines
            if isinstance(answer := answers[machine][number], str)
        ]
        reports: list[Any] = [answers[machine][number] for machine in machines]
        rates.append(None if failed else min(reports))
        words.append(
            f"{where}: {failed[0]}" if failed else f"{where}: {min(reports) / 1e6:.3g} MB/s"
        )
    best: int | None = None
    for number, rate in enumerate(rates):
        if rate is not None and (best is None or rate > _FASTER * (rates[best] or 0)):
            best = number
    if best is None:
        raise MotleyError(
            f"no network connects all hosts ({'; '.join(words)}). Check cables, switches and "
            "firewalls (MPI uses any port above 1023), or remove the host that is cut off from "
            "hosts.txt"
        )
    others = [word for number, word in enumerate(words) if number != best]
    return best, f"network {words[best]}" + (f"; not taken: {'; '.join(others)}" if others else "")


def main(words: Sequence[str]) -> None:
    """Run the command in ``words``: listen until this process is ended, measure, or connect."""
    if words[0] == "listen":
        with Receiver(words[1:]) as receiver:
            print(*receiver.ports, receiver.token, flush=True)
            signal.pause()
    peers = json.load(sys.stdin)
    if words[0] == "measure":
        targets = [(address, port) for _, address, port, _ in peers]
        print(json.dumps(measure(targets, peers[0][-1])))
        return
    threads = [threading.Thread(target=_try_peer, args=peer) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _try_peer(name: str, address: str, port: int, token: str) -> None:
    """Print "ok" or the error of a connection to a host."""
    results = connect(address, port, token)
    result = results if isinstance(results, str) else "ok"
    print(f"{name} {result}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

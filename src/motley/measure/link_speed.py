"""The speed of links between machines: they meet in pairs, over TCP."""

import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import psutil

from motley.cluster.network import VIRTUAL
from motley.launch.world import World
from motley.plan.links import Flow, Links, Port, rounds

_SECONDS = 0.1  # of sending, each way
_CHUNK = 1 << 16  # bytes
_LEAST = 4  # chunks, on a link that takes longer for them
_BUFFER = 1 << 18  # bytes on the way: what is sent is then soon received
_LOOK_S = 0.3  # at least, at what others send
_PINGS = 15
_MOST_ROUNDS = 16  # 4 s; in more machines each meets so many others, and not all
_TIMEOUT_S = 4.0  # seconds in which something has to come

_RATE = struct.Struct("!d")


def measure_links(world: World, traffic: "Traffic | None" = None) -> Links:
    """Let all machines meet; every launched rank calls it, the first of each machine works.

    Args:
        traffic: of other programs on this machine's interface, watched for a while already.
    """
    traffic = traffic or Traffic(world.network.interface)
    ports = world.allgather(traffic.seen() if world.first_here else None)
    return _links_of(world, _meet(world, _SECONDS), ports)


def _meet(world: World, seconds: float) -> dict[tuple[int, int], Flow]:
    """What passes between the machines, who meet in pairs.

    Args:
        seconds: of sending, each way; 0: the fewest chunks, which show that large messages pass.
    """
    machines = sorted(set(world.machines))
    own = world.rank if world.first_here else None
    token = world.from_first(lambda: secrets.token_bytes(16))
    found: dict[tuple[int, int], Flow] = {}
    with socket.create_server((world.network.address, 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        addresses = world.allgather(listener.getsockname())
        for pairs in rounds(machines)[:_MOST_ROUNDS]:
            for caller, callee in pairs:
                if own == caller:
                    there, back = call(addresses[callee], token, seconds)
                    found |= {(caller, callee): there, (callee, caller): back}
                elif own == callee:
                    answer(listener, token, seconds)
            world.allgather(None)  # the next round begins when all have met
    return {pair: flow for part in world.allgather(found) for pair, flow in part.items()}


def known_links(world: World, flows: Mapping[tuple[int, int], Flow]) -> Links | None:
    """The links of machines that have met before; every launched rank calls it.

    Args:
        flows: as they were then. What ports say of themselves is of now.

    Returns:
        None: something does not pass any more.
    """
    port = look_at(world.network.interface) if world.first_here else None
    ports = world.allgather(port)
    now = _links_of(world, _meet(world, 0.0), ports)
    return None if now.broken() else _links_of(world, flows, ports)


def _links_of(
    world: World, flows: Mapping[tuple[int, int], Flow], ports: Sequence[Port | None]
) -> Links:
    hosts = {machine: world.nodes[machine].host for machine in sorted(set(world.machines))}
    return Links(hosts, flows, {rank: port for rank, port in enumerate(ports) if port})


class Traffic:
    """What other programs send and receive through an interface, from here to :meth:`seen`;
    nothing is measured over it meanwhile."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._before = psutil.net_io_counters(pernic=True).get(interface)
        self._start = time.perf_counter()

    def seen(self) -> Port:
        """What the interface says of itself, and what went through it, watched for long enough."""
        time.sleep(max(0.0, self._start + _LOOK_S - time.perf_counter()))
        after = psutil.net_io_counters(pernic=True).get(self._interface)
        port, seconds = look_at(self._interface), time.perf_counter() - self._start
        if self._before is None or after is None:
            return port
        return replace(
            port, others_send=(after.bytes_sent - self._before.bytes_sent) / seconds,
            others_receive=(after.bytes_recv - self._before.bytes_recv) / seconds,
        )  # fmt: skip


def look_at(interface: str) -> Port:
    """What an interface says of itself."""
    says = {
        name: each.speed for name, each in psutil.net_if_stats().items()
        if each.isup and (name == interface or not name.startswith(VIRTUAL))
    }  # fmt: skip
    own = says.get(interface, 0)
    fastest = max(says, key=lambda name: says[name], default="")
    faster = f"{fastest} ({says[fastest]:,} Mbit/s)" if 0 < own < says.get(fastest, 0) else ""
    return Port(interface, own or None, faster=faster)


def call(address: tuple[str, int], token: bytes, seconds: float = _SECONDS) -> tuple[Flow, Flow]:
    """Meet the machine that answers at ``address``: the flow to it, and the one from it.

    Args:
        seconds: of sending, each way.
    """
    try:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        line.settimeout(_TIMEOUT_S)
        line.connect(address)
    except OSError as error:
        failed = Flow(0.0, 0.0, f"cannot connect to {address[0]} ({error.strerror or error})")
        return failed, failed
    latency_s, there, back = 0.0, 0.0, 0.0
    with line:
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(token)
            latency_s = _ping(line)
            _send(line, seconds)
            (there,) = _RATE.unpack(_exactly(line, _RATE.size))
            back = _receive(line)
            line.sendall(_RATE.pack(back))
        except OSError as error:
            what = "small messages pass and large ones do not; compare the MTU of both interfaces"
            failure = f"{what} ({error})" if latency_s else f"it does not answer ({error})"
            return (
                Flow(there, latency_s, "" if there else failure),
                Flow(0.0, latency_s, failure),
            )
    return Flow(there, latency_s), Flow(back, latency_s)


def answer(listener: socket.socket, token: bytes, seconds: float = _SECONDS) -> None:
    """Be met by the machine that knows the token, and send to it for so many seconds."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            line, _ = listener.accept()
        except OSError:
            return  # the caller will say why it could not
        with line:
            try:
                line.settimeout(_TIMEOUT_S)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not secrets.compare_digest(_exactly(line, len(token)), token):
                    continue
                for _ in range(_PINGS):
                    line.sendall(_exactly(line, 1))
                line.sendall(_RATE.pack(_receive(line)))
                _send(line, seconds)
                _exactly(line, _RATE.size)
            except OSError:
                pass
            return


def _ping(line: socket.socket) -> float:
    """Half of a small message's round trip, seconds."""
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        line.sendall(b"?")
        _exactly(line, 1)
        times.append(time.perf_counter() - start)
    return median(times) / 2


def _send(line: socket.socket, seconds: float) -> None:
    more, last = bytearray(_CHUNK), bytearray(_CHUNK)
    more[0] = 1
    start, sent = time.perf_counter(), 1
    while sent < _LEAST or time.perf_counter() < start + seconds:
        line.sendall(more)
        sent += 1
    line.sendall(last)


def _receive(line: socket.socket) -> float:
    """Bytes a second of what :func:`_send` sends, without its first quarter, or a little more: what
    waited while this program was kept from running comes at once, and may be the beginning of one
    such part, not of most."""
    chunk, came = bytearray(_CHUNK), [0.0]
    while True:
        view = memoryview(chunk)
        while view:
            count = line.recv_into(view)
            if count == 0:
                raise ConnectionError("the other machine hung up")
            view = view[count:]
        came.append(time.perf_counter())
        if not chunk[0]:
            break
    starts = [max(1, len(came) * part // 8) for part in (2, 3, 4)]
    return median((len(came) - 1 - start) * _CHUNK / (came[-1] - came[start]) for start in starts)


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the other machine hung up")
        data += part
    return data

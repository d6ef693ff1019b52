"""Measures what the links between machines carry: they meet in pairs, over TCP.

In each round every machine meets one other, so the time grows with the machines and not with
their pairs. A connection begins with a token that all ranks know, so strangers are sent away.
"""

import secrets
import socket
import struct
import time
from statistics import median

import psutil

from motley.cluster.network import VIRTUAL
from motley.launch.world import World
from motley.plan.links import Flow, Links, Port, rounds

_SECONDS = 0.2  # of sending, each way
_CHUNK = 1 << 16  # bytes
_LEAST = 4  # chunks, on a link that takes longer for them
_BUFFER = 1 << 18  # bytes on the way: what is sent is then soon received
_LOOK_S = 0.3  # at what others send
_PINGS = 15
_MOST_ROUNDS = 16  # 8 s; in more machines each meets so many others, and not all
_TIMEOUT_S = 4.0  # seconds in which something has to come

_RATE = struct.Struct("!d")


def measure_links(world: World) -> Links:
    """Let all machines meet; every launched rank calls it, the first of each machine works."""
    machines = sorted(set(world.machines))
    own = world.rank if world.first_here else None
    token = world.from_first(lambda: secrets.token_bytes(16))
    ports = world.allgather(look_at(world.network.interface) if own is not None else None)
    found: dict[tuple[int, int], Flow] = {}
    with socket.create_server((world.network.address, 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        addresses = world.allgather(listener.getsockname())
        for pairs in rounds(machines)[:_MOST_ROUNDS]:
            for caller, callee in pairs:
                if own == caller:
                    there, back = call(addresses[callee], token)
                    found |= {(caller, callee): there, (callee, caller): back}
                elif own == callee:
                    answer(listener, token)
            world.allgather(None)  # the next round begins when all have met
    flows = {pair: flow for part in world.allgather(found) for pair, flow in part.items()}
    hosts = {machine: world.nodes[machine].host for machine in machines}
    return Links(hosts, flows, {rank: port for rank, port in enumerate(ports) if port})


def look_at(interface: str) -> Port:
    """What an interface says of itself, and what goes through it now."""
    before, start = psutil.net_io_counters(pernic=True).get(interface), time.perf_counter()
    time.sleep(_LOOK_S)
    after, seconds = psutil.net_io_counters(pernic=True).get(interface), time.perf_counter() - start
    says = {
        name: each.speed for name, each in psutil.net_if_stats().items()
        if each.isup and (name == interface or not name.startswith(VIRTUAL))
    }  # fmt: skip
    own = says.get(interface, 0)
    fastest = max(says, key=lambda name: says[name], default="")
    faster = f"{fastest} ({says[fastest]:,} Mbit/s)" if 0 < own < says.get(fastest, 0) else ""
    if before is None or after is None:
        return Port(interface, own or None, faster=faster)
    return Port(
        interface, own or None, (after.bytes_sent - before.bytes_sent) / seconds,
        (after.bytes_recv - before.bytes_recv) / seconds, faster,
    )  # fmt: skip


def call(address: tuple[str, int], token: bytes) -> tuple[Flow, Flow]:
    """Meet the machine that answers at ``address``: the flow to it, and the one from it."""
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
            _send(line)
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


def answer(listener: socket.socket, token: bytes) -> None:
    """Be met by the machine that knows the token."""
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
                _send(line)
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


def _send(line: socket.socket) -> None:
    more, last = bytearray(_CHUNK), bytearray(_CHUNK)
    more[0] = 1
    start, sent = time.perf_counter(), 1
    while sent < _LEAST or time.perf_counter() < start + _SECONDS:
        line.sendall(more)
        sent += 1
    line.sendall(last)


def _receive(line: socket.socket) -> float:
    """Bytes a second of what :func:`_send` sends, without its first quarter."""
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
    start = max(1, len(came) // 4)
    return (len(came) - 1 - start) * _CHUNK / (came[-1] - came[start])


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the other machine hung up")
        data += part
    return data

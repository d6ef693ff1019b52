"""The speed of links between machines, and of an all-reduce of gradients over all ranks.

Machines measure their links in pairs over TCP.
"""

import math
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from motley.cluster.network import VIRTUAL
from motley.comm.collectives import leave_group
from motley.comm.modes.numbers import EXACT
from motley.comm.reducer import Bucket, Reducer, make_buckets
from motley.launch.world import World
from motley.measure.device import wait_for
from motley.plan.speeds import Flow, Links, Port, rounds
from motley.plan.wire import Addition, AllReduceCost, FewerCost, WireMode

_SECONDS = 0.1  # seconds of sending in each direction
_CHUNK = 1 << 16  # bytes
_LEAST = 4  # chunks to send, even if a slow link takes longer for them
_BUFFER = 1 << 18  # bytes of the send buffer: small, so that sent data is soon received
_LOOK_S = 0.3  # shortest watch over other programs' traffic
_PINGS = 15
_MOST_ROUNDS = 16  # 4 s; with more machines than that, not all pairs are measured
_TIMEOUT_S = 4.0  # seconds in which data has to arrive

_RATE = struct.Struct("!d")


def measure_links(world: World, traffic: "Traffic | None" = None) -> Links:
    """Measure the links between all machines; every launched rank calls this function.

    The first rank of each machine does the work.

    Args:
        world: the ranks.
        traffic: a running measurement of other programs' traffic on this machine's interface; None:
            start one.
    """
    traffic = traffic or Traffic(world.network.interface)
    ports = world.allgather(traffic.read_port() if world.first_here else None)
    return _collect_links(world, _meet(world, _SECONDS), ports)


def _meet(world: World, seconds: float) -> dict[tuple[int, int], Flow]:
    """Measure the flow from each machine to each other machine, in pairs, and return all flows.

    Args:
        world: the ranks.
        seconds: seconds of sending in each direction. 0: send only the chunks that are needed to
            show that large messages pass.
    """
    machines = sorted(set(world.machines))
    own = world.rank if world.first_here else None
    token = world.from_first(lambda: secrets.token_bytes(16))
    result: dict[tuple[int, int], Flow] = {}
    with socket.create_server((world.network.address, 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        addresses = world.allgather(listener.getsockname())
        for pairs in rounds(machines)[:_MOST_ROUNDS]:
            for caller, callee in pairs:
                if own == caller:
                    there, back = call(addresses[callee], token, seconds)
                    result |= {(caller, callee): there, (callee, caller): back}
                elif own == callee:
                    answer(listener, token, seconds)
            world.allgather(None)  # the next round starts when all pairs are done
    return {pair: flow for part in world.allgather(result) for pair, flow in part.items()}


def known_links(world: World, flows: Mapping[tuple[int, int], Flow]) -> Links | None:
    """Return the links of machines from stored flows; every launched rank calls it.

    Args:
        world: the ranks.
        flows: flows of an earlier measurement. The speeds of ports are read again.

    Returns:
        The links; None if some connection no longer passes data.
    """
    port = look_at(world.network.interface) if world.first_here else None
    ports = world.allgather(port)
    now = _collect_links(world, _meet(world, 0.0), ports)
    return None if now.broken() else _collect_links(world, flows, ports)


def _collect_links(
    world: World, flows: Mapping[tuple[int, int], Flow], ports: Sequence[Port | None]
) -> Links:
    hosts = {machine: world.nodes[machine].host for machine in sorted(set(world.machines))}
    return Links(hosts, flows, {rank: port for rank, port in enumerate(ports) if port})


class Traffic:
    """A measurement of other programs' traffic, from its creation to :meth:`read_port`.

    Motley itself may send nothing through the network interface in this time.
    """

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._before = psutil.net_io_counters(pernic=True).get(interface)
        self._start = time.perf_counter()

    def read_port(self) -> Port:
        """End the measurement, after a little more time.

        Return the interface's properties and the traffic of other programs.
        """
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
    """Return the properties of a network interface, and the name of a faster one, if any."""
    says = {
        name: each.speed for name, each in psutil.net_if_stats().items()
        if each.isup and (name == interface or not name.startswith(VIRTUAL))
    }  # fmt: skip
    own = says.get(interface, 0)
    fastest = max(says, key=lambda name: says[name], default="")
    faster = f"{fastest} ({says[fastest]:,} Mbit/s)" if 0 < own < says.get(fastest, 0) else ""
    return Port(interface, own or None, faster=faster)


def call(address: tuple[str, int], token: bytes, seconds: float = _SECONDS) -> tuple[Flow, Flow]:
    """Measure the flow to the machine that answers at ``address``, and the flow from it.

    Args:
        address: address and port.
        token: token that the other machine expects.
        seconds: seconds of sending in each direction.

    Returns:
        Both flows. If the measurement fails, a flow has the rate 0 and the error.
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
            what = "small messages arrive and large ones do not; compare the MTU of both interfaces"
            failure = f"{what} ({error})" if latency_s else f"it does not answer ({error})"
            return (
                Flow(there, latency_s, "" if there else failure),
                Flow(0.0, latency_s, failure),
            )
    return Flow(there, latency_s), Flow(back, latency_s)


def answer(listener: socket.socket, token: bytes, seconds: float = _SECONDS) -> None:
    """Accept a connection with the token, receive its data, and send data for ``seconds``."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            line, _ = listener.accept()
        except OSError:
            return  # the caller reports the error
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
    """Return half of a small message's round-trip time in seconds, the median of several."""
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
    """Receive the data of :func:`_send`, and return its rate in bytes per second.

    The result is the median of three rates. The three measurements start after a quarter, three
    eighths and half of the data, and last until the end. Data that waited while this program was
    suspended arrives in a burst. A burst at the start of one measurement does not change the
    median.
    """
    chunk, came = bytearray(_CHUNK), [0.0]
    while True:
        view = memoryview(chunk)
        while view:
            count = line.recv_into(view)
            if count == 0:
                raise ConnectionError("the other host closed the connection")
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
            raise ConnectionError("the other host closed the connection")
        data += part
    return data


_PIECE_MIB = 25.0  # largest bucket
_TINY = 8  # height and width of a nearly empty matrix
_MOST = 2**30  # most numbers that are sent to time a wire; no device needs to hold the gradient
_PIECES = 8  # least buckets, since several are needed to hide behind a backward pass
TRIES = 3  # number of tries, of which the median counts
_ENOUGH_S = 0.25  # total time after which no try is repeated: longer tries are less noisy
_PART_S = (
    3.0  # that sending a part of the gradient should take at most; two buckets are sent anyway
)


def measure_wire(
    parameters: Sequence[torch.Tensor], mode: WireMode, tries: int = TRIES, group: Any = None
) -> AllReduceCost:
    """Measure the cost of an all-reduce of the gradient of these parameters.

    Nearly empty buckets give the latency, and the whole gradient gives the transfer time.

    Only a part of the gradient is sent if the network is so slow that all of it would take seconds.
    All ranks of the process group must call this function, and get the same result.

    Args:
        parameters: the parameters.
        mode: the wire mode.
        tries: largest number of repetitions of each timing.
        group: process group of the ranks that take part, for the exact mode alone; None: all ranks.
    """
    device = parameters[0].device
    send_s = _Sender(mode, tries, device, group).seconds
    total = sum(parameter.numel() for parameter in parameters)
    some = _first(parameters, _MOST)
    pieces = make_buckets(some, min(int(_PIECE_MIB * 2**18), total // _PIECES))
    # Send as many small messages as pieces, since a GPU gets the next while it works on one.
    side = max(_TINY, mode.least_side)
    tiny = [torch.empty(side, side, device=device) for _ in pieces]
    # The minimum over ranks is the time of the last rank to arrive, which waited for no other.
    nothing_s = send_s(make_buckets(tiny, side**2), dist.ReduceOp.MIN, warm=True)
    latency_s = nothing_s / len(pieces)
    first_s = send_s(pieces[:1])
    part = pieces[: max(2, min(len(pieces), int(_PART_S / first_s)))]  # one alone has no slope
    part_s = send_s(part) if len(part) > 1 else first_s
    first, more, whole = (_count_bytes(mode, sent) for sent in (pieces[:1], part, pieces))
    all_s = _all_s(first, more, whole, first_s, part_s)
    count = len(pieces)
    del part, pieces  # frees their memory for the next buckets
    computes = mode.addition is Addition.BUCKETS
    if first < more == whole and (computes or dist.get_backend() == "nccl"):
        # If the mode computes with matrices, a full bucket costs more than a nearly empty one.
        # With NCCL it costs less, because NCCL starts it while another is on its way.
        each_s = (all_s - send_s(make_buckets(some, total))) / (count - 1)
        latency_s = max(latency_s if computes else 0.0, each_s)
    transfer_s = max(0.0, all_s - latency_s * count) * total / sum(p.numel() for p in some)
    return compute_cost(parameters, mode, latency_s, transfer_s)


def _count_bytes(mode: WireMode, buckets: Sequence[Bucket]) -> float:
    return mode.count_bytes([tuple(grad.shape) for bucket in buckets for grad in bucket.grads])


def _all_s(first: float, part: float, whole: float, first_s: float, part_s: float) -> float:
    """Estimate the seconds of the whole gradient, given the seconds of a part of it.

    The estimate assumes that the rest is as fast as the part without its first bytes. During the
    first bytes, the pipeline of transfers fills.

    Args:
        first: number of the first bytes, during which the pipeline fills.
        part: bytes of the part that was sent, first bytes included.
        whole: bytes of the whole gradient.
        first_s: measured seconds of the first bytes.
        part_s: measured seconds of the part.
    """
    if part == first:
        return part_s * whole / part
    return part_s + (whole - part) * (part_s - first_s) / (part - first)


def _first(parameters: Sequence[torch.Tensor], numbers: int) -> Sequence[torch.Tensor]:
    """Return the first parameters, with at most ``numbers`` values together.

    At least two parameters are returned.
    """
    ends = accumulate(parameter.numel() for parameter in parameters)
    return parameters[: max(2, sum(end <= numbers for end in ends))]


def measure_fewer(parameters: Sequence[torch.Tensor], ranks: Sequence[int]) -> FewerCost:
    """Time the exact all-reduce of these parameters' gradient among some ranks alone.

    All ranks of the process group must call it, and get the same result.

    Args:
        parameters: the parameters.
        ranks: the ranks that take part.
    """
    device, group = parameters[0].device, dist.new_group(list(ranks))
    seconds = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() in ranks:
        seconds += measure_wire(parameters, EXACT, TRIES, group).transfer_s
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() in ranks:
        leave_group(group)
    return FewerCost(tuple(ranks), seconds.item())


def compute_cost(
    parameters: Sequence[torch.Tensor], mode: WireMode, latency_s: float, transfer_s: float
) -> AllReduceCost:
    """Return the cost of an all-reduce of these parameters' gradient, from its measured seconds.

    Args:
        parameters: the parameters.
        mode: the wire mode.
        latency_s: seconds of a nearly empty bucket.
        transfer_s: seconds of the whole gradient, without latencies.
    """
    size = mode.count_bytes([tuple(parameter.shape) for parameter in parameters])
    return AllReduceCost(
        latency_s, transfer_s, dist.get_backend() == "nccl",
        size=float(size), sync_every=mode.sync_every, tensors=_tensors(parameters, mode),
    )  # fmt: skip


def _tensors(parameters: Sequence[torch.Tensor], mode: WireMode) -> tuple[tuple[float, float], ...]:
    """Return each tensor's fraction of all elements and of all bytes, from the last layer on.

    See AllReduceCost.tensors.
    """
    shapes = [tuple(parameter.shape) for parameter in reversed(parameters)]
    numbers, size = sum(map(math.prod, shapes)), mode.count_bytes(shapes)
    return tuple((math.prod(shape) / numbers, mode.count_bytes([shape]) / size) for shape in shapes)


@dataclass(frozen=True)
class _Sender:
    """A timer for all-reduces of buckets; see :func:`measure_wire`."""

    mode: WireMode
    tries: int
    device: torch.device
    group: Any

    def seconds(
        self,
        buckets: Sequence[Bucket],
        whose: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX,
        warm: bool = False,
    ) -> float:
        """Return the seconds of an all-reduce, the same on all ranks.

        Args:
            buckets: the buckets to send.
            whose: the rank whose time is the result. MAX: the slowest rank, since ranks with fast
                links are done before their data has passed a slow link. MIN: the fastest rank,
                whose time includes no waiting for others to start.
            warm: True: send once before the timing, to make the connections.
        """
        reducer = self.mode.reducer(self.device) if self.group is None else Reducer(self.group)
        reducer.begin_at_once()

        def send() -> None:
            for future in [reducer.send(bucket) for bucket in buckets]:
                future.wait()

        if warm:
            send()
        seconds = self._together_s(send, whose)
        reducer.close()
        return seconds

    def _together_s(self, run: Callable[[], None], whose: dist.ReduceOp.RedOpType) -> float:
        """Run an operation of all ranks a few times, and return the median of its seconds."""
        tries: list[float] = []
        while len(tries) < self.tries and sum(tries) < _ENOUGH_S:
            # All ranks start together.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            wait_for(self.device)
            start = time.perf_counter()
            run()
            wait_for(self.device)
            spent = torch.tensor(
                time.perf_counter() - start, dtype=torch.float64, device=self.device
            )
            dist.all_reduce(spent, whose, group=self.group)
            tries.append(spent.item())
        return statistics.median(tries)

"""Measured speeds of ranks, and of the links between hosts.

The module reads no file, clock or hardware.

Source of the arithmetic: ARITHMETIC.md. A rank needs

    t(n) = step_s + k * micro(n / k),    k = ceil(n / m)

seconds for n samples in k micro-batches of similar size. micro(b) is the time of one micro-batch of
b samples, from a measured table. Reading takes input_s seconds per sample. Without loader
processes, this time is added to t(n). With loader processes, which read ahead, t(n) is the longer
of the two times:

    t(n) = max(step_s + k * micro(n / k), n * input_s)

The measurement is in motley.measure.link_speed.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

_AS_FAST = 0.99  # fraction of the best rate that counts as equal; the rest is the clock's noise


@dataclass(frozen=True)
class SpeedTable:
    """The measured compute times of one rank.

    Attributes:
        sizes: micro-batch sizes that were timed, ascending from 1; all of them fit in memory.
        seconds: time of the forward and backward pass at each size.
        step_s: seconds per step that do not depend on the batch: clipping and the optimizer.
        memory_mib: peak memory at each size, in MiB; None where unknown.
        preferred: size to use as m (the rank's largest micro-batch) even if other sizes are faster;
            0: no such size.
        grain: number of samples that stay together in one micro-batch. All sizes are multiples of
            it.
        compiled: True if the model was compiled.
        input_s: seconds per sample that all loader processes of the rank together need to read; 0:
            reading is not counted.
        reads_ahead: True if loader processes read while the rank computes. False: the rank itself
            reads before it computes.
        readers: number of loader processes; None: the usual number.
        rest_mib: MiB in use between two passes during the measurement; None: unknown.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    step_s: float
    memory_mib: tuple[float | None, ...] = ()
    preferred: int = 0
    grain: int = 1
    compiled: bool = False
    input_s: float = 0.0
    reads_ahead: bool = False
    readers: int | None = None
    rest_mib: float | None = None

    def activations_mib(self, samples: int) -> float | None:
        """Return the memory in MiB that a micro-batch takes beyond the memory between two passes.

        The memory is interpolated linearly between the measured sizes and beyond them. None:
        unknown.
        """
        pairs = zip(self.sizes, self.memory_mib, strict=False)
        known = [(size, mib) for size, mib in pairs if mib is not None]
        if self.rest_mib is None or not known:
            return None
        if len(known) == 1:
            size, mib = known[0]
            return (mib - self.rest_mib) * samples / size
        right = min(max(1, bisect_right([size for size, _ in known], samples)), len(known) - 1)
        (low, less), (high, more) = known[right - 1 : right + 1]
        return less + (more - less) * (samples - low) / (high - low) - self.rest_mib

    @cached_property
    def micro_batch(self) -> int:
        """m, the largest micro-batch of the rank: ``preferred``, or the size with the best rate.

        If several measured sizes have about the best rate, m is the largest of these sizes.

        Most shares are not a multiple of m. A share that is cut into few large micro-batches is
        still computed at nearly the best rate.
        """
        if self.preferred:
            return self.preferred
        rates = [size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True)]
        enough = _AS_FAST * max(rates)
        return max(s for s, rate in zip(self.sizes, rates, strict=True) if rate >= enough)

    @cached_property
    def rate(self) -> float:
        """Best measured number of samples per second, without the time of the optimizer."""
        return max(size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True))

    @cached_property
    def rising(self) -> tuple[float, ...]:
        """``seconds`` without the noise of the clock.

        A disturbance only lengthens a measurement. The values are therefore lowered until fewer
        samples never take more time. The values below m are raised until no size takes less time
        per sample than m.
        """
        place = self.sizes.index(self.micro_batch)
        shortest = [*accumulate(reversed(self.seconds), min)][::-1]
        least = shortest[place] / self.micro_batch
        below = [max(least * self.sizes[at], shortest[at]) for at in range(place)]
        return (*below, *shortest[place:])

    def micro_s(self, samples: float) -> float:
        """Return the seconds of one micro-batch, interpolated linearly; 0 for no samples."""
        if samples <= 0:
            return 0.0
        if samples <= self.sizes[0] or len(self.sizes) == 1:
            return self.rising[0] * max(1.0, samples / self.sizes[0])
        right = min(bisect_right(self.sizes, samples), len(self.sizes) - 1)
        (low, high), (start, end) = (
            self.sizes[right - 1 : right + 1],
            self.rising[right - 1 : right + 1],
        )
        return start + (end - start) * (samples - low) / (high - low)

    def compute_seconds(self, samples: float) -> float:
        """Return t(n): the seconds that a rank takes for ``samples`` in a step."""
        parts = max(1, math.ceil(samples / self.micro_batch))
        computed = self.step_s + parts * self.micro_s(samples / parts)
        read = samples * self.input_s
        return max(computed, read) if self.reads_ahead else computed + read

    def waits_s(self, samples: float) -> float:
        """Return the seconds in a step in which the rank waits for its samples."""
        return self.compute_seconds(samples) - self.computing().compute_seconds(samples)

    def computing(self) -> "SpeedTable":
        """Return a copy of the table without the time to read samples."""
        return replace(self, input_s=0.0, reads_ahead=False, readers=None)

    def slower(self, factor: float) -> "SpeedTable":
        """Return the table of a rank that takes ``factor`` times as long, except for ``step_s``."""
        seconds = tuple(factor * each for each in self.seconds)
        return replace(self, seconds=seconds, input_s=factor * self.input_s)

    def with_size(self, size: int, seconds: float, memory_mib: float | None = None) -> "SpeedTable":
        """Return a copy of the table with one more timed size.

        Args:
            size: samples in a micro-batch.
            seconds: time of a micro-batch of this size.
            memory_mib: peak memory at this size; None: unknown.
        """
        place = bisect_right(self.sizes, size)
        memory = self.memory_mib or (None,) * len(self.sizes)
        return replace(
            self,
            sizes=(*self.sizes[:place], size, *self.sizes[place:]),
            seconds=(*self.seconds[:place], seconds, *self.seconds[place:]),
            memory_mib=(*memory[:place], memory_mib, *memory[place:]),
        )

    def compiled_as(self, seconds: Mapping[int, float]) -> "SpeedTable":
        """Return the table for the compiled model, which was timed at some sizes only.

        All other sizes are assumed to have the speed-up of the largest timed size.

        Args:
            seconds: time of a micro-batch of the compiled model, by size. A size need not be in
                this table.
        """
        most = max(seconds)
        part = seconds[most] / self.micro_s(most)
        result = replace(self, compiled=True, seconds=tuple(part * each for each in self.seconds))
        for size, each in seconds.items():
            if size in result.sizes:
                place = result.sizes.index(size)
                times = (*result.seconds[:place], each, *result.seconds[place + 1 :])
                result = replace(result, seconds=times)
            else:
                result = result.with_size(size, each)
        return result

    def in_one(self, samples: int) -> "SpeedTable":
        """Return a copy of the table in which one micro-batch holds ``samples`` if possible.

        The preferred size m becomes the smallest timed size of at least ``samples``.

        If all timed sizes are smaller, m becomes the largest timed size.
        """
        if samples <= 0:
            return self
        enough = next((size for size in self.sizes if size >= samples), self.sizes[-1])
        return replace(self, preferred=enough)

    def at_most(self, micro_batch: int) -> "SpeedTable":
        """Return a copy of the table without micro-batches above ``micro_batch``.

        The size ``grain`` always stays.
        """
        micro_batch = max(1, micro_batch // self.grain) * self.grain
        places = [index for index, size in enumerate(self.sizes) if size < micro_batch]
        memory = self.memory_mib or (None,) * len(self.sizes)
        return (
            replace(
                self,
                sizes=(*(self.sizes[index] for index in places), micro_batch),
                seconds=(*(self.seconds[index] for index in places), self.micro_s(micro_batch)),
                memory_mib=(*(memory[index] for index in places), None),
                preferred=min(self.preferred, micro_batch),
            )
            if micro_batch < self.sizes[-1]
            else self
        )

    def as_json(self) -> dict[str, Any]:
        """Return the table for run.json and for the cache; :meth:`from_json` reads it."""
        return {"sizes": self.sizes, "seconds": self.seconds, "step_s": self.step_s,
                "memory_mib": self.memory_mib, "preferred": self.preferred,
                "grain": self.grain, "compiled": self.compiled, "input_s": self.input_s,
                "reads_ahead": self.reads_ahead, "readers": self.readers,
                "rest_mib": self.rest_mib}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SpeedTable":
        """Read the result of :meth:`as_json`.

        Raises:
            ValueError: the content is no valid table.
            KeyError: a field is missing.
            TypeError: a field has another type.
        """
        sizes = tuple(int(size) for size in content["sizes"])
        seconds = tuple(float(value) for value in content["seconds"])
        step_s, memory = float(content["step_s"]), tuple(content["memory_mib"])
        if not sizes or not len(sizes) == len(seconds) == len(memory or sizes):
            raise ValueError("no table of speeds")
        if min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes do not ascend")
        if not all(0 < value < math.inf for value in seconds) or not 0 <= step_s < math.inf:
            raise ValueError("no times")
        preferred = int(content.get("preferred", 0))
        if preferred not in (0, *sizes):
            raise ValueError("a preferred size that was not timed")
        grain = int(content.get("grain", 1))
        if grain < 1 or any(size % grain for size in sizes):
            raise ValueError("sizes are no multiples of the grain")
        input_s, readers = float(content.get("input_s", 0.0)), content.get("readers")
        if not 0 <= input_s < math.inf or not (readers is None or int(readers) >= 0):
            raise ValueError("no time to read a sample")
        return cls(
            sizes, seconds, step_s, memory, preferred, grain, bool(content.get("compiled", False)),
            input_s, bool(content.get("reads_ahead", False)), readers, content.get("rest_mib"),
        )  # fmt: skip


_FAR = 0.5  # fraction of the second slowest link, below which traffic avoids the slowest
_FULL = 0.5  # fraction of a port's rate, below which the port is not the limit; TCP reaches 0.95
_ONE_FEEDS = 10_000  # Mbit/s that one connection of a Python program carries
_BUSY = 0.2  # fraction of a link used by other programs that is reported, if also above
_TRAFFIC = 1e6  # bytes per second
_SLOWER = 0.7  # fraction of the others' median, below which a link is reported as slow


@dataclass(frozen=True)
class Flow:
    """The measured traffic from one host to another.

    Attributes:
        bytes_per_s: bytes per second that arrive over one TCP connection; 0.0 if large packets do
            not arrive.
        latency_s: half of a small message's round-trip time, in seconds.
        error: reason why nothing was measured; empty without an error.
    """

    bytes_per_s: float
    latency_s: float
    error: str = ""


@dataclass(frozen=True)
class Port:
    """A host's network interface.

    Attributes:
        interface: name of the interface.
        mbit: nominal rate in each direction, Mbit/s; None: unknown.
        others_send: bytes per second that other programs sent while Motley measured nothing.
        others_receive: bytes per second that other programs received while Motley measured nothing.
        faster: description of another active interface with a higher nominal rate; empty: none.
    """

    interface: str
    mbit: float | None = None
    others_send: float = 0.0
    others_receive: float = 0.0
    faster: str = ""


@dataclass(frozen=True)
class Links:
    """All measured data flows between hosts.

    Attributes:
        hosts: names of the hosts. The key of a host, here and below, is the lowest rank on it.
        flows: measured flows, by the pair of sender and receiver.
        ports: network interfaces of the hosts, where known.
    """

    hosts: Mapping[int, str]
    flows: Mapping[tuple[int, int], Flow]
    ports: Mapping[int, Port] = field(default_factory=dict)

    @cached_property
    def _most(self) -> dict[tuple[str, int], float]:
        most: dict[tuple[str, int], float] = {}
        for (sender, receiver), flow in self.flows.items():
            for key in (("sends", sender), ("receives", receiver)):
                most[key] = max(most.get(key, 0.0), flow.bytes_per_s)
        return most

    @cached_property
    def _carried(self) -> list[float]:
        """Bytes per second that each host's link carries in its slower direction, ascending."""
        return sorted(map(self.carries, self.hosts))

    @cached_property
    def _nearest_s(self) -> dict[int, float]:
        nearest: dict[int, float] = {}
        for pair, flow in self.flows.items():
            for machine in pair if flow.latency_s else ():
                nearest[machine] = min(nearest.get(machine, float("inf")), flow.latency_s)
        return nearest

    def sends(self, machine: int) -> float:
        """Return the bytes per second that a host sends to the fastest receiver."""
        return self._most.get(("sends", machine), 0.0)

    def receives(self, machine: int) -> float:
        """Return the bytes per second that a host receives from the fastest sender."""
        return self._most.get(("receives", machine), 0.0)

    def carries(self, machine: int) -> float:
        """Return the bytes per second of a host's link in its slower direction.

        This rate limits a ring all-reduce.
        """
        return min(self.sends(machine), self.receives(machine))

    def ring_s(self, size: float, ranks: int, among: Collection[int] | None = None) -> float:
        """Return the least seconds of a ring all-reduce.

        Each link carries 2 (n - 1) / n of the size.

        Args:
            size: size of the summed tensor, in bytes.
            ranks: number n of ranks in the ring.
            among: hosts of the ranks in the ring; None: all hosts.
        """
        machines = set(self.hosts if among is None else among)
        if len(machines) < 2:
            return 0.0
        slowest = min(map(self.carries, machines))
        return 2 * (ranks - 1) / ranks * size / slowest if slowest > 0 else float("inf")

    def slow_rank(self) -> int | None:
        """Return the host whose link is far slower than the links of all other hosts, or None.

        The lowest rank on the host stands for the host.
        """
        if len(self.hosts) < 3:
            return None
        slowest, second, *_ = sorted(self.hosts, key=self.carries)
        return slowest if 0 < self.carries(slowest) < _FAR * self.carries(second) else None

    def as_json(self) -> dict[str, Any]:
        """Return the links for run.json: one entry per flow, and one per port."""
        flows = [
            {"from": self.hosts[a], "to": self.hosts[b], **asdict(flow)}
            for (a, b), flow in sorted(self.flows.items())
        ]
        ports = [{"host": self.hosts[m], **asdict(port)} for m, port in sorted(self.ports.items())]
        return {"flows": flows, "ports": ports}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Links":
        """Read the result of :meth:`as_json`. Hosts with the same name become one."""
        names = [name for flow in content["flows"] for name in (flow["from"], flow["to"])]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        flows = {
            (numbers[each["from"]], numbers[each["to"]]): Flow(
                **{one.name: each[one.name] for one in fields(Flow)}
            )
            for each in content["flows"]
        }
        ports = {
            numbers[each["host"]]: Port(**{one.name: each[one.name] for one in fields(Port)})
            for each in content["ports"] if each["host"] in numbers
        }  # fmt: skip
        return cls({number: name for name, number in numbers.items()}, flows, ports)

    def slowest(self) -> int | None:
        """Return the host whose link carries the fewest bytes per second; None without links."""
        known = [machine for machine in self.hosts if self.carries(machine) > 0]
        return min(known, key=self.carries, default=None)

    def sentence(self, machine: int) -> str:
        """Return a sentence on the speed of a host's link."""
        return (
            f"{self.hosts[machine]} sends {_rate(self.sends(machine))}, receives "
            f"{_rate(self.receives(machine))}, latency {1e3 * self.latency_s(machine):.2g} ms"
        )

    def latency_s(self, machine: int) -> float:
        """Return the latency in seconds of the fastest small message to or from a host.

        The result is infinity if no message was measured.
        """
        return self._nearest_s.get(machine, float("inf"))

    def remark(self, machine: int) -> str:
        """Return a sentence on a host whose link is slower than all other links; else "".

        The sentence states the direction, both rates, and the reason if it is known.
        """
        rate = self.carries(machine)
        usual = self._usual_of_others(rate)
        if not 0 < rate < _SLOWER * usual:
            return ""
        sends, receives = self.sends(machine), self.receives(machine)
        way = ""
        if sends < _SLOWER * receives:
            way = f" when it sends ({_rate(receives)} when it receives)"
        elif receives < _SLOWER * sends:
            way = f" when it receives ({_rate(sends)} when it sends)"
        return (
            f"{self.hosts[machine]}'s link carries {_rate(rate)}{way}, the others' {_rate(usual)}"
            f"{self._why(machine)}"
        )

    def _usual_of_others(self, rate: float) -> float:
        """Return the median speed of the links of all other hosts.

        Args:
            rate: speed of the host that is left out.
        """
        others = len(self._carried) - 1
        middle = others // 2
        after = bisect_left(self._carried, rate) <= middle  # without the host, one place later
        return self._carried[middle + after] if others > 0 else 0.0

    def _why(self, machine: int) -> str:
        if (port := self.ports.get(machine)) is None:
            return ""
        why = ""
        if port.mbit and 8e-6 * self.carries(machine) > _FULL * port.mbit:
            why = f"; its port {port.interface} has {port.mbit:,.0f} Mbit/s"
        if port.faster:
            why += f"; its faster port {port.faster} is not on the subnet that all hosts share"
        return why

    def _busy(self, machine: int) -> str:
        """Return a sentence on other programs that use a host's link; empty if none does."""
        port = self.ports.get(machine)
        if port is None:
            return ""
        ways = {"send": port.others_send, "receive": port.others_receive}
        least = max(_TRAFFIC, _BUSY * self.carries(machine))
        rates = [f"{way} {_rate(rate)}" for way, rate in ways.items() if rate > least]
        return f"other programs on {self.hosts[machine]} {' and '.join(rates)}" if rates else ""

    def in_use(self) -> bool:
        """Return True if other programs used a link while it was measured.

        Such a link may carry more at another time.
        """
        return any(map(self._busy, self.hosts))

    def _switch(self) -> str:
        """Return a warning if all links are far slower than their nominal rate; else ""."""
        says = [port.mbit for port in self.ports.values() if port.mbit]
        if len(self.hosts) < 2 or len(says) < len(self.hosts):
            return ""
        most = max(map(self.carries, self.hosts))
        # One connection that a Python program feeds carries about 10 Gbit/s, whatever the port.
        least = min(*says, _ONE_FEEDS)
        if not 0 < 8e-6 * most < _FULL * least or self.in_use():
            return ""
        return (
            f"no link carries more than {_rate(most)}, though all ports have {min(says):,.0f} "
            "Mbit/s or more, so a switch or a limit between the hosts is slower"
        )

    def remarks(self) -> list[str]:
        """Return a sentence for each slow or failing link."""
        result = [*map(self.remark, self.hosts), *map(self._busy, self.hosts), self._switch()]
        return [*filter(None, result), *self.broken()]

    def broken(self) -> list[str]:
        """Return a sentence for each link that passes no data.

        The caller raises an error. Otherwise the ranks at both ends of such a link would wait for
        each other for ever.
        """
        return [
            f"from {self.hosts[sender]} to {self.hosts[receiver]}: {flow.error}"
            for (sender, receiver), flow in sorted(self.flows.items()) if flow.error
        ]  # fmt: skip


def _rate(bytes_per_s: float) -> str:
    """Return a rate as a text with a unit, such as ``117 MB/s``."""
    return (
        f"{bytes_per_s / 1e6:,.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.3g} GB/s"
    )


def rounds(machines: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return a schedule of pairs in which each host meets each other host once.

    The schedule is a list of rounds, as in a round-robin tournament. A host is in one pair per
    round at most. An odd number n of hosts needs n rounds, and an even number needs n - 1.
    """
    circle = [*machines, *([None] if len(machines) % 2 else [])]
    table = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        table.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return table

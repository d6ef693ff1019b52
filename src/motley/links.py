"""What the links between machines carry, as measured, and what follows from it. Pure.

The measurement is in motley.traffic.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_FAR = 0.5  # of the second slowest: to send less over it is worth a detour
_SLOWER = 0.7  # of the others' median: a link that is worth a word


@dataclass(frozen=True)
class Flow:
    """What one machine sends to another.

    Attributes:
        bytes_per_s: that arrive, of one TCP connection; 0.0 where large packets do not.
        latency_s: half of a small message's round trip.
        error: why nothing is known; empty if all is well.
    """

    bytes_per_s: float
    latency_s: float
    error: str = ""


@dataclass(frozen=True)
class Links:
    """All flows between machines that have met.

    Attributes:
        hosts: names of the machines, each known by its lowest rank.
        flows: by who sends and who receives.
    """

    hosts: Mapping[int, str]
    flows: Mapping[tuple[int, int], Flow]

    @cached_property
    def _most(self) -> dict[tuple[str, int], float]:
        most: dict[tuple[str, int], float] = {}
        for (sender, receiver), flow in self.flows.items():
            for key in (("sends", sender), ("receives", receiver)):
                most[key] = max(most.get(key, 0.0), flow.bytes_per_s)
        return most

    def sends(self, machine: int) -> float:
        """Bytes a second that a machine sends to whom it sends most to."""
        return self._most.get(("sends", machine), 0.0)

    def receives(self, machine: int) -> float:
        """Bytes a second that a machine receives from whom it receives most from."""
        return self._most.get(("receives", machine), 0.0)

    def carries(self, machine: int) -> float:
        """Bytes a second of a machine's slower way: what a ring gets from it."""
        return min(self.sends(machine), self.receives(machine))

    def ring_s(self, size: float, ranks: int, among: Collection[int] | None = None) -> float:
        """Seconds that a ring all-reduce needs at least: 2 (n - 1) / n of it over each link.

        Args:
            size: of what is summed, bytes. ranks: n, in the ring.
            among: the machines of these ranks; None: all.
        """
        machines = set(self.hosts if among is None else among)
        if len(machines) < 2:
            return 0.0
        slowest = min(map(self.carries, machines))
        return 2 * (ranks - 1) / ranks * size / slowest if slowest > 0 else float("inf")

    def leaf(self) -> int | None:
        """The one machine whose link is far slower than all others'; None if there is none."""
        if len(self.hosts) < 3:
            return None
        slowest, second, *_ = sorted(self.hosts, key=self.carries)
        return slowest if 0 < self.carries(slowest) < _FAR * self.carries(second) else None

    def as_json(self) -> list[dict[str, Any]]:
        """For run.json: one entry a flow."""
        return [
            {"from": self.hosts[a], "to": self.hosts[b], "bytes_per_s": flow.bytes_per_s,
             "latency_s": flow.latency_s, "error": flow.error}
            for (a, b), flow in sorted(self.flows.items())
        ]  # fmt: skip

    def remark(self, machine: int) -> str:
        """That a machine's link is slower than the others', which way, and by how much; or
        nothing."""
        rate = self.carries(machine)
        others = sorted(self.carries(other) for other in self.hosts if other != machine)
        usual = others[len(others) // 2] if others else 0.0
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
        )

    def remarks(self) -> list[str]:
        """What a person should know, a sentence each: who is slow, and what fails."""
        failed = [
            f"from {self.hosts[sender]} to {self.hosts[receiver]}: {flow.error}"
            for (sender, receiver), flow in sorted(self.flows.items()) if flow.error
        ]  # fmt: skip
        return [*filter(None, map(self.remark, self.hosts)), *failed]


def _rate(bytes_per_s: float) -> str:
    """For a person."""
    return (
        f"{bytes_per_s / 1e6:,.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.3g} GB/s"
    )


def rounds(machines: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Who meets whom, so that in each round everyone meets one other at most, and all meet.

    A round-robin tournament: as many rounds as machines, or one less if they are even.
    """
    circle = [*machines, *([None] if len(machines) % 2 else [])]
    table = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        table.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return table

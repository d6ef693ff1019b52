"""A lab's network: a bridge in a namespace of its own, one cable to each host.

Nothing connects that bridge to the machine's network, so traffic stays inside.
"""

import json
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from lab_change import Changes
from lab_profile import LabHost

# What a cable may queue: about what a cheap switch holds, in ms of its rate; and at least so many
# bytes, for packets are no smaller where links are, and of few that wait TCP loses too many.
LIMIT_S = 60.0  # for a program that only answers
QUEUE_MS, QUEUE_BYTES = 20, 64 * 1024


class Switch:
    """The lab's switch.

    Args:
        pid: a process in the switch's network namespace.
    """

    def __init__(self, change: Changes, pid: object) -> None:
        self._change = change
        self._pid = pid

    def _ip(self, pid: object, lines: Iterable[str]) -> None:
        self._change.run(
            "nsenter", "-t", pid, "-n", "ip", "-batch", "-", stdin="\n".join(lines) + "\n"
        )

    def _shape(self, pid: object, interface: str, mbit: float) -> None:
        # TBF needs a burst of 32 kB or so, and of 1 ms of its rate where timers are coarse.
        burst = max(32_768, round(mbit * 125))
        queue_ms = max(QUEUE_MS, round(QUEUE_BYTES * 8 / mbit / 1000))
        self._change.run(
            "nsenter", "-t", pid, "-n", "tc", "qdisc", "replace", "dev", interface, "root",
            "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", burst, "latency", f"{queue_ms}ms",
        )  # fmt: skip

    def power_on(self) -> None:
        """Make the bridge."""
        self._ip(self._pid, ["link add name sw0 type bridge", "link set dev sw0 up"])

    def plug(self, port: int, host: LabHost, pid: object) -> None:
        """Give the host of process ``pid`` its interfaces, and its cable to port ``port``."""
        bridges = [decoy for decoy in host.decoys if decoy.interface != "link"]
        names = dict.fromkeys(decoy.interface for decoy in bridges)
        # First made, first listed: decoys come before the interface that is to be found.
        self._ip(pid, [
            "link set dev lo up",
            *(f"link add name {name} type bridge" for name in names),
            *(f"address add {decoy.address} dev {decoy.interface}" for decoy in bridges),
            *(f"link set dev {decoy.interface} up" for decoy in bridges),
        ])  # fmt: skip
        # A card keeps its address over a reboot; with a new one, what the others remember
        # would lead nowhere for a while.
        card = f"02:4d:6f:74:{port // 256:02x}:{port % 256:02x}"
        self._ip(self._pid, [
            f"link add name p{port} type veth peer name {host.interface} "
            f"address {card} netns {pid}",
            f"link set dev p{port} master sw0 up",
        ])  # fmt: skip
        real = host.interface
        others = [decoy.address for decoy in host.decoys if decoy.interface == "link"]
        self._ip(pid, [
            *(f"address add {address} dev {real}" for address in [*others, host.address]),
            f"link set dev {real} up",
        ])  # fmt: skip
        self._shape(pid, real, host.up_mbit)
        self._shape(self._pid, f"p{port}", host.down_mbit)
        self._announce(port, host, pid, card)

    def _announce(self, port: int, host: LabHost, pid: object, card: str) -> None:
        """Tell the others that the host is there, as a machine does when it boots.

        Without, those that looked for it while it was off go on for a second or two in the
        belief that it is unreachable.
        """
        deadline = time.monotonic() + 3
        while not self._change.dry_run and time.monotonic() < deadline:
            ports = {link["ifname"]: link["operstate"] for link in self._links()}
            if ports.get(f"p{port}") == "UP":
                break
            time.sleep(0.02)
        self._change.run(
            "nsenter", "-t", pid, "-n", "sysctl", "-q", "-w", "net.ipv4.conf.all.arp_notify=1"
        )
        # To set an address, the same too, is what makes the kernel print_summary it.
        self._ip(pid, [f"link set dev {host.interface} address {card}"])

    def unplug(self, port: int) -> None:
        """Take the cable away, with the host's interface at its end."""
        self._ip(self._pid, [f"link delete dev p{port}"])

    def set_cable(self, port: int, up: bool) -> None:
        """Put in or pull the cable at a port: nothing passes, either way."""
        self._ip(self._pid, [f"link set dev p{port} {'up' if up else 'down'}"])

    def plugged(self) -> dict[int, bool]:
        """Return the ports, each with True if its cable is in."""
        return {
            int(link["ifname"][1:]): "UP" in link["flags"]
            for link in self._links()
            if link["ifname"][1:].isdigit() and link["ifname"].startswith("p")
        }

    def _links(self) -> list[dict[str, Any]]:
        listed = subprocess.run(
            ["nsenter", "-t", str(self._pid), "-n", "ip", "-json", "link"],
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
        ).stdout  # fmt: skip
        links: list[dict[str, Any]] = json.loads(listed or "[]")
        return links

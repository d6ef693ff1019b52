"""Facts about this machine: CPU, memory, network interfaces and GPUs, read without torch.

python -m motley.cluster.facts                  # print this machine's facts as JSON
"""

import contextlib
import ipaddress
import json
import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from motley.cluster.gpus import MIB, DeviceFacts, read_devices, read_driver


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of a machine, for example ("eno1", "129.97.92.168", 24)."""

    name: str
    address: str
    prefix: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        """Subnet of the address."""
        return ipaddress.IPv4Network((self.address, self.prefix), strict=False)


@dataclass(frozen=True)
class NodeFacts:
    """The hardware and the addresses of one machine.

    Attributes:
        host: name of the machine.
        cpu: model name of the CPU.
        cores: number of CPU cores that this process may use.
        memory_total_mib: memory of the machine, MiB.
        driver: version of the NVIDIA driver; None without a driver.
        devices: GPUs of the machine.
        interfaces: IPv4 addresses of the machine.
    """

    host: str
    cpu: str
    cores: int
    memory_total_mib: float
    driver: str | None
    devices: tuple[DeviceFacts, ...]
    interfaces: tuple[Interface, ...]


def read_node() -> NodeFacts:
    """Read all facts of this machine. The call takes half a second on a machine with a GPU."""
    return NodeFacts(
        host=socket.gethostname(),
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_total_mib=psutil.virtual_memory().total / MIB,
        driver=read_driver(),
        devices=read_devices(),
        interfaces=read_interfaces(),
    )


def node_to_json(node: NodeFacts) -> str:
    """Return the facts as one line of JSON, for :func:`node_from_json` on another machine."""
    return json.dumps(asdict(node))


def node_from_json(text: str) -> NodeFacts:
    """Return the facts in a line of :func:`node_to_json`.

    Raises:
        ValueError, KeyError or TypeError: :func:`node_to_json` has not made the text.
    """
    fields = json.loads(text)
    devices = []
    for device in fields.pop("devices"):
        capability = device.pop("capability")
        devices.append(
            DeviceFacts(
                **{**device, "others": tuple(device["others"])},
                capability=(int(capability[0]), int(capability[1])) if capability else None,
            )
        )
    interfaces = tuple(Interface(**each) for each in fields.pop("interfaces"))
    return NodeFacts(**fields, devices=tuple(devices), interfaces=interfaces)


def cpu_name() -> str:
    """Return the model name of the CPU, as Linux prints it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def read_interfaces() -> tuple[Interface, ...]:
    """Return the IPv4 addresses of all network interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return tuple(
        Interface(name, entry.address, ipaddress.IPv4Network(f"0.0.0.0/{entry.netmask}").prefixlen)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for entry in addresses
        if entry.family == socket.AF_INET and entry.netmask and name in up
    )


def main() -> None:
    """Print the facts about this machine as one line of JSON."""
    print(node_to_json(read_node()))


if __name__ == "__main__":
    main()

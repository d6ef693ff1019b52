"""What a lab's hosts are: reads a profile, a TOML file such as lab/tesla.toml."""

import ipaddress
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from motley.cluster.hostfile import check_name
from motley.errors import MotleyError
from motley.text import did_you_mean

LIMIT_S = 60.0  # for a program that only answers
SHELLS = ("bash", "tcsh", "zsh")
PYTHONS = ("normal", "no-pip", "no-ensurepip", "none")
HOMES = ("shared", "private")
_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True)
class Decoy:
    """An address that is no way to reach the host, listed before the one that is.

    Attributes:
        interface: an interface of its own, or ``link``: the host's real one.
        address: with its prefix, ``172.17.0.1/16``.
    """

    interface: str
    address: str


@dataclass(frozen=True)
class LabHost:
    """One host; lab/tesla.toml says what each key means.

    Attributes:
        address: with its prefix, ``10.97.92.168/24``.
        up_mbit, down_mbit: rate of its link in Mbit/s, headers included.
        cpus: processors it may use at most, 0.01 or more; None: no limit.
        memory_mib, shm_mib: memory in all, and size of /dev/shm, in MiB; None: no limit.
    """

    name: str
    address: str
    interface: str = "eth0"
    up_mbit: float = 200
    down_mbit: float = 200
    cpus: float | None = None
    memory_mib: int | None = None
    shm_mib: int | None = None
    shell: str = "bash"
    python: str = "normal"
    home: str = "shared"
    decoys: tuple[Decoy, ...] = ()

    @property
    def ip(self) -> str:
        """Its address without the prefix."""
        return self.address.partition("/")[0]


_KEYS = tuple(field.name for field in fields(LabHost))
_CHOICES = {"shell": SHELLS, "python": PYTHONS, "home": HOMES}
_POSITIVE = ("up_mbit", "down_mbit", "cpus", "memory_mib", "shm_mib")


def read_profile(path: Path) -> tuple[LabHost, ...]:
    """Read a profile; the first host is the head.

    Raises:
        MotleyError: on an unknown key, a value that cannot be, or addresses that clash.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(file.name for file in Path(__file__).parent.glob("*.toml"))
        raise MotleyError(
            f"the profile {path} does not exist{did_you_mean(path.name, known)}"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MotleyError(f"profile {path} cannot be read: {error}") from None
    try:
        return _hosts(content)
    except MotleyError as error:
        raise MotleyError(f"profile {path}: {error}") from None


def check_free(hosts: Iterable[LabHost]) -> None:
    """Raise MotleyError if this machine itself has an address that a host is to have."""
    listed = subprocess.run(
        ["ip", "-json", "address"], capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout
    taken = {at["local"]: link["ifname"] for link in json.loads(listed) for at in link["addr_info"]}
    for host in hosts:
        if host.ip in taken:
            raise MotleyError(
                f"{host.name} would have the address {host.ip}, which this machine uses already "
                f"({taken[host.ip]}); give the hosts another subnet in the profile"
            )


def _hosts(content: Mapping[str, Any]) -> tuple[LabHost, ...]:
    _check_keys(content, ("defaults", "host"), "")
    defaults = content.get("defaults", {})
    tables = content.get("host", [])
    if not isinstance(defaults, dict) or not isinstance(tables, list) or not tables:
        raise MotleyError(
            "the profile has no host; add a table [[host]] with a name and an address"
        )
    _check_keys(defaults, _KEYS, " in [defaults]")
    hosts = tuple(_host({**defaults, **table}, number) for number, table in enumerate(tables, 1))
    _check_clashes(hosts)
    return hosts


def _host(table: dict[str, Any], number: int) -> LabHost:
    where = f"host {table.get('name', f'number {number}')}"
    _check_keys(table, _KEYS, f" in {where}")
    for key in ("name", "address"):
        if not isinstance(table.get(key), str):
            raise MotleyError(f'{where} has no {key}; add {key} = "..."')
    check_name(table["name"])
    for key, choices in _CHOICES.items():
        if table.get(key, choices[0]) not in choices:
            raise MotleyError(
                f"{where}: {key} is {table[key]!r}; choose one of {', '.join(choices)}"
            )
    for key in _POSITIVE:
        value = table.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value < 1e7:
            raise MotleyError(f"{where}: {key} is {value!r}; write a number of 0.01 or more")
    table["decoys"] = tuple(_decoy(words, where, number) for words in table.get("decoys", ()))
    table["address"] = _address(table["address"], where)
    _check_interface(table.get("interface", "eth0"), where)
    return LabHost(**table)


def _decoy(words: Any, where: str, number: int) -> Decoy:
    """``"docker0 172.17.0.1/16"``; ``{n}`` is the host's number, from 1."""
    parts = words.replace("{n}", str(number)).split() if isinstance(words, str) else []
    if len(parts) != 2:
        raise MotleyError(
            f'{where}: a decoy is written as "interface address/prefix", and this is {words!r}'
        )
    _check_interface(parts[0], where)
    return Decoy(parts[0], _address(parts[1], where))


def _address(text: str, where: str) -> str:
    try:
        if "/" not in text:
            raise ValueError("it has no prefix")
        return str(ipaddress.IPv4Interface(text))
    except ValueError as error:
        raise MotleyError(
            f"{where}: {text!r} is not an address ({error}); write it like 10.97.92.168/24"
        ) from None


def _check_interface(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _INTERFACE.fullmatch(name) or name == "lo":
        raise MotleyError(
            f"{where}: {name!r} is not a valid name of an interface; use 1 to 15 letters and digits"
        )


def _check_keys(table: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(table, dict):
        raise MotleyError(f"{table!r}{where} has to be a table of keys")
    for key in table:
        if key not in known:
            raise MotleyError(f"unknown key {key!r}{where}{did_you_mean(key, known)}")


def _check_clashes(hosts: Sequence[LabHost]) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    subnet = ipaddress.IPv4Interface(hosts[0].address).network
    for host in hosts:
        if host.name in names:
            raise MotleyError(f"two hosts have the name {host.name}; rename one of them")
        names.add(host.name)
        if host.ip in owners:
            raise MotleyError(f"{owners[host.ip]} and {host.name} both have the address {host.ip}")
        owners[host.ip] = host.name
        if ipaddress.IPv4Interface(host.address).network != subnet:
            raise MotleyError(
                f"{host.name} ({host.address}) is not in {subnet}, the subnet of {hosts[0].name}"
            )
        if any(decoy.interface == host.interface for decoy in host.decoys):
            raise MotleyError(
                f'{host.name}: write a decoy on the host\'s real interface as "link ..."'
            )
    for host in hosts:
        for decoy in host.decoys:
            owner = owners.get(decoy.address.partition("/")[0])
            if owner is not None:
                raise MotleyError(
                    f"the decoy {decoy.address} of {host.name} is the address of {owner}"
                )

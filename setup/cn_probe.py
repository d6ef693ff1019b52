"""What a host is: asked by one sh script, so that it works with no Python there.

    with token_file() as token:
        reports = probe_all(["ecetesla0", "ecetesla1"], token=token)

An idle host answers within 1 to 2 s.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cn import ROOT, VENV

from motley.facts import DeviceFacts, Interface, NodeFacts, node_from_json
from motley.remote import Finished, HostTrouble, Remote, connect, on_all

_SCRIPT = Path(__file__).with_suffix(".sh")
_SMI = re.compile(r"(\d+), *(\S+), *([^,]+), *([^,]+), *([^,]+), *([^,]*), *(.+)")


@dataclass(frozen=True)
class Python:
    """A Python on a host's PATH.

    Attributes:
        version: for example (3, 11, 2).
        able: it can make environments: has venv and ensurepip.
    """

    path: str
    version: tuple[int, ...]
    able: bool


@dataclass(frozen=True)
class HostReport:
    """What a host is. Whatever it did not tell is None or empty.

    Attributes:
        host: its name in hosts.txt. node: its own name for itself.
        here: it is this machine.
        shell: the user's login shell, its path. chatter: what that prints at login.
        local_account: the user is in its /etc/passwd, not in a directory (LDAP, NIS).
        clock_offset_s: how far its clock is ahead of this machine's, seconds, and
            clock_doubt_s: by how much that may be wrong: half the time it took to ask.
        machine: its architecture, for example "x86_64". libc: for example "glibc 2.36".
        cores: that its processes may use.
        memory_*_mib, shm_*_mib, disk_*_mib: MiB; shm is /dev/shm, disk is where the
            repository is or would be. disk_free_inodes: files that can still be made there.
        place: the folder that was asked about: the repository, or its nearest parent.
        place_write, home_write: "yes", or why no file can be written there, in the system's
            words: "No space left on device", "Permission denied", "Read-only file system".
        repository: there is one at the path that it has here.
        same_folder: that is the very folder that this machine has; None where nobody knows.
        pythons: those >= 3.11, best first. newest_python: of any version.
        environment: version of the Python of the environment, which is at the path that it
            has here; None without one. broken: why what is there cannot be used.
        packages: name to version of all that is installed in it.
        driver, devices: of NVIDIA. gpu_error: what nvidia-smi complains about.
        interfaces: IPv4 addresses. speeds: Mbit/s by interface, where known.
        infiniband: there is an adapter.
        next_ssh: it logs in to the host that it was asked to, unasked.
    """

    host: str
    here: bool
    node: str | None = None
    user: str | None = None
    shell: str | None = None
    chatter: str = ""
    local_account: bool | None = None
    clock_offset_s: float | None = None
    clock_doubt_s: float | None = None
    machine: str | None = None
    libc: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_total_mib: float | None = None
    memory_free_mib: float | None = None
    shm_total_mib: float | None = None
    shm_free_mib: float | None = None
    disk_total_mib: float | None = None
    disk_free_mib: float | None = None
    disk_free_inodes: int | None = None
    place: str | None = None
    place_write: str | None = None
    home: str | None = None
    home_write: str | None = None
    repository: bool = False
    same_folder: bool | None = None
    pythons: tuple[Python, ...] = ()
    newest_python: Python | None = None
    environment: str | None = None
    broken: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    gpu_error: str | None = None
    interfaces: tuple[Interface, ...] = ()
    speeds: Mapping[str, int] = field(default_factory=dict)
    infiniband: bool = False
    next_ssh: bool | None = None


@contextlib.contextmanager
def token_file() -> Iterator[str]:
    """An empty file in the repository while we ask: who sees it has the same folder.

    Yields its name; "" where this user may not write.
    """
    path = ROOT / f".motley-token-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        yield ""
        return
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def probe(remote: Remote, *, token: str = "", next_host: str = "", limit: float = 8) -> HostReport:
    """Ask a host what it is.

    Args:
        token: from :func:`token_file`.
        next_host: a host that it tries to ssh to.
        limit: seconds that it may take.

    Raises:
        HostTrouble: it took longer, or hung up.
    """
    clock: list[float] = []

    def tell(line: str) -> None:
        if not clock:  # the first line is the clock's
            clock.append(time.time())

    asked = time.time()
    name = f".motley-probe-{secrets.token_hex(8)}"
    done = remote.run(
        _SCRIPT.read_text(), ROOT, VENV, token, name, next_host, limit=limit, tell=tell
    )
    if not clock:
        raise HostTrouble(
            "no sh there",
            f"{remote.host} lets us in but runs no script ({_last(done) or 'it says nothing'})",
            f"see what its login shell does: ssh -- {remote.host} echo hello",
        )
    return parse(done.output, remote.host, remote.here, done.chatter, asked, clock[0], token)


def probe_all(
    hosts: Iterable[str],
    *,
    token: str = "",
    ring: bool = False,
    limit: float = 9.5,
    seen: Callable[[str], None] = lambda host: None,
) -> dict[str, HostReport | HostTrouble]:
    """Connect to all hosts at once and probe them.

    Args:
        ring: each also tries to ssh to the next.
        limit: seconds for all of them together.
        seen: called, from several threads, with each host that is done.
    """
    names = list(hosts)
    after = dict(zip(names, names[1:] + names[:1], strict=True)) if ring and len(names) > 1 else {}
    end = time.monotonic() + limit

    def one(host: str) -> HostReport:
        try:
            with connect(host) as remote:
                left = end - time.monotonic() - 0.3
                return probe(remote, token=token, next_host=after.get(host, ""), limit=left)
        finally:
            seen(host)

    return on_all(names, one, limit)


def parse(
    text: str, host: str, here: bool, chatter: str, asked: float, told: float, token: str
) -> HostReport:
    """Make a report of what cn_probe.sh printed.

    Args:
        asked, told: when it was sent and when its first line came, by this machine's clock.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key, []).append(value)
    only = {key: values[-1] for key, values in found.items()}
    node = _facts(only.get("facts"))
    pythons = [python for each in found.get("python", []) if (python := _python(each))]
    clock = _number(only.get("clock"))
    driver, devices = (node.driver, node.devices) if node else _smi(found)
    return HostReport(
        host=host,
        here=here,
        node=only.get("node"),
        user=only.get("user"),
        shell=only.get("shell"),
        chatter=chatter,
        local_account={"local": True, "directory": False}.get(only.get("account", "")),
        clock_offset_s=None if clock is None else clock - (asked + told) / 2,
        clock_doubt_s=None if clock is None else (told - asked) / 2,
        machine=only.get("machine"),
        libc=only.get("libc"),
        cpu=only.get("cpu"),
        cores=_whole(only.get("cores")),
        memory_total_mib=_mib(only.get("memory_total")),
        memory_free_mib=_mib(only.get("memory_free")),
        shm_total_mib=_mib(only.get("shm_total")),
        shm_free_mib=_mib(only.get("shm_free")),
        disk_total_mib=_mib(only.get("disk_total")),
        disk_free_mib=_mib(only.get("disk_free")),
        disk_free_inodes=_whole(only.get("disk_inodes")),
        place=only.get("place"),
        place_write=_writing(only.get("place_write")),
        home=only.get("home"),
        home_write=_writing(only.get("home_write")),
        repository="tree" in only,
        same_folder=True if here else _same(only, token),
        pythons=tuple(python for python in pythons if python.version >= (3, 11) and python.able),
        newest_python=max(pythons, key=lambda python: python.version, default=None),
        environment=only.get("environment"),
        broken=only.get("broken"),
        packages=json.loads(only.get("packages", "{}")),
        driver=driver,
        devices=devices,
        gpu_error=only.get("gpu_error"),
        interfaces=_interfaces(found) or (node.interfaces if node else ()),
        speeds=_speeds(found),
        infiniband="infiniband" in only,
        next_ssh={"yes": True, "no": False}.get(only.get("next", "")),
    )


def _last(done: Finished) -> str:
    lines = (done.chatter + done.output + done.errors).strip().splitlines()
    return lines[-1] if lines else ""


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _mib(kib: str | None) -> float | None:
    number = _number(kib)
    return None if number is None else number / 1024


def _writing(text: str | None) -> str | None:
    return text if text is None else text.removeprefix("no: ")


def _facts(text: str | None) -> NodeFacts | None:
    try:
        return node_from_json(text or "")
    except (ValueError, KeyError, TypeError):  # another version's
        return None


def _python(line: str) -> Python | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)*)\S* (able|unable) (.+?) *", line)
    if match is None:
        return None
    version = tuple(int(part) for part in match[1].split("."))
    return Python(match[3], version, match[2] == "able")


def _interfaces(found: Mapping[str, list[str]]) -> tuple[Interface, ...]:
    words = [line.split() for line in found.get("interface", [])]
    return tuple(Interface(name, at, int(prefix or 32)) for name, at, prefix in words)


def _speeds(found: Mapping[str, list[str]]) -> dict[str, int]:
    return {name: int(speed) for name, speed in (line.split() for line in found.get("speed", []))}


def _same(only: Mapping[str, str], token: str) -> bool | None:
    """Whether a host's repository is the head's folder."""
    if "tree" not in only:
        return False
    if token:
        return "token" in only
    return None


def _smi(found: Mapping[str, list[str]]) -> tuple[str | None, tuple[DeviceFacts, ...]]:
    """Driver and GPUs from nvidia-smi's table."""
    driver, devices = None, []
    for line in found.get("gpu", []):
        match = _SMI.fullmatch(line)
        if match is None:
            continue
        index, uuid, driver, total, used, capability, name = match.groups()
        major, dot, minor = capability.strip().partition(".")
        devices.append(
            DeviceFacts(
                index=int(index), uuid=uuid, name=name,
                capability=(int(major), int(minor)) if dot else None,
                memory_total_mib=_number(total), memory_used_mib=_number(used),
                load=None, temperature_c=None, power_w=None, others_mib=None, others=(),
            )
        )  # fmt: skip
    return driver, tuple(devices)

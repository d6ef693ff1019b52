"""The report of a host on its own state.

An sh script makes the report, so no Python is needed on the host.

    with token_file() as token:
        reports = probe_all(["ecetesla0", "ecetesla1"], token=token)

An idle host answers within 1 to 2 s.
"""

import contextlib
import functools
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from motley.cluster.facts import Interface, node_from_json
from motley.cluster.gpus import DeviceFacts
from motley.cluster.login import Finished
from motley.cluster.ssh import Remote, connect
from motley.errors import HostTrouble
from motley.provision.setup_command import PLACE, SOURCES, VENV, ask_all, printable

_SMI = re.compile(r"(\d+), *(\S+), *([^,]+), *([^,]+), *([^,]+), *([^,]*), *(.+)")


@dataclass(frozen=True)
class Python:
    """A Python interpreter on a host's PATH.

    Attributes:
        path: path of the program.
        version: version of the interpreter, for example (3, 11, 2).
        able: True if this Python can make virtual environments, because it has venv and ensurepip.
    """

    path: str
    version: tuple[int, ...]
    able: bool


@dataclass(frozen=True)
class HostReport:
    """The state of a host. A value that the host did not report is None or empty.

    Attributes:
        host: name of the host in hosts.txt.
        here: True if the host is this machine.
        node: host name that the host itself reports.
        user: name of the user's account on the host.
        shell: path of the user's login shell.
        chatter: text that the shell prints at login.
        local_account: True if the user is in the host's /etc/passwd, and not only in a directory
            service (LDAP, NIS).
        clock_offset_s: seconds by which the host's clock is ahead of this machine's.
        clock_doubt_s: largest error of the offset in seconds: half of the time from the question to
            the answer.
        machine: CPU architecture, for example "x86_64".
        libc: C library, for example "glibc 2.36".
        cpu: model name of the CPU.
        cores: number of cores that this user's processes may use.
        memory_total_mib: memory of the host, MiB.
        memory_free_mib: free memory, MiB.
        shm_total_mib: size of /dev/shm, MiB.
        shm_free_mib: free part of /dev/shm, MiB.
        disk_total_mib: size of the disk at ``place``, MiB.
        disk_free_mib: free part of that disk, MiB.
        disk_free_inodes: number of files that can still be made on that disk.
        place: folder whose disk was examined: the repository, or its nearest existing parent.
        place_write: "yes", or the system's error when a file was written to ``place``, such as "No
            space left on device", "Permission denied", "Read-only file system".
        home: path of the user's home.
        home_write: "yes", or the system's error when a file was written to the home.
        temporary: path of the temporary folder.
        temporary_write: "yes", or the system's error when a file was written to the temporary
            folder.
        repository: True if the host has a repository at the path of this machine's repository. If
            this machine has no repository, the path is that of the current folder.
        same_folder: True if this machine and the host see one folder on a shared disk at that path.
            None if unknown.
        pythons: Pythons >= 3.11 on the host that can make virtual environments, best first.
        newest_python: newest Python on the host, of any version.
        environment: Python version of the host's environment, at the path of this machine's
            environment. None: the host has no environment.
        broken: reason why that environment cannot be used. None: the environment works, or does not
            exist.
        packages: versions of the packages in that environment, by name.
        driver: version of the NVIDIA driver.
        devices: GPUs of the host.
        gpu_error: error message of nvidia-smi.
        interfaces: IPv4 addresses of the host.
        speeds: nominal rate of each interface in Mbit/s, where known.
        infiniband: True if the host has an InfiniBand adapter.
        next_ssh: True if the host can log in to the next host of hosts.txt without a password. None
            if not tested.
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
    temporary: str = ""
    temporary_write: str | None = None
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


@dataclass(frozen=True)
class HostQuery:
    """The question to a host, with the facts that are needed to interpret the answer.

    Attributes:
        host: name of the host in hosts.txt.
        here: True if the host is this machine.
        sent: time at which the question was sent, by this machine's clock.
        answered: time at which the first line of the answer came, by this machine's clock.
        token: name of a new file in this machine's folder. A host that sees the file shares this
            folder. Empty if the file could not be made.
        tree: the line ``tree`` that cn_probe.sh prints on this machine. Without a token, this line
            is compared with the host's line.
    """

    host: str
    here: bool
    sent: float
    answered: float
    token: str
    tree: str


def parse(text: str, chatter: str, asked: HostQuery) -> HostReport:
    """Parse the output of cn_probe.sh, and return the report of the host.

    Args:
        text: output of cn_probe.sh.
        chatter: output of the login shell before it.
        asked: the question.

    Raises:
        ValueError, KeyError or TypeError: cn_probe.sh cannot have printed the text.
    """
    result: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            result.setdefault(key, []).append(printable(value))
    only = {key: values[-1] for key, values in result.items()}
    node = node_from_json(only["facts"]) if "facts" in only else None
    pythons = [_python(each) for each in result.get("python", [])]
    clock = _number(only.get("clock"))
    driver, devices = (node.driver, node.devices) if node else _smi(result, only.get("uid"))
    return HostReport(
        host=asked.host,
        here=asked.here,
        node=only.get("node"),
        user=only.get("user"),
        shell=only.get("shell"),
        chatter="\n".join(map(printable, chatter.splitlines())),
        local_account={"local": True, "directory": False}.get(only.get("account", "")),
        clock_offset_s=None if clock is None else clock - (asked.sent + asked.answered) / 2,
        clock_doubt_s=None if clock is None else (asked.answered - asked.sent) / 2,
        machine=only.get("machine"),
        libc=only.get("libc"),
        cpu=only.get("cpu"),
        cores=_read_count(only.get("cores")),
        memory_total_mib=_mib(only.get("memory_total")),
        memory_free_mib=_mib(only.get("memory_free")),
        shm_total_mib=_mib(only.get("shm_total")),
        shm_free_mib=_mib(only.get("shm_free")),
        disk_total_mib=_mib(only.get("disk_total")),
        disk_free_mib=_mib(only.get("disk_free")),
        disk_free_inodes=_read_count(only.get("disk_inodes")),
        place=only.get("place"),
        place_write=only.get("place_write"),
        home=only.get("home"),
        home_write=only.get("home_write"),
        temporary=only.get("temporary", ""),
        temporary_write=only.get("temporary_write"),
        repository="tree" in only,
        same_folder=True if asked.here else _is_same_folder(only, asked),
        pythons=tuple(each for each in pythons if each.version >= (3, 11) and each.able),
        newest_python=max(pythons, key=lambda python: python.version, default=None),
        environment=only.get("environment"),
        broken=only.get("broken"),
        packages=json.loads(only.get("packages", "{}")),
        driver=driver,
        devices=devices,
        gpu_error=only.get("gpu_error"),
        interfaces=_interfaces(result) or (node.interfaces if node else ()),
        speeds={name: int(speed) for name, speed in map(str.split, result.get("speed", []))},
        infiniband="infiniband" in only,
        next_ssh={"yes": True, "no": False}.get(only.get("next", "")),
    )


def _number(text: str | None) -> float | None:
    """Return a number; None if the text is no number, such as "[N/A]"."""
    try:
        return float(text or "")
    except ValueError:
        return None


def _read_count(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _mib(kib: str | None) -> float | None:
    number = _number(kib)
    return None if number is None else number / 1024


def _python(line: str) -> Python:
    version, able, path = line.split(" ", 2)
    numbers = re.match(r"\d+(\.\d+)*", version)  # 3.14.0rc1
    return Python(
        path.strip(),
        tuple(int(part) for part in numbers[0].split(".")) if numbers else (),
        able == "able",
    )


def _interfaces(found: Mapping[str, list[str]]) -> tuple[Interface, ...]:
    words = [line.split() for line in found.get("interface", [])]
    return tuple(Interface(each[0], each[1], int((each[2:] or ["32"])[0])) for each in words)


def _is_same_folder(only: Mapping[str, str], asked: HostQuery) -> bool | None:
    """Return True if a host and this machine share the repository's folder; None if unknown."""
    if "tree" not in only or asked.token:
        return "token" in only
    theirs, ours = only["tree"].split(), asked.tree.split()
    if theirs == ours:
        return True
    # A network disk has a different device number on every machine.
    return None if theirs[1:] == ours[1:] else False


def _smi(
    found: Mapping[str, list[str]], uid: str | None
) -> tuple[str | None, tuple[DeviceFacts, ...]]:
    """Return the driver's version and the GPUs from nvidia-smi's table."""
    driver, devices = None, []
    held = [line.split(" ", 3) for line in found.get("held", [])]
    for match in map(_SMI.fullmatch, found.get("gpu", [])):
        if match is None:
            continue
        index, uuid, driver, total, used, capability, name = match.groups()
        major, dot, minor = capability.strip().partition(".")
        others = [(mib, owner) for gpu, mib, who, owner in held if gpu == uuid and who != uid]
        devices.append(
            DeviceFacts(
                index=int(index), uuid=uuid, name=name,
                capability=(int(major), int(minor)) if dot else None,
                memory_total_mib=_number(total), memory_used_mib=_number(used),
                load=None, temperature_c=None, power_w=None,
                others_mib=sum(_number(mib) or 0 for mib, _ in others),
                others=tuple(sorted({owner.strip() for _, owner in others})),
            )
        )  # fmt: skip
    return driver, tuple(devices)


__all__ = ["HostReport", "Python", "probe", "probe_all", "token_file"]

_SCRIPT = Path(__file__).with_name("cn_probe.sh")


@contextlib.contextmanager
def token_file() -> Iterator[str]:
    """Create an empty file in the folder of the runs while the context is open, and yield its name.

    A host that sees the file shares this folder. The name is empty if this user may not write to
    the folder.
    """
    path = PLACE / f".motley-token-{secrets.token_hex(8)}"
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
    """Return the report of a host.

    Args:
        remote: connection to the host.
        token: token from :func:`token_file`.
        next_host: another host, to which the host tries to ssh.
        limit: seconds in which the host has to answer.

    Raises:
        HostTrouble: the host took longer than ``limit``, closed the connection, or runs no script.
    """
    first: list[float] = []

    def on_line(line: str) -> None:
        if not first:  # the clock's line
            first.append(time.time())

    sent = time.time()
    name = f".motley-probe-{secrets.token_hex(8)}"
    done = remote.run(
        _SCRIPT.read_text(),
        PLACE,
        VENV,
        token,
        name,
        next_host,
        SOURCES,
        limit=limit,
        on_line=on_line,
    )
    try:
        requested = HostQuery(remote.host, remote.here, sent, first[0], token, _own_tree())
        return parse(done.output, done.chatter, requested)
    except (LookupError, ValueError, TypeError):
        raise HostTrouble(
            "no shell",
            f"{remote.host} accepts the login, but does not run the script of this command "
            f"({_last(done)})",
            f"see what its login shell does: ssh -- {remote.host} echo hello",
        ) from None


def _last(done: Finished) -> str:
    """Return the last line that a failed script has printed."""
    lines = (done.chatter + done.output + done.errors).strip().splitlines()
    return printable(lines[-1]) if lines else "it says nothing"


@functools.cache
def _own_tree() -> str:
    """Return the line ``tree`` of cn_probe.sh for this machine: device, inode, hash of setup/."""
    setup, status = PLACE / "setup", PLACE.stat()
    content = hashlib.sha256()
    for path in [*sorted(setup.glob("*.sh")), *sorted(setup.glob("*.py"))]:
        content.update(path.read_bytes())
    return f"{status.st_dev} {status.st_ino} {content.hexdigest()}"


def probe_all(
    hosts: Iterable[str],
    *,
    token: str = "",
    ring: bool = False,
    limit: float = 9.5,
) -> dict[str, HostReport | HostTrouble]:
    """Ask all hosts at once for their reports. Return the report or the fault of each host.

    Args:
        hosts: names of the hosts.
        token: token from :func:`token_file`.
        ring: True: each host also tries to log in by ssh to the next host in ``hosts``.
        limit: seconds for all hosts together.
    """
    names = list(hosts)
    after = dict(zip(names, names[1:] + names[:1], strict=True)) if ring and len(names) > 1 else {}
    end = time.monotonic() + limit

    def one(host: str) -> HostReport:
        with connect(host) as remote:
            remaining = end - time.monotonic() - 0.3
            return probe(remote, token=token, next_host=after.get(host, ""), limit=remaining)

    return ask_all(names, one, limit)

"""How ssh reaches a host: its address, user, port and host key."""

import ipaddress
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.cluster.account import expand_home
from motley.cluster.facts import read_interfaces
from motley.cluster.processes import ChildTimeoutError, run_child
from motley.errors import HostTrouble

ASK_SSH_S = 10.0  # for ssh to print its configuration, which may run commands
_FIX = "see what ~/.ssh/config runs for it (Match exec)"
CONNECT_S = 4.0  # to accept a connection; then as long again to speak, and to log in


@dataclass(frozen=True)
class HostKey:
    """A host's public key, as a line of known_hosts has it after the name."""

    kind: str
    base64: str
    fingerprint: str


class UnknownHostKey(HostTrouble):
    """The host's key is in no known_hosts file.

    Attributes:
        key: what the host showed: type, base64, and its SHA256 fingerprint.
    """

    def __init__(self, host: str, key: HostKey) -> None:
        super().__init__(
            "host key unknown",
            f"{host} shows the key {key.fingerprint}, which ~/.ssh/known_hosts does not hold",
            "compare and pin it with: bash setup/passwordless_ssh.sh",
        )
        self.key = key


@dataclass(frozen=True)
class Login:
    """How ssh would log in to a host, as ``ssh -G`` prints it.

    Attributes:
        known_as: the host's name in known_hosts.
        keys: private keys that are there.
        known_files: files of host keys. uses_agent: keys of an agent are tried too.
    """

    address: str
    port: int
    user: str
    known_as: str
    keys: tuple[str, ...]
    known_files: tuple[Path, ...]
    uses_agent: bool = True


def read_login(host: str) -> Login:
    """Ask ssh itself how it would log in to a host: it alone reads its configuration right
    (Include, Match).

    Raises:
        HostTrouble: ssh refuses its configuration, or reaches the host through another one.
    """
    settings = _ask_ssh(host)
    for jump in ("proxyjump", "proxycommand"):
        if settings.get(jump, ["none"])[-1] != "none":
            raise HostTrouble(
                "behind a jump",
                f"~/.ssh/config reaches {host} through {settings[jump][-1]}",
                "name hosts that this machine and each other reach directly, as MPI must",
            )
    address, port = settings["hostname"][0], int(settings["port"][0])
    plain = address if port == 22 else f"[{address}]:{port}"
    keys = [expand_home(key) for key in settings.get("identityfile", [])]
    files = " ".join(settings.get("globalknownhostsfile", []) + settings["userknownhostsfile"])
    return Login(
        address=address,
        port=port,
        user=settings["user"][0],
        known_as=settings.get("hostkeyalias", [plain])[0],
        keys=tuple(str(key) for key in keys if key.exists()),
        known_files=tuple(map(expand_home, files.split())),
        uses_agent="none" not in settings.get("identityagent", [])
        and settings.get("identitiesonly") != ["yes"],
    )


def _ask_ssh(host: str) -> dict[str, list[str]]:
    """Return the values of each setting that ``ssh -G`` prints for a host."""
    try:
        done = run_child(["ssh", "-G", "--", host], ASK_SSH_S, _FIX)
    except FileNotFoundError:
        raise HostTrouble(
            "no ssh",
            f"{host} is reached by ssh, and this machine has no program ssh",
            "have its administrator install OpenSSH's client (openssh-client)",
        ) from None
    except ChildTimeoutError:
        raise HostTrouble(
            "ssh configuration", f"ssh -G {host} did not end within {ASK_SSH_S:.0f} s", _FIX
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split("\n")[0].split())
        raise HostTrouble(
            "ssh configuration",
            f"ssh refuses its own configuration for {host} ({said})",
            f"correct it, and see what ssh reads with: ssh -G {host}",
        )
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    return settings


def is_here(host: str) -> bool:
    """Whether a name of hosts.txt is this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {interface.address for interface in read_interfaces()}
    return bool(addresses & own) or all(ipaddress.ip_address(at).is_loopback for at in addresses)


def open_socket(host: str, login: Login) -> socket.socket:
    """Connect to its port; raises HostTrouble after CONNECT_S at most."""
    plain = (login.address, login.port) == (host, 22)
    where = host if plain else f"{host} ({login.address}, port {login.port})"
    try:
        return socket.create_connection((login.address, login.port), CONNECT_S)
    except socket.gaierror:
        raise HostTrouble(
            "name unknown",
            f"no address is known for {host}",
            "correct its name in hosts.txt, or write the address instead",
        ) from None
    except ConnectionRefusedError:
        raise HostTrouble(
            "ssh refused",
            f"{where} is up but accepts no ssh connection",
            "start sshd there, or ask who administers it",
        ) from None
    except OSError as error:  # TimeoutError among them
        why = "" if isinstance(error, TimeoutError) else f" ({error.strerror})"
        raise HostTrouble(
            "no answer",
            f"{where} did not answer within {CONNECT_S:.0f} s{why}",
            "see whether it is on, its cable and its firewall",
        ) from None


def changed(host: str, login: Login, shown: str, held: str) -> HostTrouble:
    """Its key, of fingerprint ``shown``, is not the one that known_hosts holds."""
    again = f"ssh-keygen -R {shlex.quote(login.known_as)}, then bash setup/passwordless_ssh.sh"
    return HostTrouble(
        "host key changed",
        f"{host} shows the key {shown}, but ~/.ssh/known_hosts holds {held}: it was reinstalled, "
        "or somebody answers in its place",
        f"ask who administers it; if that is right: {again}",
    )


def refused(
    host: str, login: Login, by_password: bool, takes: Sequence[str] | None = None
) -> HostTrouble:
    """It lets us in neither by key nor by password.

    Args:
        takes: the ways in which it lets people in, where it told.
    """
    if not by_password:
        return HostTrouble(
            "key refused",
            f"{host} takes none of our keys for {login.user} (none of them is in its "
            "~/.ssh/authorized_keys, or others may write to its ~, ~/.ssh or that file)",
            "put both right with: bash setup/passwordless_ssh.sh",
        )
    if takes and not {"password", "keyboard-interactive"} & set(takes):
        return HostTrouble(
            "takes no password",
            f"{host} lets nobody in by password (only by {', '.join(takes)})",
            "ask who administers it to put your public key into your ~/.ssh/authorized_keys there",
        )
    return HostTrouble(
        "password refused",
        f"{host} does not take this password for {login.user}",
        "see that the account is there, not locked, and has this password",
    )

"""How ssh reaches a host: its address, user, port and host key."""

import ipaddress
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from motley.cluster.facts import read_interfaces
from motley.errors import HostTrouble

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
    """How ssh would log in to a host, from ``~/.ssh/config``.

    Attributes:
        known_as: the host's name in known_hosts.
        keys: private keys named there; none means ssh's default ones.
    """

    address: str
    port: int
    user: str
    known_as: str
    keys: tuple[str, ...]


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

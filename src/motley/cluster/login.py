"""The settings of an ssh login, and the run of an sh script on a host with any login shell.

A login is the address, user, port and host key with which ssh connects to the host.
"""

import contextlib
import ipaddress
import math
import secrets
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from motley.cluster.account import expand_home
from motley.cluster.facts import read_interfaces
from motley.cluster.processes import ChildTimeoutError, run_child
from motley.errors import HostTrouble

ASK_SSH_S = 10.0  # seconds in which ssh has to print its configuration, which may run commands
_FIX = "see which commands ~/.ssh/config runs for this host (Match exec)"
CONNECT_S = 4.0  # seconds for a connection, then for the banner, then for the login


@dataclass(frozen=True)
class HostKey:
    """A host's public key. The fields are those of a line of known_hosts."""

    kind: str
    base64: str
    fingerprint: str


class UnknownHostKey(HostTrouble):
    """An error because no known_hosts file has the host's key.

    Attributes:
        key: the key that the host presented.
    """

    def __init__(self, host: str, key: HostKey) -> None:
        super().__init__(
            "host key unknown",
            f"{host} has the key {key.fingerprint}, which ~/.ssh/known_hosts does not list",
            "compare the key and add it with: bash setup/passwordless_ssh.sh",
        )
        self.key = key


@dataclass(frozen=True)
class Login:
    """The settings for an ssh login to a host, as ``ssh -G`` prints them.

    Attributes:
        address: address of the host.
        port: port on which the host's sshd listens.
        user: name of the user's account on the host.
        known_as: the host's name in known_hosts.
        keys: paths of the private keys that exist.
        known_files: paths of files with known host keys.
        uses_agent: True if keys of an agent are tried too.
    """

    address: str
    port: int
    user: str
    known_as: str
    keys: tuple[str, ...]
    known_files: tuple[Path, ...]
    uses_agent: bool = True


def read_login(host: str) -> Login:
    """Return the login that ssh would use for a host, read from ``ssh -G``.

    ssh itself is run, because only ssh interprets its configuration completely (Include, Match).

    Raises:
        HostTrouble: ssh reports an error in its configuration, or would connect through another
            host.
    """
    settings = _ask_ssh(host)
    for jump in ("proxyjump", "proxycommand"):
        if settings.get(jump, ["none"])[-1] != "none":
            raise HostTrouble(
                "behind a jump",
                f"~/.ssh/config reaches {host} through another host, {settings[jump][-1]}",
                "MPI needs direct connections, so name hosts that this machine and all other "
                "hosts reach directly",
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
            "ask its administrator to install the OpenSSH client (openssh-client)",
        ) from None
    except ChildTimeoutError:
        raise HostTrouble(
            "ssh configuration", f"ssh -G {host} did not end within {ASK_SSH_S:.0f} s", _FIX
        ) from None
    if done.returncode != 0:
        text = " ".join(done.stderr.split("\n")[0].split())
        raise HostTrouble(
            "ssh configuration",
            f"ssh refuses its own configuration for {host} ({text})",
            f"correct the configuration, and see the result with: ssh -G {host}",
        )
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    return settings


def is_here(host: str) -> bool:
    """Return True if a host name of hosts.txt names this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {interface.address for interface in read_interfaces()}
    return bool(addresses & own) or all(ipaddress.ip_address(at).is_loopback for at in addresses)


def open_socket(host: str, login: Login) -> socket.socket:
    """Connect to the host's ssh port, and return the socket.

    Raises:
        HostTrouble: the host does not answer within CONNECT_S, or refuses.
    """
    plain = (login.address, login.port) == (host, 22)
    where = host if plain else f"{host} ({login.address}, port {login.port})"
    try:
        return socket.create_connection((login.address, login.port), CONNECT_S)
    except socket.gaierror:
        raise HostTrouble(
            "name unknown",
            f"no address is known for {host}",
            "correct the name in hosts.txt, or write the address instead",
        ) from None
    except ConnectionRefusedError:
        raise HostTrouble(
            "ssh refused",
            f"{where} is up but accepts no ssh connection",
            "start sshd on it, or ask its administrator",
        ) from None
    except OSError as error:  # TimeoutError among them
        why = "" if isinstance(error, TimeoutError) else f" ({error.strerror})"
        raise HostTrouble(
            "no answer",
            f"{where} did not answer within {CONNECT_S:.0f} s{why}",
            "check that it is on, and check its cable and its firewall",
        ) from None


def changed(host: str, login: Login, shown: str, held: str) -> HostTrouble:
    """Return the error for a host whose key differs from its key in known_hosts.

    Args:
        host: name of the host.
        login: the login.
        shown: fingerprint of the host's key.
        held: fingerprint of the host's key in known_hosts.
    """
    again = f"ssh-keygen -R {shlex.quote(login.known_as)}, then bash setup/passwordless_ssh.sh"
    return HostTrouble(
        "host key changed",
        f"{host} has the key {shown}, but ~/.ssh/known_hosts lists {held}: the host was "
        "reinstalled, or another machine answers at its address",
        f"ask its administrator which key is right. If the new one is: {again}",
    )


def refused(
    host: str, login: Login, by_password: bool, takes: Sequence[str] | None = None
) -> HostTrouble:
    """Return the error for a host that refuses this user's key or password.

    Args:
        host: name of the host.
        login: the login.
        by_password: True if the host refused a password. False: the host refused a key.
        takes: login methods that the host offers; None: unknown.
    """
    if not by_password:
        return HostTrouble(
            "key refused",
            f"{host} accepts no ssh key of yours for the account {login.user}: its "
            "~/.ssh/authorized_keys has none of them, or other users may write to that file, to "
            "~/.ssh or to the home folder",
            "correct both with: bash setup/passwordless_ssh.sh",
        )
    if takes and not {"password", "keyboard-interactive"} & set(takes):
        return HostTrouble(
            "no password login",
            f"{host} accepts no password, only {', '.join(takes)}",
            "ask its administrator to add your public key to your ~/.ssh/authorized_keys on it",
        )
    return HostTrouble(
        "password refused",
        f"{host} refuses this password for the account {login.user}",
        "check that the account exists, is not locked, and has this password",
    )


_CHUNK = 2**15
_LINGER_S = 2.0  # seconds to wait for the remaining output after an exit status

# Every kind of login shell (tcsh, fish) can run this line. The line reads the length of a script
# and the script from stdin, and runs it. The script need not be quoted for the login shell, and no
# other text is ever in an argv.
_LOADER = 'exec sh -c \'read -r n; s=$(dd bs=1 count="$n" 2>/dev/null); eval "$s"\' motley'

# Variables of another Python, which a .bashrc may set; the scripts start that of the environment.
_OTHER_PYTHON = "PYTHONHOME PYTHONPATH PYTHONOPTIMIZE PYTHONSAFEPATH"

# Ends all processes of a script when the script ends, or when its caller does.
_TIED = """exec 3<&0 </dev/null
{ trap '' HUP; cat <&3 >/dev/null; kill -TERM 0; } >/dev/null 2>&1 &
exec 3<&-
trap 'status=$?; trap "" TERM; kill -TERM 0; exit $status' EXIT
"""


class TooLong(Exception):  # noqa: N818 - not a fault of ours
    """An error because a script did not end within its time limit."""


@dataclass(frozen=True)
class Finished:
    """The result of a script that has ended.

    Attributes:
        code: exit status.
        output: text on stdout.
        errors: text on stderr.
        chatter: text that the login shell printed before the script; normally empty.
        begun: True if the script started. False: the login shell failed before.
    """

    code: int
    output: str
    errors: str
    chatter: str
    begun: bool = True


class Readable(Protocol):
    """A protocol: an object with the method ``read`` of a file, whose bytes are sent to a host."""

    def read(self, most: int, /) -> bytes:
        """Return the next bytes, at most ``most``; empty at the end."""


class Talk:
    """A script that runs on a host, with its input and the output that has arrived.

    The script first prints a mark. Output before the mark comes from the login shell.

    Args:
        script: the script.
        words: arguments of the script.
        payload: stdin of the script; None: empty.
        on_line: function that is called with each complete line of stdout.

    Attributes:
        tied: True if stdin stays open while the script runs. All processes of the script then end
            when the script ends or when stdin closes.
        sent: bytes to write to stdin.
        errors: bytes received from stderr.
    """

    def __init__(
        self,
        script: str,
        words: tuple[object, ...],
        payload: bytes | Readable | None,
        on_line: Callable[[str], None] | None,
    ) -> None:
        mark = f"motley-{secrets.token_hex(8)}"
        self.tied = payload is None
        clean = f"export LC_ALL=C\nunset {_OTHER_PYTHON}\n"
        start = f"{clean}set -- {shlex.join(map(str, words))}\necho {mark}\n"
        sent = (start + (_TIED if self.tied else "") + script).encode()
        head = b"%d\n" % len(sent) + sent
        self.sent: Iterator[bytes]
        if payload is None or isinstance(payload, bytes):
            self.sent = iter([head + (payload or b"")])
        else:
            self.sent = chain([head], iter(lambda: payload.read(_CHUNK), b""))
        self.errors = bytearray()
        self._mark = mark.encode() + b"\n"
        self._on_line = on_line
        self._data = bytearray()
        self._told: int | None = None  # offset of the first byte of a line not passed on yet

    def take(self, data: bytes) -> None:
        """Append received bytes of stdout and pass on each complete line."""
        self._data += data
        if self._on_line is None:
            return
        if self._told is None:
            at = self._data.find(self._mark)
            if at < 0:
                return
            self._told = at + len(self._mark)
        while (end := self._data.find(b"\n", self._told)) >= 0:
            self._on_line(self._data[self._told : end].decode(errors="replace").rstrip("\r"))
            self._told = end + 1

    def finish(self, code: int) -> Finished:
        """Return the exit code and all output."""
        before, mark, after = bytes(self._data).partition(self._mark)
        output, errors, chatter = (
            each.decode(errors="replace") for each in (after, self.errors, before)
        )
        return Finished(code, output, errors, chatter, begun=bool(mark))


def run_here(talk: Talk, limit: float, through: Sequence[str] = ()) -> int:
    """Run the script on this machine and return its exit status.

    Args:
        talk: the script, its input and its output.
        limit: largest duration, in seconds.
        through: command-line words of a program that runs the script elsewhere, such as srun.

    Raises:
        TooLong: after ``limit`` seconds.
    """
    job = subprocess.Popen(
        [*through, "sh", "-c", _LOADER], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdin and job.stdout and job.stderr
    stdin = job.stdin

    def write() -> None:
        with contextlib.suppress(OSError):  # the script may end before it has read all
            for piece in talk.sent:
                stdin.write(piece)
                stdin.flush()
            if not talk.tied:
                stdin.close()

    def read(stream: Any, take: Callable[[bytes], None]) -> None:
        while data := stream.read1(_CHUNK):
            take(data)

    threads = [
        threading.Thread(target=write, daemon=True),
        threading.Thread(target=read, args=(job.stdout, talk.take), daemon=True),
        threading.Thread(target=read, args=(job.stderr, talk.errors.extend), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        code = job.wait(limit)
    except subprocess.TimeoutExpired:
        raise TooLong from None
    finally:
        with contextlib.suppress(OSError):
            stdin.close()  # this ends a tied script
        if job.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(2)
            job.kill()
            job.wait()
    for thread in threads[1:]:
        thread.join(2)
    return code


def run_over(channel: Any, alive: Callable[[], bool], talk: Talk, limit: float) -> int:
    """Run the script at the other end of an open ssh session and return its exit status.

    Args:
        channel: the session, an object like paramiko's channel.
        alive: function that returns True while the connection lives.
        talk: the script, its input and its output.
        limit: largest duration, in seconds.

    Raises:
        TooLong: after ``limit`` seconds.
        EOFError: the connection is lost.
    """
    deadline, lingers = time.monotonic() + limit, math.inf
    channel.exec_command(_LOADER)
    remaining = memoryview(next(talk.sent))
    while True:
        # sshd may send the exit status before the last output. The end of the output is not
        # signalled while a process that the script has left behind could still write.
        idle, has_status = True, channel.exit_status_ready()
        if has_status:
            lingers = min(lingers, time.monotonic() + _LINGER_S)
        # Checked before the streams are read, so that all output before the end is read.
        ended = has_status and (
            channel.eof_received or channel.closed or time.monotonic() > lingers
        )
        if remaining and not has_status and channel.send_ready():
            remaining = remaining[channel.send(remaining[:_CHUNK].tobytes()) :]
            remaining = remaining or memoryview(next(talk.sent, b""))
            if not remaining and not talk.tied:
                channel.shutdown_write()
            idle = False
        while channel.recv_ready():
            talk.take(channel.recv(_CHUNK))
            idle = False
        while channel.recv_stderr_ready():
            talk.errors += channel.recv_stderr(_CHUNK)
            idle = False
        if ended and idle:
            return int(channel.recv_exit_status())
        if not has_status and not alive():
            raise EOFError
        if time.monotonic() > deadline:
            raise TooLong
        if idle:
            time.sleep(0.01)

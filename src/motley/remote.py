"""ssh to many hosts at once. The only user of paramiko.

Asks as OpenSSH (and so ``mpirun``) would: ``~/.ssh/config``, ``~/.ssh/known_hosts``, the
agent and the user's keys. A host whose key is unknown or changed is never talked to. This
machine itself, however hosts.txt names it, needs no ssh.
"""

import base64
import contextlib
import getpass
import ipaddress
import logging
import secrets
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

import paramiko

from motley.errors import MotleyError
from motley.facts import read_interfaces

T = TypeVar("T")

CONNECT_S = 4.0  # to accept a connection; then as long again to speak, and to log in
_CHUNK = 2**15

# What a login shell of any kind (tcsh, fish) is asked to run: read a script of so many bytes
# from stdin, and run that. So nothing is quoted for the login shell, and nothing but this
# line is ever in an argv.
_LOADER = 'exec sh -c \'read -r n; s=$(dd bs=1 count="$n" 2>/dev/null); eval "$s"\' motley'

# Ends all that a script started when it ends, or when whoever asked is gone.
_TIED = """exec 3<&0 </dev/null
{ trap '' HUP; cat <&3 >/dev/null; kill -TERM 0; } >/dev/null 2>&1 &
exec 3<&-
trap 'status=$?; trap "" TERM; kill -TERM 0; exit $status' EXIT
"""

# It prints each authentication failure, which are reported here as what they mean.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class HostTrouble(MotleyError):  # noqa: N818 - a finding, as often as a fault
    """One host cannot take part.

    Attributes:
        kind: in one to three words, for a table: ``no answer``, ``host key changed``.
    """

    def __init__(self, kind: str, found: str, fix: str) -> None:
        super().__init__(f"{found}; {fix}")
        self.kind = kind


class UnknownHostKey(HostTrouble):
    """The host's key is in no known_hosts file.

    Attributes:
        key: what the host showed: type, base64, and its SHA256 fingerprint.
    """

    def __init__(self, host: str, key: "HostKey") -> None:
        super().__init__(
            "host key unknown",
            f"{host} shows the key {key.fingerprint}, which ~/.ssh/known_hosts does not hold",
            "compare and pin it with: bash setup/passwordless_ssh.sh",
        )
        self.key = key


@dataclass(frozen=True)
class HostKey:
    """A host's public key, as a line of known_hosts has it after the name."""

    kind: str
    base64: str
    fingerprint: str

    @property
    def public(self) -> paramiko.PKey:
        """As paramiko has it."""
        return paramiko.PKey.from_type_string(self.kind, base64.b64decode(self.base64))


@dataclass(frozen=True)
class Finished:
    """A script that ended.

    Attributes:
        output, errors: what it printed to stdout and stderr.
        chatter: what the login shell had printed before it; normally nothing.
    """

    code: int
    output: str
    errors: str
    chatter: str


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


def login_of(host: str) -> Login:
    """Read ``~/.ssh/config`` for a host."""
    path = Path("~/.ssh/config").expanduser()
    found: dict[str, Any] = {}
    if path.exists():
        try:
            found = dict(paramiko.SSHConfig.from_path(str(path)).lookup(host))
        except (OSError, paramiko.ConfigParseError, ImportError) as error:
            raise MotleyError(f"{path} cannot be read: {error}") from None
    for jump in ("proxyjump", "proxycommand"):
        if found.get(jump, "none") != "none":
            raise HostTrouble(
                "behind a jump",
                f"~/.ssh/config reaches {host} through {found[jump]}",
                "name hosts that this machine and each other reach directly, as MPI must",
            )
    address, port = str(found.get("hostname", host)), int(found.get("port", 22))
    return Login(
        address=address,
        port=port,
        user=str(found.get("user", getpass.getuser())),
        known_as=address if port == 22 else f"[{address}]:{port}",
        keys=tuple(key for key in found.get("identityfile", ()) if Path(key).exists()),
    )


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


class Remote:
    """A host that let us in, by ssh or because we are on it. A context manager.

    Attributes:
        here: it is this machine.
        key: its host key, as it proved it; None for this machine.
    """

    def __init__(self, host: str, client: paramiko.SSHClient | None) -> None:
        self.host = host
        self.here = client is None
        self._client = client
        transport = client.get_transport() if client else None
        self.key = _as_key(transport.get_remote_server_key()) if transport else None

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        if self._client:
            self._client.close()

    def run(
        self,
        script: str,
        *words: object,
        payload: bytes | IO[bytes] | None = None,
        limit: float = 30,
        tell: Callable[[str], None] | None = None,
    ) -> Finished:
        """Run a POSIX sh script there, whatever the login shell is.

        Args:
            script: sees ``words`` as ``$1 $2 ...``. Without a payload its stdin is empty, and
                all that it starts ends with it, or with our connection.
            payload: its stdin, or a file to read that from. Secrets go here: nothing else
                stays out of a process list.
            limit: seconds that it may take in all.
            tell: called with each line of stdout as it comes.

        Raises:
            HostTrouble: it took longer, or the connection broke.
        """
        mark = f"motley-{secrets.token_hex(8)}"
        start = f"export LC_ALL=C\nset -- {shlex.join(map(str, words))}\necho {mark}\n"
        text = (start + ("" if payload is not None else _TIED) + script).encode()
        script_part = b"%d\n" % len(text) + text
        if payload is None or isinstance(payload, bytes):
            sent: Iterator[bytes] = iter([script_part + (payload or b"")])
        else:
            sent = chain([script_part], iter(lambda: payload.read(_CHUNK), b""))
        lines = _Lines(mark, tell)
        if self._client is None:
            code, errors = self._run_here(sent, payload is None, limit, lines)
        else:
            code, errors = self._run_there(sent, payload is None, limit, lines)
        chatter, output = lines.finish()
        return Finished(code, output, errors.decode(errors="replace"), chatter)

    def _run_here(
        self, sent: Iterator[bytes], tied: bool, limit: float, lines: "_Lines"
    ) -> tuple[int, bytes]:
        job = subprocess.Popen(
            ["sh", "-c", _LOADER], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert job.stdin and job.stdout and job.stderr
        stdin = job.stdin
        errors = bytearray()

        def write() -> None:
            with contextlib.suppress(OSError):  # it may end without reading all
                for piece in sent:
                    stdin.write(piece)
                    stdin.flush()
                if not tied:
                    stdin.close()

        def read(stream: Any, take: Callable[[bytes], None]) -> None:
            while data := stream.read1(_CHUNK):
                take(data)

        threads = [
            threading.Thread(target=write, daemon=True),
            threading.Thread(target=read, args=(job.stdout, lines.take), daemon=True),
            threading.Thread(target=read, args=(job.stderr, errors.extend), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            raise self._too_long(limit) from None
        finally:
            with contextlib.suppress(OSError):
                job.stdin.close()  # to a tied script: end
            if job.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(2)
                job.kill()
                job.wait()
        for thread in threads[1:]:
            thread.join(2)
        return code, bytes(errors)

    def _run_there(
        self, sent: Iterator[bytes], tied: bool, limit: float, lines: "_Lines"
    ) -> tuple[int, bytes]:
        assert self._client is not None
        deadline = time.monotonic() + limit
        errors = bytearray()
        try:
            transport = self._client.get_transport()
            if transport is None:
                raise EOFError
            channel = transport.open_session(timeout=limit)
            channel.exec_command(_LOADER)
            left = memoryview(next(sent))
            while True:
                # Asked before the streams: what came before the status is then read.
                idle, ended = True, channel.exit_status_ready()
                if left and not ended and channel.send_ready():
                    left = left[channel.send(left[:_CHUNK].tobytes()) :]
                    left = left or memoryview(next(sent, b""))
                    if not left and not tied:
                        channel.shutdown_write()
                    idle = False
                while channel.recv_ready():
                    lines.take(channel.recv(_CHUNK))
                    idle = False
                while channel.recv_stderr_ready():
                    errors += channel.recv_stderr(_CHUNK)
                    idle = False
                if ended and idle:
                    break
                if not transport.is_active():
                    raise EOFError
                if time.monotonic() > deadline:
                    raise self._too_long(limit)
                if idle:
                    time.sleep(0.01)
            code = channel.recv_exit_status()
            channel.close()
        except (EOFError, OSError, paramiko.SSHException):
            raise HostTrouble(
                "connection lost",
                f"{self.host} hung up while it worked",
                "see whether it is up, then run the same command again",
            ) from None
        return code, bytes(errors)

    def _too_long(self, limit: float) -> HostTrouble:
        self.close()
        return HostTrouble(
            "took too long",
            f"{self.host} did not finish within {limit:.0f} s",
            "see what keeps it busy, then run the same command again",
        )


class _Lines:
    """Output as it comes: what precedes the mark is the login shell's, the rest the script's."""

    def __init__(self, mark: str, tell: Callable[[str], None] | None) -> None:
        self._mark = mark.encode() + b"\n"
        self._tell = tell
        self._data = bytearray()
        self._told: int | None = None  # offset of the first byte of a line not told yet

    def take(self, data: bytes) -> None:
        """More output."""
        self._data += data
        if self._tell is None:
            return
        if self._told is None:
            at = self._data.find(self._mark)
            if at < 0:
                return
            self._told = at + len(self._mark)
        while (end := self._data.find(b"\n", self._told)) >= 0:
            self._tell(self._data[self._told : end].decode(errors="replace").rstrip("\r"))
            self._told = end + 1

    def finish(self) -> tuple[str, str]:
        """Chatter and output."""
        before, mark, after = bytes(self._data).partition(self._mark)
        return before.decode(errors="replace"), after.decode(errors="replace") if mark else ""


def connect(
    host: str, password: str | None = None, key: Path | None = None, known: HostKey | None = None
) -> Remote:
    """Log in to a host.

    Args:
        password: use this alone, no key.
        key: use this private key alone. Without either: all that ssh would try unasked.
        known: take this for its host key if no known_hosts file holds one.

    Raises:
        HostTrouble: named as what it is, with the fix.
    """
    if is_here(host):
        return Remote(host, None)
    login = login_of(host)
    client = paramiko.SSHClient()
    for path in (Path("/etc/ssh/ssh_known_hosts"), Path("~/.ssh/known_hosts").expanduser()):
        with contextlib.suppress(OSError):
            for name, held in _read_known(path):
                client.get_host_keys().add(name, held.get_name(), held)
    if known is not None and login.known_as not in client.get_host_keys():
        client.get_host_keys().add(login.known_as, known.kind, known.public)
    client.set_missing_host_key_policy(_Refuse())
    ways: dict[str, Any] = {"allow_agent": False, "look_for_keys": False}
    if key is not None:
        ways["key_filename"] = [str(key)]
    elif password is not None:
        ways["password"] = password
    else:
        ways = {"key_filename": list(login.keys), "look_for_keys": not login.keys}
    try:
        with _named_troubles(host, login, password is not None):
            client.connect(
                login.address, login.port, login.user, sock=_open_socket(host, login),
                timeout=CONNECT_S, banner_timeout=CONNECT_S, auth_timeout=CONNECT_S, **ways,
            )  # fmt: skip
    except BaseException as error:
        transport = client.get_transport()
        client.close()
        spoke = transport is not None and transport.initial_kex_done
        if spoke and isinstance(error, HostTrouble) and error.kind == "silent":
            # Then an agent offered more keys than it tries, and it hung up.
            raise _refused(host, login, password is not None, error) from None
        raise
    transport = client.get_transport()
    if transport:
        transport.set_keepalive(5)
    return Remote(host, client)


def known_keys(host: str, path: Path) -> tuple[HostKey, ...]:
    """A host's keys in a known_hosts file; OSError if that cannot be read."""
    file, name = paramiko.HostKeys(), login_of(host).known_as
    for listed, key in _read_known(path):
        file.add(listed, key.get_name(), key)
    found = file.lookup(name)
    return tuple(_as_key(key) for key in found.values()) if found else ()


def _read_known(path: Path) -> Iterator[tuple[str, paramiko.PKey]]:
    """Names and keys of a known_hosts file; paramiko's own reader fails at the first bad line."""
    for line in path.read_text(errors="replace").splitlines():
        if not line.strip() or line.lstrip().startswith(("#", "@")):
            continue
        try:
            entry = paramiko.hostkeys.HostKeyEntry.from_line(line.strip())
        except Exception:  # whatever a line made it stumble over, ssh skips that line too
            continue
        if entry is not None and entry.key is not None:
            for name in entry.hostnames or ():
                yield name, entry.key


def host_key(host: str, kinds: Iterable[str] = ()) -> HostKey:
    """The key that a host shows, without logging in; raises HostTrouble.

    Args:
        kinds: which of its keys are asked for first, for example ``ssh-rsa``.
    """
    login = login_of(host)
    sock = _open_socket(host, login)
    transport = paramiko.Transport(sock)
    transport.banner_timeout = CONNECT_S
    first = {*kinds, *(("rsa-sha2-512", "rsa-sha2-256") if "ssh-rsa" in kinds else ())}
    options = transport.get_security_options()
    options.key_types = tuple(sorted(options.key_types, key=lambda kind: kind not in first))
    try:
        with _named_troubles(host, login):
            transport.start_client(timeout=CONNECT_S)
            return _as_key(transport.get_remote_server_key())
    finally:
        transport.close()
        sock.close()


def _open_socket(host: str, login: Login) -> socket.socket:
    where = f"{host} ({login.address}, port {login.port})"
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


@contextlib.contextmanager
def _named_troubles(host: str, login: Login, by_password: bool = False) -> Any:
    """Turn paramiko's errors into what they mean to the user."""
    try:
        yield
    except paramiko.BadHostKeyException as error:
        raise HostTrouble(
            "host key changed",
            f"{host} shows the key {error.key.fingerprint}, but ~/.ssh/known_hosts holds "
            f"{error.expected_key.fingerprint}: it was reinstalled, or somebody answers in its "
            "place",
            f"ask who administers it; if that is right: ssh-keygen -R {shlex.quote(login.known_as)}"
            ", then bash setup/passwordless_ssh.sh",
        ) from None
    except paramiko.PasswordRequiredException:
        raise HostTrouble(
            "key locked",
            f"the key for {host} has a passphrase and no agent holds it",
            "ssh-add it, or make a key of its own with: bash setup/passwordless_ssh.sh",
        ) from None
    except paramiko.AuthenticationException as error:
        raise _refused(host, login, by_password, error) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if str(error) == "No authentication methods available":  # there is no key at all
            raise _refused(host, login, by_password, error) from None
        # "No existing session" is paramiko's word for a handshake that took too long.
        slow = "banner" in str(error) or "No existing session" in str(error)
        if slow or isinstance(error, TimeoutError):
            raise HostTrouble(
                "silent",
                f"{host} accepts the connection and then says nothing for {CONNECT_S:.0f} s",
                "it hangs or is overloaded, or that port is not ssh: see its console",
            ) from None
        raise HostTrouble(
            "ssh failed",
            f"{host}: {error or type(error).__name__}",
            f"try: ssh -v -- {host}",
        ) from None


def _refused(host: str, login: Login, by_password: bool, error: Exception) -> HostTrouble:
    if not by_password:
        return HostTrouble(
            "key refused",
            f"{host} takes none of our keys for {login.user} (none of them is in its "
            "~/.ssh/authorized_keys, or others may write to its ~, ~/.ssh or that file)",
            "put both right with: bash setup/passwordless_ssh.sh",
        )
    takes = getattr(error, "allowed_types", None)
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


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Tells what an unknown host showed."""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        raise UnknownHostKey(hostname, _as_key(key))


def _as_key(key: paramiko.PKey) -> HostKey:
    return HostKey(key.get_name(), key.get_base64(), key.fingerprint)


def on_all(
    hosts: Iterable[str], work: Callable[[str], T], limit: float
) -> dict[str, T | HostTrouble]:
    """Call ``work(host)`` for all hosts at once.

    Args:
        limit: seconds after which a host that has not finished is in trouble.

    Returns:
        What each returned, or the HostTrouble that it raised, in the hosts' order. Any other
        exception of any host is raised here.
    """
    results: dict[str, T | HostTrouble] = {}
    crashes: list[BaseException] = []

    def one(host: str) -> None:
        try:
            results[host] = work(host)
        except HostTrouble as trouble:
            results[host] = trouble
        except BaseException as error:
            crashes.append(error)

    order = list(hosts)
    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in order]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if crashes:
        raise crashes[0]
    late = HostTrouble(
        "took too long",
        f"not finished within {limit:.0f} s",
        "see what keeps it busy, then run the same command again",
    )
    done = dict(results)  # a late one may still come in
    return {host: done.get(host, late) for host in order}

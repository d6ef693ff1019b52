"""Connections by ssh to one host, or to many at once. Only this module imports paramiko.

A connection uses the settings that OpenSSH, and thus ``mpirun``, would use. These are the settings
that ``ssh -G`` prints for the host (address, user, port, keys, files of host keys), and the agent.
If a host's key is unknown or changed, nothing is sent to the host. Commands for this machine run
without ssh, whatever name hosts.txt gives to it. On a node of this process's Slurm allocation,
Slurm runs the command, also without ssh.
"""

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import paramiko

from motley.cluster.hostfile import allocated_nodes, on_node
from motley.cluster.login import (
    CONNECT_S,
    Finished,
    HostKey,
    Login,
    Readable,
    Talk,
    TooLong,
    UnknownHostKey,
    changed,
    is_here,
    open_socket,
    read_login,
    refused,
    run_here,
    run_over,
)
from motley.errors import HostTrouble

# paramiko logs each authentication failure. This module reports them with their cause.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class Remote:
    """A host on which this process can run commands: by ssh, through Slurm, or locally.

    The object is a context manager.

    Attributes:
        host: name of the host.
        here: True if the host is this machine.
        key: verified host key of the host; None without ssh.
    """

    def __init__(
        self, host: str, client: paramiko.SSHClient | None, through: Sequence[str] = ()
    ) -> None:
        self.host = host
        self.here = client is None and not through
        self._client, self._through = client, through
        transport = client.get_transport() if client else None
        self.key = _as_key(transport.get_remote_server_key()) if transport else None

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._client:
            self._client.close()

    def run(
        self,
        script: str,
        *words: object,
        payload: bytes | Readable | None = None,
        limit: float = 30,
        on_line: Callable[[str], None] | None = None,
    ) -> Finished:
        """Run a POSIX sh script on the host, under any login shell, and return the output.

        Args:
            script: the script. Without a payload, its stdin is empty. All processes that the script
                starts then end when the script or the connection ends.
            *words: arguments of the script, ``$1 $2 ...``.
            payload: stdin of the script, or a file with the content of stdin. Secrets belong here,
                because arguments appear in lists of processes.
            limit: largest duration in seconds.
            on_line: function that is called with each line of stdout as it arrives.

        Raises:
            HostTrouble: the script took longer than ``limit``, or the connection broke.
        """
        talk = Talk(script, words, payload, on_line)
        try:
            if self._client:
                code = self._run_there(talk, limit)
            else:
                code = run_here(talk, limit, self._through)
        except TooLong:
            self.close()
            raise HostTrouble(
                "took too long",
                f"{self.host} did not finish within {limit:.0f} s",
                "find what keeps it busy, and run the same command again",
            ) from None
        done = talk.finish(code)
        if self._through and not done.begun:
            text = (done.errors.strip().splitlines() or ["no message"])[-1]
            raise HostTrouble(
                "not started", f"Slurm starts no process on {self.host}: {text}",
                f"see the state of the node with: scontrol show node {self.host}",
            )  # fmt: skip
        if not done.begun:
            raise HostTrouble(
                "no shell",
                f"{self.host} accepts the login, but its login shell ended with status {code} "
                f"before it ran the script of this command ({_last_line(done)})",
                "look for `exit` in its ~/.bashrc (tcsh: ~/.tcshrc, zsh: ~/.zshenv) and in the "
                "files that it reads. This command prints hello once that is corrected: ssh -- "
                f"{self.host} echo hello",
            )
        return done

    def _run_there(self, talk: Talk, limit: float) -> int:
        assert self._client is not None
        try:
            transport = self._client.get_transport()
            if transport is None:
                raise EOFError
            channel = transport.open_session(timeout=limit)
            code = run_over(channel, transport.is_active, talk, limit)
            channel.close()
            return code
        except (EOFError, OSError, paramiko.SSHException):
            raise HostTrouble(
                "connection lost",
                f"{self.host} closed the connection during the command",
                "check that it is up, and run the same command again",
            ) from None


def _last_line(done: Finished) -> str:
    """Return the last line that a login shell printed."""
    lines = (done.chatter + done.errors).strip().splitlines()
    return lines[-1][:80] if lines else "it says nothing"


def connect(
    host: str, password: str | None = None, key: Path | None = None, known: HostKey | None = None
) -> Remote:
    """Log in to a host.

    Args:
        host: name of the host.
        password: password with which to log in, without trying a key.
        key: path of the private key with which to log in. Without password and key, all keys are
            tried that ssh would try. On a node of this process's Slurm allocation, Slurm is used
            instead.
        known: the host key to accept if no known_hosts file has one.

    Raises:
        HostTrouble: the login failed. The error states the cause and the fix.
    """
    if is_here(host):
        return Remote(host, None)
    if password is None and key is None and host in allocated_nodes():
        return Remote(host, None, on_node(host))
    login = read_login(host)
    client = _client(login, known)
    ways: dict[str, Any] = {"allow_agent": False, "look_for_keys": False}
    if key is not None:
        ways["key_filename"] = [str(key)]
    elif password is not None:
        ways["password"] = password
    else:
        ways = {
            "key_filename": list(login.keys),
            "look_for_keys": False,
            "allow_agent": login.uses_agent,
        }
    try:
        with _named_troubles(host, login, password is not None):
            client.connect(
                login.address, login.port, login.user, sock=open_socket(host, login),
                timeout=CONNECT_S, banner_timeout=CONNECT_S, auth_timeout=CONNECT_S, **ways,
            )  # fmt: skip
    except BaseException as error:
        transport = client.get_transport()
        client.close()
        spoke = transport is not None and transport.initial_kex_done
        if spoke and isinstance(error, HostTrouble) and error.kind == "silent":
            # An agent has offered more keys than the host accepts, and the host closed the
            # connection.
            raise refused(host, login, password is not None) from None
        raise
    transport = client.get_transport()
    if transport:
        transport.set_keepalive(5)
    return Remote(host, client)


def _client(login: Login, known: HostKey | None) -> paramiko.SSHClient:
    """Return a client that accepts only host keys of the known_hosts files, and ``known``."""
    client = paramiko.SSHClient()
    for path in login.known_files:
        with contextlib.suppress(OSError):
            for name, held in _read_known(path):
                client.get_host_keys().add(name, held.get_name(), held)
    if known is not None and login.known_as not in client.get_host_keys():
        public = paramiko.PKey.from_type_string(known.kind, base64.b64decode(known.base64))
        client.get_host_keys().add(login.known_as, known.kind, public)
    client.set_missing_host_key_policy(_Refuse())
    return client


def known_keys(host: str, path: Path) -> tuple[HostKey, ...]:
    """Return a host's keys in a known_hosts file; raise OSError if the file cannot be read."""
    file, name = paramiko.HostKeys(), read_login(host).known_as
    for listed, key in _read_known(path):
        file.add(listed, key.get_name(), key)
    result = file.lookup(name)
    return tuple(_as_key(key) for key in result.values()) if result else ()


def _read_known(path: Path) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield names and keys of a known_hosts file. Bad lines are left out."""
    for line in path.read_text(errors="replace").splitlines():
        if not line.strip() or line.lstrip().startswith(("#", "@")):
            continue
        try:
            entry = paramiko.hostkeys.HostKeyEntry.from_line(line.strip())
        except Exception:  # of any type; ssh skips such lines too
            continue
        if entry is not None and entry.key is not None:
            for name in entry.hostnames or ():
                yield name, entry.key


def host_key(host: str, kinds: Iterable[str] = ()) -> HostKey:
    """Return the key that a host presents, without logging in.

    Args:
        host: name of the host.
        kinds: key types that are requested first, for example ``ssh-rsa``.

    Raises:
        HostTrouble: the host does not answer.
    """
    login = read_login(host)
    sock = open_socket(host, login)
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


@contextlib.contextmanager
def _named_troubles(host: str, login: Login, by_password: bool = False) -> Any:
    """Convert paramiko's errors in the ``with`` block to HostTrouble, with cause and fix."""
    try:
        yield
    except paramiko.BadHostKeyException as error:
        raise changed(host, login, error.key.fingerprint, error.expected_key.fingerprint) from None
    except paramiko.PasswordRequiredException:
        raise HostTrouble(
            "key locked",
            f"the ssh key for {host} has a passphrase, and no ssh agent holds the key",
            "add it to the agent with ssh-add, or make a separate key with: bash "
            "setup/passwordless_ssh.sh",
        ) from None
    except paramiko.AuthenticationException as error:
        raise refused(host, login, by_password, getattr(error, "allowed_types", None)) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if str(error) == "No authentication methods available":  # the user has no key
            raise refused(host, login, by_password) from None
        # "No existing session" is paramiko's word for a handshake that took too long.
        slow = "banner" in str(error) or "No existing session" in str(error)
        if slow or isinstance(error, TimeoutError):
            raise HostTrouble(
                "silent",
                f"{host} accepts the connection and then sends nothing for {CONNECT_S:.0f} s",
                "it hangs or is overloaded, or another service than ssh has that port; look at "
                "its console",
            ) from None
        raise HostTrouble(
            "ssh failed",
            f"ssh to {host} fails: {error or type(error).__name__}",
            f"see more with: ssh -v -- {host}",
        ) from None


class _Refuse(paramiko.MissingHostKeyPolicy):
    """A paramiko policy that raises :class:`UnknownHostKey` for a host without a known key."""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        raise UnknownHostKey(hostname, _as_key(key))


def _as_key(key: paramiko.PKey) -> HostKey:
    return HostKey(key.get_name(), key.get_base64(), key.fingerprint)


T = TypeVar("T")


def run_on_all(
    hosts: Iterable[str], work: Callable[[str], T], limit: float
) -> dict[str, T | HostTrouble]:
    """Call ``work(host)`` for all hosts at once, and return each result or error by host.

    Args:
        hosts: names of the hosts.
        work: function that is called with each host.
        limit: seconds after which a host without a result gets an error.

    Returns:
        Each host's result, or the HostTrouble that ``work`` raised, in the hosts' order. This
        function raises any other exception of ``work``.
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
        f"the command did not end within {limit:.0f} s",
        "find what keeps it busy, and run the same command again",
    )
    done = dict(results)  # a copy, since late results may still arrive
    return {host: done.get(host, late) for host in order}


def split(results: Mapping[str, T | HostTrouble]) -> tuple[dict[str, T], dict[str, HostTrouble]]:
    """Split the result of :func:`run_on_all` into two dictionaries by host: values and faults."""
    well = {host: each for host, each in results.items() if not isinstance(each, HostTrouble)}
    troubles = {host: each for host, each in results.items() if isinstance(each, HostTrouble)}
    return well, troubles

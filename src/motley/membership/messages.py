"""Messages between ranks, one JSON object per line, and the handshake of a new connection.

Handshake: rank 0's port is open to a whole network while a training runs. Port scanners, browsers
and other programs connect to it too. A rank therefore sends a greeting that begins with the secret
token of the job. If another program connects, rank 0 reads at most as many bytes as the token has.
Rank 0 parses none of these bytes, and sends nothing.

Limits: rank 0 waits a few seconds for a greeting, and holds a few dozen connections without a token
at once. A further connection replaces the one that has waited longest. Every rank opens a port in
this way, but accepts connections only once it replaces rank 0.

Fault handler: Python's fault handler writes the traceback of a crash into the connection. A thread
of the fault handler also sends a sign of life while none of Python's threads runs. One call may
hold the GIL for a long time. Examples are parsing a large JSON file or a pickle (a minute on a slow
host), collecting fifty million objects, and compiled code that does not release the GIL. The
process then sends no heartbeat, as if it were stopped or its host frozen. The fault handler's
thread does not need the GIL. This thread writes the stacks of all threads, unless a Python thread
postpones the write in time. A process has only one thread of this kind, so a user's script cannot
call ``faulthandler.dump_traceback_later`` too.
"""

import contextlib
import faulthandler
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

# The limit of one message. The longest are tracebacks, which motley.faults cuts to a tenth of it.
MOST_BYTES = 1 << 20
# First bytes of the fault handler's text after a crash, and while Python is busy.
_BEGIN = (b"Fatal Python error", b"Timeout (")
_MOST_WORDS = 16_384  # bytes; Python's fault handler writes a tenth of it for each thread


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as one line."""
    return json.dumps(message).encode() + b"\n"


class Messages:
    """A decoder of one connection's bytes into messages.

    The decoder drops a line that is too long or is no JSON object. The connection stays open.

    Attributes:
        last_words: the latest lines that are no JSON object, up to a limit. Python's fault handler
            writes such lines into the connection of a rank that crashes, or that is busy.
    """

    def __init__(self) -> None:
        self.last_words = ""
        self._rest = b""
        self._dropping = False  # the rest of a line that was too long

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Append received bytes and return the complete messages."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._dropping:
            lines, self._dropping = lines[1:], False
        if len(self._rest) > MOST_BYTES:
            self._rest, self._dropping = b"", True
        result = [(line, _decode(line)) for line in lines if len(line) <= MOST_BYTES]
        for line, message in result:
            if isinstance(message, dict) or line.startswith(_BEGIN):
                self.last_words = ""
            if not isinstance(message, dict) and len(self.last_words) + len(line) < _MOST_WORDS:
                self.last_words += line.decode(errors="replace") + "\n"
        return [message for _, message in result if isinstance(message, dict)]


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


TIMEOUT_S = 5.0  # seconds to wait for the greeting, which a rank sends as soon as it connects
MOST_STRANGERS = 64
_SEND_S = 1.0  # seconds that rank 0 waits at most to send to a rank
_NO_FILES_S = 0.05  # seconds to wait when this process can open no further files


def greeting(token: str, rank: int, host: str) -> bytes:
    """Return the first bytes that a rank sends, which begin with the token.

    Args:
        token: shared token of the job.
        rank: number of the rank. ~K stands for the reaper of rank K, a process that outlives the
            rank on its host.
        host: name of the sender's host.
    """
    return encode({"token": token, "rank": rank, "host": host})


def _opening(token: str) -> bytes:
    return encode({"token": token}).removesuffix(b"}\n")


@dataclass(frozen=True)
class Listening:
    """The address at which a rank accepts connections once it has replaced rank 0.

    Attributes:
        address: IP address of the rank's machine.
        port: TCP port of the rank.
        token: secret that a connecting rank sends first.
        host: name of the rank's machine.
    """

    address: str
    port: int
    token: str
    host: str


@dataclass(frozen=True)
class Arrival:
    """A connection that has sent the token.

    Attributes:
        line: the connection.
        rank: number of the sender. ~K is the reaper of rank K, a process that reports that the host
            of the dead rank K lives, and then waits until the job ends.
        host: name of the sender's host.
        pending: messages that came together with the greeting.
        messages: decoder for all later bytes.
    """

    line: socket.socket
    rank: int
    host: str
    pending: list[dict[str, Any]]
    messages: Messages


@dataclass
class _Stranger:
    since: float
    received: bytes = b""
    messages: Messages = field(default_factory=Messages)


class Handshakes:
    """The connections that arrive at a rank's port.

    Args:
        listener: the open port.
        host: name of this machine.
        size: number of ranks. The reaper of each rank may connect too; see :class:`Arrival`.

    Attributes:
        listening: address and token that other ranks need to connect.
    """

    def __init__(self, listener: socket.socket, host: str, size: int) -> None:
        address, port = listener.getsockname()
        self.listening = Listening(address, port, secrets.token_hex(16), host)
        self._opening = _opening(self.listening.token)
        self._size, self._awaited = size, set[int]()
        self._listener = listener
        listener.setblocking(False)
        self._strangers: dict[socket.socket, _Stranger] = {}  # in order of arrival

    def expect(self, ranks: Collection[int]) -> None:
        """Set the ranks that may connect from now on, each rank once."""
        self._awaited = set(ranks)

    @property
    def lines(self) -> list[socket.socket]:
        """Connections that have not sent the token yet."""
        return list(self._strangers)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register all sockets with ``selector``, which reports when to call :meth:`arrivals`."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ)

    def arrivals(self, ready: Collection[object], now: float) -> Iterator[Arrival]:
        """Accept connections, read greetings, and drop every connection that is not a rank's.

        Args:
            ready: sockets that the selector reports as readable. Sockets of other parts are
                ignored.
            now: seconds, by a clock that stands still while this process is frozen.
        """
        # Read earlier connections first: of too many, the oldest is closed when a new one arrives.
        for line in [line for line in self._strangers if line in ready]:
            if arrival := self._read_from(line):
                yield arrival
        new = list(self._accept(now)) if self._listener in ready else []
        for line in [line for line in new if line in self._strangers]:
            if arrival := self._read_from(line):
                yield arrival
        for line, stranger in list(self._strangers.items()):
            if now - stranger.since > TIMEOUT_S:
                self._hang_up(line)

    def _accept(self, now: float) -> Iterator[socket.socket]:
        for _ in range(MOST_STRANGERS):  # then the known connections are served
            try:
                line, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):  # no more; or gone again
                return
            except OSError:  # this process has no more files
                if not self._strangers:
                    time.sleep(_NO_FILES_S)
                    return
                self._hang_up(next(iter(self._strangers)))
                continue
            # A thousand ranks that connect at once are all strangers for a moment.
            if len(self._strangers) >= max(MOST_STRANGERS, len(self._awaited)):
                self._hang_up(next(iter(self._strangers)))
            line.setblocking(False)
            self._strangers[line] = _Stranger(now)
            self._selector.register(line, selectors.EVENT_READ)
            yield line

    def _read_from(self, line: socket.socket) -> Arrival | None:
        stranger = self._strangers[line]
        missing = len(self._opening) - len(stranger.received)
        try:
            data = line.recv(missing or 65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._hang_up(line)
            return None
        if missing:
            stranger.received += data
            if len(stranger.received) < len(self._opening):
                return None
            if not hmac.compare_digest(stranger.received, self._opening):
                self._hang_up(line)
                return None
            stranger.messages.feed(stranger.received)
            return self._read_from(line)
        messages = stranger.messages.feed(data)
        if not messages:  # the greeting is not complete
            return None
        first, *pending = messages
        rank, host = first.get("rank"), str(first.get("host"))
        if type(rank) is not int or not (rank in self._awaited or 0 <= ~rank < self._size):
            self._hang_up(line)
            return None
        self._awaited.discard(rank)
        del self._strangers[line]
        line.settimeout(_SEND_S)
        return Arrival(line, rank, host, pending, stranger.messages)

    def _hang_up(self, line: socket.socket) -> None:
        del self._strangers[line]
        self._selector.unregister(line)
        with contextlib.suppress(OSError):
            line.close()


# Seconds without get_on() after which signs of life are sent, and their interval.
_BUSY_AFTER_S = 6.0


def write_to(line: socket.socket) -> None:
    """Let Python's fault handler write the traceback to a connection if this process crashes."""
    faulthandler.enable(line.fileno())


def get_on(line: socket.socket | None) -> None:
    """Postpone the fault handler's sign of life, since a Python thread can still run.

    A call takes 0.1 ms.

    Args:
        line: connection to which the fault handler writes a sign of life after ``_BUSY_AFTER_S``
            seconds without another call. None, or a closed connection: no sign of life is written.
    """
    end()
    if line is not None and line.fileno() >= 0:
        with contextlib.suppress(RuntimeError, MemoryError):  # no room for another thread's stack
            faulthandler.dump_traceback_later(_BUSY_AFTER_S, repeat=True, file=line.fileno())


def end() -> None:
    """Stop the signs of life. The fault handler still writes the traceback of a crash."""
    faulthandler.cancel_dump_traceback_later()

"""Which machines this process sends to without an answer, as its kernel knows of each connection.

Two hosts may lose each other while rank 0 hears both: a switch's port, a wrong route, a firewall.
Nobody is silent then, and all wait for one another, in a collective, at an epoch's end or while
they start. But TCP sends again what is not acknowledged, whatever library opened the connection,
and tells for how long it has heard nothing. A peer that is only busy, or stopped, acknowledges.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

DEAD_AFTER_S = 18.0  # without an answer, though there was something to answer
_LEAST_TRIES = 3  # that were sent again; TCP doubles the time between two
# Of struct tcp_info, linux/tcp.h: tcpi_retransmits; tcpi_unacked; tcpi_last_ack_recv, ms.
_RETRANSMITS, _UNACKED, _LAST_ACK_MS = 2, 24, 56
_INFO_BYTES = 256
_getsockopt = ctypes.PyDLL(None).getsockopt  # which never waits, so it keeps Python's lock
_LOCAL = ("127.", "::1", "::ffff:127.")


def dead_peers(after_s: float = DEAD_AFTER_S, tries: int = _LEAST_TRIES) -> list[str]:
    """Addresses of other machines that do not answer; takes two milliseconds for 1,000 connections.

    Args:
        after_s: seconds without an answer. tries: how often something was sent again, or more.
    """
    found = set()
    for number, info in _connections():
        if is_dead(info, after_s, tries):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
                found.add(str(line.getpeername()[0]).removeprefix("::ffff:"))
    return sorted(address for address in found if not address.startswith(_LOCAL))


def is_dead(info: bytes, after_s: float, tries: int = _LEAST_TRIES) -> bool:
    """Whether a connection has sent in vain for so long, and so often.

    Args:
        info: struct tcp_info.
    """
    unacked = struct.unpack_from("=I", info, _UNACKED)[0]
    last_ack_ms = struct.unpack_from("=I", info, _LAST_ACK_MS)[0]
    tried = info[_RETRANSMITS]
    return bool(unacked and tried >= tries and last_ack_ms > 1000 * after_s)


def _connections() -> Iterator[tuple[int, bytes]]:
    """This process's TCP sockets, whoever opened them: descriptor, and struct tcp_info.

    The system is asked of every descriptor, without a socket object for each: a rank of a
    thousand has as many connections.
    """
    info, size = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  its paths take as long as all else
        size.value = _INFO_BYTES
        where = ctypes.byref(info), ctypes.byref(size)
        if not _getsockopt(int(name), socket.IPPROTO_TCP, socket.TCP_INFO, *where):
            yield int(name), info.raw[: size.value]

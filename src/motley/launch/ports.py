"""Ports of this machine: whether one is free, and one that stays so."""

import errno
import socket


def why_not_free(port: int) -> str:
    """Why nobody can listen on a port of this machine; empty if one can."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "another program listens there" if taken else str(error.strerror)
    return ""


def reserve_port(address: str) -> socket.socket:
    """A free port, held by a socket that is bound and never listens.

    No other program is given the port, while torch, which sets SO_REUSEADDR, can take it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder

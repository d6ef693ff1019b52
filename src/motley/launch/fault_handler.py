"""What Python's fault handler writes into a connection to another rank: the traceback of a crash,
and that this process lives while none of Python's threads gets on.

One call may keep Python's lock for a long time: of what reads a large JSON file or a pickle, a
minute on a slow host; a collection of fifty million objects; compiled code that does not give the
lock away. No heartbeat is sent meanwhile, as by a process that was stopped or whose host froze.
But the fault handler has a thread that needs no lock: unless it hears in time that they get on, it
writes what all are at. It has one: a script that calls ``faulthandler.dump_traceback_later`` has
none of its own.
"""

import contextlib
import faulthandler
import socket

_BUSY_AFTER_S = 6.0  # without :func:`get_on`; and from one sign to the next


def write_to(line: socket.socket) -> None:
    """Have a crash be written into a connection, from now on."""
    faulthandler.enable(line.fileno())


def get_on(line: socket.socket | None) -> None:
    """Say that this thread of Python's does: for a while nothing is written but a crash. 0.1 ms.

    Args:
        line: that is written into after that while; None, or closed: none.
    """
    end()
    if line is not None and line.fileno() >= 0:
        with contextlib.suppress(RuntimeError, MemoryError):  # no room for another thread's stack
            faulthandler.dump_traceback_later(_BUSY_AFTER_S, repeat=True, file=line.fileno())


def end() -> None:
    """Write nothing but a crash."""
    faulthandler.cancel_dump_traceback_later()

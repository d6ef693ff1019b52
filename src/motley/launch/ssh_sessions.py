"""The ssh sessions to other hosts, in each of which mpirun runs a daemon of its own."""

import contextlib
import os
import select
from collections.abc import Sequence

import psutil


def sessions_of(launcher: int) -> dict[int, str]:
    """The process of each, with its host as hosts.txt has it; none, unless ``launcher`` is an
    mpirun that has started some."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = child.cmdline()
                daemon = next((n for n, word in enumerate(words) if "prted" in word), 0)
                if daemon and any(word.endswith("ssh") for word in words[:2]):
                    found[child.pid] = words[daemon - 1].rpartition("@")[2]
    return found


class SshSessions:
    """Which session of a launcher ends first.

    mpirun loses a host with its session, or just before it, and ends the others with itself.
    """

    def __init__(self, launcher: int) -> None:
        self._first = ""
        self._hosts: dict[int, str] = {}  # of those that are open, by a descriptor of the process
        for pid, host in sessions_of(launcher).items():
            with contextlib.suppress(OSError):  # an older kernel, or it has just ended
                self._hosts[os.pidfd_open(pid)] = host

    def register(self, poll: select.epoll) -> None:
        """Have it wait for them too; what it finds is for :meth:`look`."""
        for descriptor in self._hosts:
            poll.register(descriptor, select.EPOLLIN)

    def look(self, ready: Sequence[int], poll: select.epoll) -> None:
        """Take note of those that have ended, in the order in which they did: epoll keeps it."""
        for descriptor in ready:
            if (host := self._hosts.pop(descriptor, None)) is not None:
                poll.unregister(descriptor)
                self._first = self._first or host

    def first(self, limit_s: float) -> str:
        """Host of the one that has ended first; empty where none does.

        Args:
            limit_s: seconds to wait for it.
        """
        with select.epoll() as poll:
            self.register(poll)
            if not self._first and self._hosts:
                self.look([ready for ready, _ in poll.poll(limit_s)], poll)
        return self._first

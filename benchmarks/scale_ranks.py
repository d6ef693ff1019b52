"""Ranks that only say what ranks say, over loopback, to a real rank 0 (scale_first.py)."""

import contextlib
import itertools
import json
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motley.faults import Phase
from motley.launch.process import allow_files
from motley.membership.detector import Heartbeat, heartbeat_interval_s
from motley.membership.messages import Messages, encode, greeting

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.ALL_REDUCE)
_LIMIT_S = 40.0  # for rank 0 to end a job
_PAUSE_S = 0.002  # between looks
_AT_ONCE = 32  # that connect before rank 0 is given a moment, as hosts do not start in one instant


class FakeRanks:
    """All ranks of a job but the first, in one process; a context, which ends rank 0 too.

    Attributes:
        joined: what rank 0 says of it.
    """

    def __init__(self, size: int) -> None:
        allow_files(size, first=False)
        self.size = size
        self._first = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("scale_first.py")), str(size)],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        where = self._answer()
        self._lines: dict[int, socket.socket] = {}
        for rank in range(1, size):
            line = socket.create_connection(("127.0.0.1", where["port"]), timeout=10)
            line.sendall(greeting(where["token"], rank, f"host{rank // 8}"))
            line.setblocking(False)
            self._lines[rank] = line
            if rank % _AT_ONCE == 0:
                time.sleep(0.01)
        self.joined = self._answer()
        self._moves = itertools.count(1)
        self._beats = self._schedule()
        self._next = next(self._beats)

    def __enter__(self) -> "FakeRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._first.kill()
        self._first.communicate()
        for line in self._lines.values():
            line.close()

    def cost(self, seconds: float) -> dict[str, float]:
        """The part of a core that rank 0 takes to hear all, and what slows its own thread."""
        assert self._first.stdin is not None
        print(seconds, file=self._first.stdin, flush=True)
        end = time.monotonic() + 2 * seconds
        while time.monotonic() < end:
            for line in self._speak():
                _read(line)
            time.sleep(_PAUSE_S)
        return self._answer()

    def end_by_death(self, rank: int) -> tuple[float, str]:
        """Break a rank's connection: seconds until all others are told to stop; what is said."""
        self._lines.pop(rank).close()
        return self._until_all_stop()

    def end_by_silence(self, rank: int) -> tuple[float, str]:
        """The same, of a rank that says nothing more."""
        return self._until_all_stop(rank)

    def _answer(self) -> dict[str, Any]:
        assert self._first.stdout is not None
        if not (line := self._first.stdout.readline()):
            raise SystemExit(f"rank 0 has ended: {self._first.communicate()[1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _schedule(self) -> Iterator[tuple[float, int]]:
        """When each rank says something next: none at the instant of another, as in life."""
        interval, dice = heartbeat_interval_s(self.size), random.Random(0)
        offsets = sorted((dice.uniform(0, interval), rank) for rank in self._lines)
        begin = time.monotonic()
        while True:
            yield from ((begin + offset, rank) for offset, rank in offsets)
            begin = max(begin + interval, time.monotonic())

    def _speak(self, silent: int = 0) -> list[socket.socket]:
        """Send what is due; whose it was."""
        spoke = []
        while self._next[0] < time.monotonic():
            rank, self._next = self._next[1], next(self._beats)
            if rank == silent or rank not in self._lines:
                continue
            moves = next(self._moves)
            beat = Heartbeat(moves // self.size, _PHASES[moves % 3], moves, 120.0)
            with contextlib.suppress(OSError):
                self._lines[rank].sendall(encode({"heartbeat": beat.message()}))
                spoke.append(self._lines[rank])
        return spoke

    def _until_all_stop(self, silent: int = 0) -> tuple[float, str]:
        begin = time.monotonic()
        waiting = {line: Messages() for rank, line in self._lines.items() if rank != silent}
        selector = selectors.DefaultSelector()
        for line in waiting:
            selector.register(line, selectors.EVENT_READ)
        while waiting and time.monotonic() - begin < _LIMIT_S:
            self._speak(silent)
            for line in [key.fileobj for key, _ in selector.select(_PAUSE_S)]:
                assert isinstance(line, socket.socket)
                data = _read(line)
                if data == b"" or any("stop" in text for text in waiting[line].feed(data or b"")):
                    selector.unregister(line)
                    del waiting[line]
        took = time.monotonic() - begin
        assert self._first.stderr is not None
        return took, self._first.stderr.read().strip()


def _read(line: socket.socket) -> bytes | None:
    """What has come; empty at the end, None if nothing has."""
    try:
        return line.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""

"""Rows of the fault matrix: strangers on rank 0's port."""

import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from fault_places import Place
from fault_row import Seen, row
from fault_story import Story

_CALM = "training goes on: the same losses, at most three times as slow"
_BACKLOG = "1024"  # of rank 0's port; those of MPI, gloo and torch have others
_STEPS = 200
Address = tuple[str, int]


def ports(pid: int) -> list[tuple[str, Address]]:
    """Backlog and address of all that a process listens on."""
    listed = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    result = []
    for line in listed.splitlines():
        if f"pid={pid}," in line:
            backlog, (host, _, port) = line.split()[2], line.split()[3].rpartition(":")
            host = "127.0.0.1" if host in ("0.0.0.0", "*", "[::]") else host
            result.append((backlog, (host, int(port))))
    return result


def _pester(place: Place, seen: Seen, visit: Callable[[Address], object], *,
            every_port: bool = False) -> None:  # fmt: skip
    """Strangers come again and again while a run trains."""
    story = Story(place, seen, 2, "--max-steps", _STEPS).reach(40)
    listening = ports(place.ranks()[0])
    chosen = [where for backlog, where in listening if every_port or backlog == _BACKLOG]
    assert chosen, f"no port of rank 0 among {listening}"
    over = threading.Event()

    def come() -> None:
        while not over.is_set():
            for where in chosen:
                with suppress(OSError):
                    visit(where)
            over.wait(0.01)

    thread = threading.Thread(target=come, daemon=True)
    story.harm(thread.start)
    code = story.end(90)
    over.set()
    seen.expect(code == 0, f"exit status {code}")
    steps = story.steps()
    seen.expect(len(steps) == _STEPS, f"{len(steps)} of {_STEPS} steps")
    story.judge_losses()
    times = [steps[n]["time"] for n in sorted(steps)]
    taken = [b - a for a, b in pairwise(times)]
    calm, pestered = statistics.median(taken[5:40]), statistics.median(taken[45:])
    seen.line = seen.line or f"{1000 * calm:.0f} ms a step before, {1000 * pestered:.0f} meanwhile"
    seen.expect(pestered <= 3 * calm, f"{pestered / calm:.1f} times as slow")
    story.judge_left()


def _say(data: bytes, times: int = 1) -> Callable[[Address], None]:
    def visit(where: Address) -> None:
        with socket.create_connection(where, timeout=2) as line:
            for _ in range(times):
                line.sendall(data)

    return visit


@row("strangers send garbage and 10 MB", _CALM)
def strangers_garbage(place: Place, seen: Seen) -> None:
    _pester(place, seen, _say(bytes(range(256)) * 40_960))


@row("strangers send 300 MB without a newline", _CALM)
def strangers_endless_line(place: Place, seen: Seen) -> None:
    _pester(place, seen, _say(b"x" * (1 << 20), 300))


@row("strangers send a line of 200,000 [", _CALM)
def strangers_brackets(place: Place, seen: Seen) -> None:
    _pester(place, seen, _say(b"[" * 200_000 + b"\n"))


@row("a stranger writes a byte at a time", _CALM)
def strangers_slow_writer(place: Place, seen: Seen) -> None:
    def visit(where: Address) -> None:
        with socket.create_connection(where, timeout=2) as line:
            for byte in b'{"token": "00000000000000000000000000000000"}\n':
                line.sendall(bytes([byte]))
                time.sleep(0.1)

    _pester(place, seen, visit)


@row("1,200 idle strangers", _CALM)
def strangers_idle(place: Place, seen: Seen) -> None:
    idle: list[socket.socket] = []

    def visit(where: Address) -> None:
        idle.append(socket.create_connection(where, timeout=2))
        if len(idle) > 1200:
            idle.pop(0).close()

    _pester(place, seen, visit)
    for line in idle:
        line.close()


@row("a port scan of rank 0's process, MPI's and torch's ports too", _CALM)
def strangers_port_scan(place: Place, seen: Seen) -> None:
    def visit(where: Address) -> None:
        socket.create_connection(where, timeout=1).close()
        time.sleep(0.2)

    _pester(place, seen, visit, every_port=True)

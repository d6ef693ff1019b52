"""Rank 0's port is open to a whole network: strangers cost a training nothing."""

import contextlib
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from project import LIMIT_S, ROOT, environment

from motley.errors import MotleyError
from motley.faults import make_fault
from motley.membership import protocol
from motley.membership.detector import HEARTBEAT_TIMEOUT_S
from motley.membership.messages import (
    MOST_BYTES,
    MOST_STRANGERS,
    TIMEOUT_S,
    Arrival,
    Handshakes,
    Messages,
    encode,
    greeting,
)

RANK = """
import os, sys, time
from dataclasses import replace
from motley.membership.supervisor import Supervisor
from motley.membership.survivors import GroupPlace

rank, size = int(sys.argv[1]), int(sys.argv[2])
supervisor = Supervisor(GroupPlace(rank, f"host{rank}", tuple(range(size)), (0, 0)))
own = supervisor.listen("127.0.0.1")
if rank == 0:
    print(own.port, own.token, own.host, flush=True)
    listening = [own, own]
else:
    port, token, host = sys.argv[3:]
    listening = [replace(own, port=int(port), token=token, host=host), own]
supervisor.join(listening)
print("joined", flush=True)
def fail(event):
    time.sleep(2)
    raise OSError("the disk is full")

if "FAILS" in os.environ:
    supervisor.on_event = fail
    supervisor.record_event({"kind": "last words"})
if "EVENTS" in os.environ:
    supervisor.on_event = lambda event: open(os.environ["EVENTS"], "a").write(event["kind"])
    supervisor.record_event({"kind": f"event {rank}; "})
sys.stdin.readline()
supervisor.finish()
print("finished", flush=True)
"""


class Rank:
    """One rank's supervisor, in a process of its own."""

    def __init__(self, *words: object, files: int | None = None, **extra: str) -> None:
        limit = f"ulimit -n {files}; " if files else ""
        self._process = subprocess.Popen(
            ["bash", "-c", limit + 'exec "$@"', "-", sys.executable, "-c", RANK, *map(str, words)],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(PYTHONPATH=str(ROOT / "src"), **extra),
        )  # fmt: skip

    def line(self) -> str:
        """What it says next."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def finish(self) -> None:
        """Let it finish."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self) -> tuple[int, str, str]:
        """Its status, and what else it has said."""
        output, errors = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, output, errors

    def kill(self) -> None:
        """Whatever it is at."""
        self._process.kill()
        self._process.communicate()


class Pair:
    """Two ranks, of which the second joins when it is told to."""

    def __init__(self, files: int | None = None, **extra: str) -> None:
        self._extra = extra
        self.first = Rank(0, 2, files=files, **extra)
        self.listening = self.first.line().split()
        assert self.first.line() == "joined"
        self.second: Rank | None = None

    def join(self) -> None:
        """Begin the second rank."""
        self.second = Rank(1, 2, *self.listening, **self._extra)
        assert self.second.line() == "joined"

    def connect(self) -> socket.socket:
        """As anybody in the network can."""
        return socket.create_connection(("127.0.0.1", int(self.listening[0])), timeout=10)

    def finish(self) -> None:
        """Both end well, and have nothing to complain of."""
        assert self.second is not None
        for rank in (self.first, self.second):
            rank.finish()
        for rank in (self.first, self.second):
            assert rank.ended() == (0, "finished\n", "")

    def end(self) -> None:
        """Leave nothing behind."""
        for rank in (self.first, self.second):
            if rank is not None:
                rank.kill()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Rank 0, and rank 1 to come."""
    made = Pair()
    yield made
    made.end()


def closed(line: socket.socket) -> bool:
    """Rank 0 has hung up, and said nothing before."""
    with contextlib.suppress(ConnectionError):
        return line.recv(99) == b""
    return True


@pytest.mark.parametrize(
    "said",
    [b"[" * 200_000 + b"\n", b'{"token": "' + b"0" * 32 + b'", "rank": 1, "host": "x"}\n',
     b"0" * 44, b"\xff\xfe\n" * 999, b"GET / HTTP/1.1\r\nHost: " + b"a" * 99],
    ids=["nested", "wrong token", "as long", "no text", "a browser"],
)  # fmt: skip
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_stranger_says_is_not_read(pair: Pair, said: bytes, when: str) -> None:
    if when == "after":
        pair.join()
    with pair.connect() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        assert closed(stranger)
    if when == "before":
        pair.join()
    pair.finish()


def test_a_stranger_hears_nothing(pair: Pair) -> None:
    pair.join()
    with pair.connect() as stranger:
        stranger.settimeout(0.9)  # beats are sent twice a second
        with pytest.raises(TimeoutError):
            stranger.recv(99)
    pair.finish()


def test_a_crowd_of_strangers_is_not_kept() -> None:
    """1,200 of them, where a process may have 128 files, before and after the ranks join."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    pair = Pair(files=128)
    crowd = []
    try:
        crowd = [pair.connect() for _ in range(600)]
        pair.join()
        crowd += [pair.connect() for _ in range(600)]
        pair.finish()
    finally:
        for stranger in crowd:
            stranger.close()
        pair.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("rank", [1, 0, 2, -3, True, None, "1", [1]])
def test_a_token_makes_nobody_another_rank(pair: Pair, rank: object) -> None:
    pair.join()
    with pair.connect() as other:
        hello = json.dumps({"token": pair.listening[1], "rank": rank, "host": "x"})
        other.sendall(hello.encode() + b'\n{"done": true}\n')
        assert closed(other)
    pair.finish()


class Port:
    """Rank 0's, with a clock that is set by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=99)
        self.handshakes = Handshakes(self._listener, "here", 3)
        self.handshakes.expect((1, 2))
        self._selector = selectors.DefaultSelector()
        self.handshakes.register(self._selector)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), timeout=5)

    def look(self, now: float) -> list[Arrival]:
        """Once, at what is ready."""
        ready = [key.fileobj for key, _ in self._selector.select(0.02)]
        return list(self.handshakes.arrivals(ready, now))

    @property
    def strangers(self) -> int:
        return len(self._selector.get_map()) - 1  # the listener


def test_a_stranger_that_says_too_little_is_closed_in_time() -> None:
    port = Port()
    with port.connect() as silent, port.connect() as slow:
        slow.sendall(
            greeting(port.handshakes.listening.token, 1, "a")[:-3]
        )  # but for the end of the line
        port.look(100.0)
        assert port.strangers == 2
        port.look(100.0 + TIMEOUT_S - 0.1)
        assert port.strangers == 2
        port.look(100.0 + TIMEOUT_S + 0.1)
        assert port.strangers == 0 and closed(silent) and closed(slow)


def test_of_too_many_strangers_the_oldest_goes() -> None:
    port = Port()
    with contextlib.ExitStack() as stack:
        lines = []
        for number in range(MOST_STRANGERS + 3):
            lines.append(stack.enter_context(port.connect()))
            port.look(float(number) / 100)
        assert port.strangers == MOST_STRANGERS and all(map(closed, lines[:3]))
        lines[-1].sendall(greeting(port.handshakes.listening.token, 2, "b"))
        assert [(new.rank, new.host) for new in port.look(2.0)] == [(2, "b")]


def test_a_rank_is_known_however_its_bytes_arrive() -> None:
    port = Port()
    said = greeting(port.handshakes.listening.token, 1, "a") + encode({"done": True}) + b'{"beat"'
    with port.connect() as line:
        arrived: list[Arrival] = []
        for byte in said[:60]:
            line.sendall(bytes([byte]))
            assert not port.look(0.0)
        line.sendall(said[60:])
        (new,) = port.look(0.0)
        assert (new.rank, new.host, new.pending) == (1, "a", [{"done": True}]), arrived
        assert new.messages.feed(b": 7}\n") == [{"beat": 7}]


@given(st.lists(st.dictionaries(st.text(), st.integers())), st.integers(1, 50))
def test_messages_are_read_in_any_pieces(sent: list[dict[str, int]], size: int) -> None:
    data = b"".join(map(encode, sent)) + b"torn"
    messages = Messages()
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    assert [message for piece in pieces for message in messages.feed(piece)] == sent


@pytest.mark.parametrize(
    "line", [b"x" * (3 * MOST_BYTES), b"[" * 200_000, b"\xff", b"[]", b"7", b"", b"9" * 5000]
)
def test_what_is_no_message_costs_itself_alone(line: bytes) -> None:
    messages = Messages()
    data = line + b"\n" + encode({"a": 1})
    found = [
        message
        for start in range(0, len(data), 65536)
        for message in messages.feed(data[start : start + 65536])
    ]
    assert found == [{"a": 1}] and messages.feed(line + b"\n" + encode({"b": 2})) == [{"b": 2}]


@pytest.mark.parametrize("kind", [RuntimeError, MotleyError])
def test_a_fault_always_fits(kind: type[Exception]) -> None:
    fault = make_fault(kind("\N{PILE OF POO}" * MOST_BYTES), 3, "a", 7)
    assert len(protocol.encode(protocol.RankFailed(fault))) < MOST_BYTES


def test_an_error_in_a_senders_thread_may_be_an_echo() -> None:
    error = MotleyError("the all-reduce of gradients failed")
    assert not make_fault(error, 3, "a", 7).echo
    error.__cause__ = RuntimeError("Connection closed by peer [10.0.0.3]:5")
    assert make_fault(error, 3, "a", 7).echo


def test_a_disk_that_stalls_ends_nothing(tmp_path: Path) -> None:
    events = tmp_path / "events"
    os.mkfifo(events)  # whoever opens it to write waits until it is read
    pair = Pair(EVENTS=str(events))
    try:
        pair.join()
        time.sleep(HEARTBEAT_TIMEOUT_S + 5)
        reader = os.open(events, os.O_RDWR)
        pair.finish()
        assert {*os.read(reader, 99).decode().split("; ")} >= {"event 0", "event 1"}
        os.close(reader)
    finally:
        pair.end()


def test_what_could_not_be_recorded_in_the_end_is_said() -> None:
    pair = Pair(FAILS="yes")
    try:
        pair.join()
        assert pair.second is not None
        for rank in (pair.first, pair.second):
            rank.finish()
        code, output, errors = pair.first.ended()
        assert code != 0 and "the disk is full" in errors and "finished" not in output
    finally:
        pair.end()

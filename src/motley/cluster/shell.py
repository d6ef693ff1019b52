"""Runs an sh script under any login shell, and returns its output."""

import contextlib
import math
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

_CHUNK = 2**15
_LINGER_S = 2.0  # after an exit status: for what is still to come

# What a login shell of any kind (tcsh, fish) is asked to run: read a script of so many bytes
# from stdin, and run that. So nothing is quoted for the login shell, and nothing but this
# line is ever in an argv.
_LOADER = 'exec sh -c \'read -r n; s=$(dd bs=1 count="$n" 2>/dev/null); eval "$s"\' motley'

# Variables of another Python, which a .bashrc may set; the scripts start that of the environment.
_OTHER_PYTHON = "PYTHONHOME PYTHONPATH PYTHONOPTIMIZE PYTHONSAFEPATH"

# Ends all that a script started when it ends, or when whoever asked is gone.
_TIED = """exec 3<&0 </dev/null
{ trap '' HUP; cat <&3 >/dev/null; kill -TERM 0; } >/dev/null 2>&1 &
exec 3<&-
trap 'status=$?; trap "" TERM; kill -TERM 0; exit $status' EXIT
"""


class TooLong(Exception):  # noqa: N818 - not a fault of ours
    """A script did not end within its limit."""


@dataclass(frozen=True)
class Finished:
    """A script that ended.

    Attributes:
        output, errors: what it printed to stdout and stderr.
        chatter: what the login shell had printed before it; normally nothing.
        begun: it was begun at all.
    """

    code: int
    output: str
    errors: str
    chatter: str
    begun: bool = True


class Readable(Protocol):
    """A file, or the part of it that goes to a host."""

    def read(self, most: int, /) -> bytes:
        """Return the next bytes, at most so many; none at the end."""


class Talk:
    """A script on its way, and its output as it comes.

    What precedes the mark in the output is the login shell's, the rest the script's.

    Attributes:
        tied: stdin stays open, and all that the script starts ends with it or with that.
        sent: what goes to stdin.
        errors: what came from stderr.
    """

    def __init__(
        self,
        script: str,
        words: tuple[object, ...],
        payload: bytes | Readable | None,
        tell: Callable[[str], None] | None,
    ) -> None:
        mark = f"motley-{secrets.token_hex(8)}"
        self.tied = payload is None
        clean = f"export LC_ALL=C\nunset {_OTHER_PYTHON}\n"
        start = f"{clean}set -- {shlex.join(map(str, words))}\necho {mark}\n"
        text = (start + (_TIED if self.tied else "") + script).encode()
        head = b"%d\n" % len(text) + text
        self.sent: Iterator[bytes]
        if payload is None or isinstance(payload, bytes):
            self.sent = iter([head + (payload or b"")])
        else:
            self.sent = chain([head], iter(lambda: payload.read(_CHUNK), b""))
        self.errors = bytearray()
        self._mark = mark.encode() + b"\n"
        self._tell = tell
        self._data = bytearray()
        self._told: int | None = None  # offset of the first byte of a line not told yet

    def take(self, data: bytes) -> None:
        """More of stdout."""
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

    def finish(self, code: int) -> Finished:
        """All that was said."""
        before, mark, after = bytes(self._data).partition(self._mark)
        output, errors, chatter = (
            each.decode(errors="replace") for each in (after, self.errors, before)
        )
        return Finished(code, output, errors, chatter, begun=bool(mark))


def run_here(talk: Talk, limit: float, through: Sequence[str] = ()) -> int:
    """Run it on this machine; its exit status. Raises TooLong after ``limit`` seconds.

    Args:
        through: the words of a program that runs it elsewhere.
    """
    job = subprocess.Popen(
        [*through, "sh", "-c", _LOADER], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdin and job.stdout and job.stderr
    stdin = job.stdin

    def write() -> None:
        with contextlib.suppress(OSError):  # it may end without reading all
            for piece in talk.sent:
                stdin.write(piece)
                stdin.flush()
            if not talk.tied:
                stdin.close()

    def read(stream: Any, take: Callable[[bytes], None]) -> None:
        while data := stream.read1(_CHUNK):
            take(data)

    threads = [
        threading.Thread(target=write, daemon=True),
        threading.Thread(target=read, args=(job.stdout, talk.take), daemon=True),
        threading.Thread(target=read, args=(job.stderr, talk.errors.extend), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        code = job.wait(limit)
    except subprocess.TimeoutExpired:
        raise TooLong from None
    finally:
        with contextlib.suppress(OSError):
            stdin.close()  # to a tied script: end
        if job.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(2)
            job.kill()
            job.wait()
    for thread in threads[1:]:
        thread.join(2)
    return code


def run_over(channel: Any, alive: Callable[[], bool], talk: Talk, limit: float) -> int:
    """Run it at the other end of an open session of ssh; its exit status.

    Args:
        channel: like paramiko's.
        alive: whether the connection is.

    Raises:
        TooLong: after ``limit`` seconds.
        EOFError: the connection is gone.
    """
    deadline, lingers = time.monotonic() + limit, math.inf
    channel.exec_command(_LOADER)
    left = memoryview(next(talk.sent))
    while True:
        # sshd may tell the status before the last of what was said: that has an end of its own,
        # but not where something stays behind that could still speak.
        idle, told = True, channel.exit_status_ready()
        if told:
            lingers = min(lingers, time.monotonic() + _LINGER_S)
        # Asked before the streams: what came before the end is then read.
        ended = told and (channel.eof_received or channel.closed or time.monotonic() > lingers)
        if left and not told and channel.send_ready():
            left = left[channel.send(left[:_CHUNK].tobytes()) :]
            left = left or memoryview(next(talk.sent, b""))
            if not left and not talk.tied:
                channel.shutdown_write()
            idle = False
        while channel.recv_ready():
            talk.take(channel.recv(_CHUNK))
            idle = False
        while channel.recv_stderr_ready():
            talk.errors += channel.recv_stderr(_CHUNK)
            idle = False
        if ended and idle:
            return int(channel.recv_exit_status())
        if not told and not alive():
            raise EOFError
        if time.monotonic() > deadline:
            raise TooLong
        if idle:
            time.sleep(0.01)

"""Functions that copy one packed file to a host, block by block, with a progress bar.

Blocks that the host has already are not sent again.
"""

import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from motley.cluster.login import Finished
from motley.cluster.ssh import Remote, connect
from motley.errors import HostTrouble, MotleyError
from motley.provision.setup_command import VENV, printable

BLOCK = 8 << 20  # bytes of a block, which is hashed and copied as a whole
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Run:
    """A range of consecutive blocks, the last one included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def count_blocks(size: int) -> int:
    """Return the number of blocks of a file of ``size`` bytes; the last block may be shorter."""
    return -(-size // BLOCK)


def bytes_in(run: Run, size: int) -> int:
    """Return the number of bytes in a range of blocks of a file of ``size`` bytes."""
    return min(size, (run.last + 1) * BLOCK) - run.first * BLOCK


def missing(wanted: Sequence[str], there: Mapping[int, str], most: int) -> Iterator[Run]:
    """Yield the blocks that are missing or differ on the host, in ranges of at most ``most``.

    Args:
        wanted: hash of each block.
        there: hashes of the blocks on the host, by number of the block.
        most: largest number of blocks in a range.
    """
    first = None
    for number in range(len(wanted) + 1):
        lacks = number < len(wanted) and there.get(number) != wanted[number]
        if first is not None and (not lacks or number - first == most):
            yield Run(first, number - 1)
            first = None
        if lacks and first is None:
            first = number


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as 20G or 500M. A G is 1,000 M.

    Raises:
        MotleyError: the text is no size.
    """
    result = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([KMGT])B?", text.strip().upper())
    size = round(float(result[1]) * _UNITS[result[2]]) if result else 0
    if not size:
        raise MotleyError(f"--budget {text!r} is not a size; write it as 20G or 500M")
    return size


def format_size(size: float) -> str:
    """Return a number of bytes with its unit: 20 GB, 1.57 MB."""
    unit = next((unit for unit in "TGMK" if size >= _UNITS[unit]), "")
    if not unit:
        return f"{size:.0f} B"
    number = size / _UNITS[unit]
    return f"{number:,.0f} {unit}B" if number >= 99.95 else f"{number:.3g} {unit}B"


_WIDTH = 24
_EVERY_S = 0.1


class Bar:
    """A terminal line that shows how many of ``total`` bytes are done, summed over several parts.

    Use it as a context manager. At the end the line is cleared.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, max(1, total)
        self._done: dict[str, int] = {}
        self._start = self._shown = time.monotonic()
        self._on = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._on:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._on = False

    def at(self, size: int, part: str = "") -> None:
        """Record that ``size`` bytes of a part are done. Any thread may call this."""
        with self._lock:
            self._done[part] = size
            now = time.monotonic()
            if self._on and now > self._shown + _EVERY_S:
                self._shown = now
                print(f"\r\033[K{self._line(now)}", end="", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        done = min(sum(self._done.values()), self._total)
        share, rate = done / self._total, done / max(1e-3, now - self._start)
        remaining = f", {(self._total - done) / rate:,.0f} s left" if rate else ""
        bar = "#" * round(_WIDTH * share)
        return (
            f"{self._title} [{bar:{_WIDTH}}] {share:4.0%} of {format_size(self._total)}, "
            f"{format_size(rate)}/s{remaining}"
        )


_SCRIPT = Path(__file__).with_name("stage_host.sh")
_AT_ONCE = 16  # blocks that are sent before the next check
_SLOWEST = 1e6  # least bytes/s of a host or link; a slower copy times out
_LOOK_S = 30

# Prints how many samples/s are read at random places. $1: file, $2: bytes of a sample.
_READ = """
import os, random, sys, time
file, size = os.open(sys.argv[1], os.O_RDONLY), max(1, int(sys.argv[2]))
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
os.fsync(file)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
most = max(1, os.fstat(file).st_size - size)
dice, start, done = random.Random(0), time.perf_counter(), 0
while done < 400 and time.perf_counter() < start + 2:
    os.pread(file, size, dice.randrange(most))
    done += 1
print(done / (time.perf_counter() - start))
"""


@dataclass(frozen=True)
class Target:
    """The state of a host's disk, at the path to which the file is copied.

    Attributes:
        free: free bytes.
        complete: bytes of the file on the host; None: the host has no such file.
        part: bytes of an interrupted copy on the host; None: the host has no such copy.
    """

    free: int
    complete: int | None = None
    part: int | None = None

    def lacks(self, size: int) -> int:
        """Return how many bytes the disk lacks for a file of ``size`` bytes; 0 if it has room."""
        if self.complete == size:  # most probably the same file
            return 0
        return max(0, size - (self.part or 0) - self.free)


@dataclass(frozen=True)
class Source:
    """A file on this machine that is copied, with the hash of each of its blocks."""

    path: Path
    size: int
    hashes: Sequence[str]


@dataclass(frozen=True)
class Copied:
    """The result of a copy to one host.

    Attributes:
        sent: number of bytes sent.
        seconds: duration of the copy.
        rate: samples/s that one process reads from the host's disk. None: the host has no
            environment in which to measure the rate.
    """

    sent: int
    seconds: float
    rate: float | None


def look(host: str, path: Path) -> Target:
    """Return the state of a host's disk at ``path``.

    Raises:
        HostTrouble: this user may not write to the folder of ``path``, or the host does not answer.
    """
    with connect(host) as remote:
        done = _run(remote, "look", path, 0, limit=_LOOK_S)
    result = dict(line.partition("=")[::2] for line in done.output.splitlines())
    if "not" in result:
        raise HostTrouble(
            "not writable", f"{host}: {printable(result['not'])}",
            "move that file away, or choose another folder with --to",
        )  # fmt: skip
    try:
        return Target(**{name: int(number) for name, number in result.items()})
    except (TypeError, ValueError):
        raise HostTrouble(
            "no shell",
            f"{host} accepts the login, but does not run the script of this command "
            f"({_last(done)})",
            f"see what its login shell does: ssh -- {host} echo hello",
        ) from None  # fmt: skip


def full(host: str, path: Path, target: Target, size: int) -> HostTrouble:
    """Return the HostTrouble of a host whose disk has too little room for the file."""
    return HostTrouble(
        "disk full",
        f"{host} has {format_size(target.free)} free for {path}, which needs {format_size(size)}",
        "free some space, choose another folder with --to, or make the file smaller with "
        "--longest PIXELS or --keep jpeg",
    )


def read_source(
    path: Path, images: tuple[int, int, str], on_progress: Callable[[int], None]
) -> Source:
    """Hash a file on this machine, block by block.

    Args:
        path: path of the file.
        images: position of the first byte of the images in the file, position after the last byte,
            and SHA-256 of the images.
        on_progress: function that is called with the number of bytes read so far.

    Raises:
        MotleyError: the images in the file have changed since they were packed.
    """
    begin, end, wanted = images
    size, whole = path.stat().st_size, hashlib.sha256()
    hashes = []
    with path.open("rb") as file:
        for number in range(count_blocks(size)):
            at, block = number * BLOCK, file.read(BLOCK)
            hashes.append(hashlib.sha256(block).hexdigest())
            whole.update(memoryview(block)[max(0, begin - at) : max(0, end - at)])
            on_progress(at + len(block))
    if whole.hexdigest() != wanted:
        raise MotleyError(
            f"{path} is damaged: the hash of its images has changed since they were packed. "
            "Remove the file, check this disk, and run the same command again"
        )
    return Source(path, size, hashes)


def copy(host: str, source: Source, sample: int, on_progress: Callable[[str, int], None]) -> Copied:
    """Copy a file to a host, to the same path, and measure how fast its disk reads.

    Args:
        host: name of the host.
        source: the file.
        sample: size of one sample in bytes, with which the disk is timed.
        on_progress: function that is called with the host, and the number of bytes that are correct
            on the host so far.

    Raises:
        HostTrouble: the file could not be copied. A later copy keeps the bytes that arrived.
    """
    with connect(host) as remote:
        done = _Copying(remote, source, lambda size: on_progress(host, size))
        start = time.monotonic()
        sent = 0 if remote.here else done.bring()
        seconds = time.monotonic() - start
        on_progress(host, source.size)
        return Copied(sent, seconds, _rate(remote, source.path, sample))


class _Copying:
    """A copy of a file to one host, with a record of the blocks that are correct on the host."""

    def __init__(self, remote: Remote, source: Source, on_progress: Callable[[int], None]) -> None:
        self._remote, self._source, self._on_progress = remote, source, on_progress
        self._right: dict[int, str] = {}
        self._bytes = 0
        self._is_part = False  # True if the blocks belong to an interrupted copy

    def bring(self) -> int:
        """Send the blocks that the host lacks. Return the number of bytes sent."""
        size, hashes, sent = self._source.size, self._source.hashes, 0
        self._look("hash")
        if not self._is_part and len(self._right) < len(hashes):  # another file of this size
            self._look("hash-part")
        for run in list(missing(hashes, self._right, _AT_ONCE)):
            self._send(run)
            sent += bytes_in(run, size)
        if self._is_part:
            self._do("finish", limit=600)
        return sent

    def _look(self, what: str) -> None:
        self._right, self._bytes = {}, 0
        self._do(what, limit=_LOOK_S + 2 * self._source.size / 1e7)

    def _send(self, run: Run) -> None:
        """Write some blocks on the host, and then compare their hashes on the host's disk."""
        size = bytes_in(run, self._source.size)
        with self._source.path.open("rb") as file:
            file.seek(run.first * BLOCK)
            limit = _LOOK_S + size / _SLOWEST
            self._do("write", run, payload=_Piece(file, size), limit=limit)
        if any(number not in self._right for number in range(run.first, run.last + 1)):
            raise self._trouble("the copy on its disk differs from what was sent")

    def _do(self, what: str, *words: object, limit: float, payload: "_Piece | None" = None) -> None:
        done = _run(
            self._remote, what, self._source.path, self._source.size, *words, payload=payload,
            limit=limit, on_line=self._read_line,
        )  # fmt: skip
        if done.code:
            raise self._trouble(_last(done))

    def _read_line(self, line: str) -> None:
        word, _, digest = line.partition(" ")
        hashes = self._source.hashes
        if word == "part":
            self._is_part = True
        elif word.isdecimal() and int(word) < len(hashes) and digest == hashes[int(word)]:
            number = int(word)
            self._right[number] = digest
            self._bytes += bytes_in(Run(number, number), self._source.size)
            self._on_progress(self._bytes)

    def _trouble(self, why: str) -> HostTrouble:
        return HostTrouble(
            "not copied",
            f"{self._remote.host} could not store {self._source.path} ({why})",
            "correct that, and run the same command again, which continues from there",
        )


class _Piece:
    """A part of a file, which is read with the method ``read`` as a file is."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, most: int) -> bytes:
        """Return the next bytes; empty at the end."""
        data = self._file.read(min(most, self._left))
        self._left -= len(data)
        return data


def _run(
    remote: Remote, what: str, path: Path, size: int, *words: object, limit: float,
    payload: _Piece | None = None, on_line: Callable[[str], None] | None = None,
) -> Finished:  # fmt: skip
    return remote.run(
        _SCRIPT.read_text(), what, path.parent, path.name, remote.host, BLOCK, size, *words,
        payload=payload, limit=limit, on_line=on_line,
    )  # fmt: skip


def _rate(remote: Remote, path: Path, sample: int) -> float | None:
    done = remote.run('"$1/bin/python" -c "$2" "$3" "$4"', VENV, _READ, path, sample)
    try:
        return float(done.output)
    except ValueError:
        return None


def _last(done: Finished) -> str:
    lines = (done.output + done.errors).strip().splitlines()
    return printable(lines[-1]) if lines else "it says nothing"

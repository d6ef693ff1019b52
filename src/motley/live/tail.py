"""Follows a file of lines that another process appends to."""

import os
from dataclasses import dataclass
from pathlib import Path

MOST = 256 * 1024  # bytes that are read at once; of more the end, and samples of what is before it,
# unless all is asked for: then the rest is read by the next look
SAMPLES, _SAMPLE = 96, 4096  # how many, and bytes of each: a line or two


@dataclass(frozen=True)
class Appended:
    """What a look found.

    Attributes:
        lines: whole ones, without their end.
        anew: the file was cut or replaced; these lines are all that it holds.
        more: the file holds more, for the next look; where every line is read.
    """

    lines: list[bytes]
    anew: bool = False
    more: bool = False


class Tail:
    """Reads only what was appended since the last look, and keeps what is no whole line yet.

    Args:
        samples: of a part that is too long to be read, lines that are read; they are evenly spread,
            and the first of the file is among them. None: every line is read, part by part.
    """

    def __init__(self, path: Path, samples: int | None = SAMPLES) -> None:
        self._path, self._samples = path, samples
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._torn = b""
        self._heard = 0.0

    def silent_s(self, clock: float) -> float:
        """Seconds since the file last grew, by the clock of the looks."""
        return clock - self._heard

    def look(self, clock: float, wall: float) -> Appended:
        """What is new; nothing where the file is not there or cannot be read.

        Args:
            clock: monotonic seconds. wall: seconds since the epoch, for the age of a file that is
                seen for the first time.
        """
        # It is opened each time: an NFS client asks for the file's size then, and not before.
        try:
            with self._path.open("rb", buffering=0) as file:
                about = os.fstat(file.fileno())
                found, size = (about.st_dev, about.st_ino), about.st_size
                anew = self._file is not None and (found != self._file or size < self._offset)
                if anew:
                    self._offset, self._torn = 0, b""
                grew = anew or size > self._offset
                lines = self._read(file.fileno(), size) if grew else []
        except OSError:
            return Appended([])
        if self._file is None:
            self._heard = clock - max(0.0, wall - about.st_mtime)
        elif grew:
            self._heard = clock
        self._file = found
        return Appended(lines, anew, more=self._offset < size)

    def _read(self, file: int, size: int) -> list[bytes]:
        begin, lines = self._offset, list[bytes]()
        if self._samples is None:
            size = min(size, begin + MOST)
        elif size - begin > MOST:
            lines = _sampled(file, begin, size - MOST, self._samples)
            begin, self._torn = size - MOST, b""
        new = os.pread(file, size - begin, begin)
        data = self._torn + new
        if begin > self._offset:
            data = data.partition(b"\n")[2]  # it begins somewhere in a line
        self._offset = begin + len(new)
        whole, _, torn = data.rpartition(b"\n")
        self._torn = torn if len(torn) <= MOST else b""
        return lines + (whole.split(b"\n") if whole else [])


def _sampled(file: int, begin: int, end: int, samples: int) -> list[bytes]:
    """The first whole line after each of some places, evenly spread."""
    lines, reached = list[bytes](), 0
    for index in range(samples):
        place = begin + (end - begin) * index // samples
        if place < reached:
            continue
        block = os.pread(file, _SAMPLE, place)
        before = 0 if place == 0 else block.find(b"\n") + 1
        after = block.find(b"\n", before)
        if after > before and (before or place == 0):
            lines.append(block[before:after])
            reached = place + after
    return lines

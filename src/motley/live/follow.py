"""A reader that follows one run's records while they are written, and reads only new data."""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from motley.errors import MotleyError
from motley.live.track import RECENT, Track, read_step, since_slower
from motley.plan.speeds import Links
from motley.records.gpu_csv import GpuRows, GpuSample
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder, upgrade_record
from motley.records.training import read_workers

# Bytes that are read at once. If there are more, the end is read, and sampled lines before it. If
# every line is needed, the rest is read by the next call instead.
MOST = 256 * 1024
SAMPLES, _SAMPLE = 96, 4096  # number of sampled lines, and bytes read for each


@dataclass(frozen=True)
class Appended:
    """The lines that were appended to a file since the last read.

    Attributes:
        lines: complete lines, without line ends.
        anew: True if the file was truncated or replaced. ``lines`` then starts at the file's
            beginning.
        more: True if the file has further lines for the next read. Only a reader that reads every
            line sets this value.
    """

    lines: list[bytes]
    anew: bool = False
    more: bool = False


class Tail:
    """A reader of the lines that were appended to a file since the last read.

    An incomplete line is kept until its end arrives.

    Args:
        path: path of the file.
        samples: number of evenly spread lines to read from the skipped part, if too much was
            appended since the last read. Only the end of the new data is then read completely. The
            first line of the file is always read. None: every line is read, in several reads.
    """

    def __init__(self, path: Path, samples: int | None = SAMPLES) -> None:
        self._path, self._samples = path, samples
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._torn = b""
        self._heard = 0.0

    def silent_s(self, clock: float) -> float:
        """Return the seconds since the file last grew.

        Args:
            clock: monotonic seconds now.
        """
        return clock - self._heard

    def look(self, clock: float, wall: float) -> Appended:
        """Return the new lines of the file; none if the file is missing or unreadable.

        Args:
            clock: monotonic seconds now.
            wall: time now in seconds since 1970, from which the age of a file is computed at
                the first read.
        """
        # Each read opens the file, because only then an NFS client requests its size.
        try:
            with self._path.open("rb", buffering=0) as file:
                about = os.fstat(file.fileno())
                result, size = (about.st_dev, about.st_ino), about.st_size
                anew = self._file is not None and (result != self._file or size < self._offset)
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
        self._file = result
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
            data = data.partition(b"\n")[2]  # the data may begin within a line
        self._offset = begin + len(new)
        whole, _, torn = data.rpartition(b"\n")
        self._torn = torn if len(torn) <= MOST else b""
        return lines + (whole.split(b"\n") if whole else [])


def _sampled(file: int, begin: int, end: int, samples: int) -> list[bytes]:
    """Return the first complete line after each of ``samples`` evenly spread positions."""
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


_EVENTS, _SAMPLES = 100, 120  # events that are kept; samples of a device that are kept
_EVALUATIONS = 200  # evaluations that are kept
_AT_ONCE, _FEWEST, _BETWEEN = 640, 8, 4  # lines per read: of all ranks, of a rank, before them
_BEGUN = 3  # steps after which every host has written a record
LAST_WORDS_S = 5.0  # seconds after the end in run.json in which last records arrive
_ANOTHER_GROUP = ("fault", "resume", "lost")  # after these, another group of ranks trains
_ASK_AGAIN_S = 5.0  # seconds between checks of a silent run's lock, which shows if the run lives

K = TypeVar("K", int, str)


class RunFollower:
    """The current state of one run, from its records.

    Args:
        run: folder of the run, which may have no records yet.
        copies: folders with copies of files of other hosts, under the same names.

    Attributes:
        about: content of run.json; empty before it exists.
        problem: reason why run.json cannot be read; empty if run.json was read.
        slow_link: sentence on the slowest network link; empty if all links are about equally fast.
        looks: number of times that all records were read.
        wall: seconds since 1970 at the last read.
        tracks: recorded steps of each rank that writes records.
        devices: for each host, the last samples of its devices by the device's number, which is
            empty for a CPU.
        troubles: reason why another host's records cannot be copied, by host.
        unread: reason why a GPU log cannot be read, by host.
        events: the last events.
        evaluations: the last evaluations, oldest first.
    """

    def __init__(self, run: RunFolder, copies: Sequence[RunFolder] = ()) -> None:
        self.run, self._folders = run, (run, *copies)
        self.about: JsonDict = {}
        self.problem = self.slow_link = ""
        self.tracks: dict[int, Track] = {}
        self.devices: dict[str, dict[str, deque[GpuSample]]] = {}
        self.troubles: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.events: deque[JsonDict] = deque(maxlen=_EVENTS)
        self.evaluations: deque[JsonDict] = deque(maxlen=_EVALUATIONS)
        self._tails: dict[Path, Tail] = {}
        self._rows: dict[Path, GpuRows] = {}
        self._steps: dict[int, Tail] = {}
        self._logs: dict[str, Tail] = {}
        self._seen: tuple[int, ...] = ()
        self._asked = self.clock = self.wall = 0.0
        self._size_of_events = 0
        self.looks = 0

    def look(self, clock: float, wall: float) -> None:
        """Read all new records of the run.

        Args:
            clock: monotonic seconds now. Silence is measured by this clock, because the wall clock
                may jump.
            wall: seconds since 1970.
        """
        self.clock, self.wall = clock, wall
        self.looks += 1
        self._size_of_events = get_size(self.run.events_file)
        for line in self._lines(self.run.events_file, wall, samples=0):
            if isinstance(line.get("event"), str):
                self.events.append(line)
        for line in self._lines(self.run.epochs_file, wall, samples=0):
            self.evaluations.append(line)
        for rank, path in self._find_files(RunFolder.step_files).items():
            self._steps[rank] = self._tail(path, samples=SAMPLES)
            self._look_at_steps(rank, wall)
        for host, path in self._find_files(RunFolder.gpu_files).items():
            self._look_at_devices(host, path, wall)
        self._look_at_run()

    def glance(self, clock: float, wall: float) -> bool:
        """Read the new steps of the leading rank; return True if all records should be read now.

        The caller should read all records if some rank has just become slower, because only the
        records of all ranks show which rank. The caller should also read them if an event was
        recorded.
        """
        rank = self._leading() if self.about.get("status") == "running" else None
        if rank is None:
            return False
        self.clock = clock
        self._look_at_steps(rank, wall)
        has_events = get_size(self.run.events_file) != self._size_of_events
        return has_events or bool(since_slower(self.tracks[rank])[0])

    def may_change(self, clock: float) -> bool:
        """Return True if a read may find new records.

        After the end of a run, its records change only together with its run.json. For a short
        time, the last records may still arrive.
        """
        ended = self.about.get("status") not in (None, "running")
        return not ended or clock - self._asked < LAST_WORDS_S or self._signature() != self._seen

    def _signature(self) -> tuple[int, ...]:
        try:
            about = self.run.run_file.stat()
        except OSError:
            return ()
        return about.st_mtime_ns, about.st_ino, about.st_size

    def _find_files(self, files: Callable[[RunFolder], dict[K, Path]]) -> dict[K, Path]:
        return files_in(self._folders, files)

    def _lines(self, path: Path, wall: float, samples: int = SAMPLES) -> list[JsonDict]:
        """Return the new objects in a file of JSON lines. Skip damaged lines."""
        new = self._tail(path, samples).look(self.clock, wall)
        if new.anew and path == self.run.events_file:
            self.events.clear()
        return [*filter(None, map(read_object, new.lines))]

    def _tail(self, path: Path, samples: int) -> Tail:
        if path not in self._tails:
            self._tails[path] = Tail(path, samples)
        return self._tails[path]

    def _look_at_steps(self, rank: int, wall: float) -> None:
        new = self._steps[rank].look(self.clock, wall)
        last, before = max(_FEWEST, _AT_ONCE // (1 + len(self.tracks))), _BETWEEN
        if new.anew or rank not in self.tracks:
            self.tracks[rank] = Track()
            last, before = RECENT, SAMPLES
        for line in filter(None, map(read_object, thinned(new.lines, last, before))):
            if (step := read_step(upgrade_record(line))) is not None:
                self.tracks[rank].add(step)

    def _look_at_devices(self, host: str, path: Path, wall: float) -> None:
        tail = self._logs[host] = self._tail(path, samples=1)  # the first line names the columns
        new = tail.look(self.clock, wall)
        if new.anew or path not in self._rows:
            self._rows[path] = GpuRows(path)
            self.unread.pop(host, None)
        devices = self.devices.setdefault(host, {})
        for line in new.lines:
            try:
                sample = self._rows[path].read(line.decode(errors="replace"))
            except MotleyError as error:  # the first line is not that of a GPU log
                self.unread[host] = str(error)
                return
            if sample is not None:
                devices.setdefault(sample.gpu or "", deque(maxlen=_SAMPLES)).append(sample)

    def _look_at_run(self) -> None:
        seen = self._signature()
        if not seen:
            return  # the file does not exist yet, or is being replaced
        late = self.clock - self._asked > _ASK_AGAIN_S and self.silent_s() > _ASK_AGAIN_S
        if seen == self._seen and not (late and self.about.get("status") == "running"):
            return
        self._seen, self._asked = seen, self.clock
        try:
            read = self.run.read_run()
        except MotleyError as error:
            self.problem = str(error)
            return
        self.problem = ""
        if read:
            self._record_arrivals(self.about, read)
            self.about, self.slow_link = read, slow_link(read)

    def _record_arrivals(self, before: JsonDict, now: JsonDict) -> None:
        """Append an event for each host that has started or stopped to train.

        The run's own records do not contain these events.
        """
        was, are = trained_hosts(before), trained_hosts(now)
        if not was or not are:
            return
        since = now.get("grouped", now.get("started"))
        for kind, hosts, word in (("back", are - was, "trains"), ("left", was - are, "has left")):
            self.events.extend(
                {"event": kind, "time": since, "text": f"{host} {word}"} for host in sorted(hosts)
            )

    # -- silence

    def silent_s(self) -> float:
        """Return the seconds since any rank wrote a step; a huge number before the first step."""
        return min((tail.silent_s(self.clock) for tail in self._steps.values()), default=1e9)

    def rank_silent_s(self, rank: int) -> float | None:
        """Return the seconds since a rank wrote a step; None if this host lacks its records."""
        tail = self._steps.get(rank)
        return None if tail is None else tail.silent_s(self.clock)

    def host_silent_s(self, host: str) -> float | None:
        """Return the seconds since a host's GPU logger wrote; None if this host lacks the log."""
        tail = self._logs.get(host)
        return None if tail is None else tail.silent_s(self.clock)

    def silence_s(self) -> dict[int, float]:
        """Return the seconds since the first rank last received a message from each silent rank."""
        since = dict[int, float]()
        for line in self.events:
            kind, rank, when = line["event"], line.get("rank"), line.get("time")
            if kind == "silent" and isinstance(rank, int) and isinstance(when, int | float):
                seconds = line.get("seconds")
                since[rank] = when - (seconds if isinstance(seconds, int | float) else 0.0)
            elif kind in ("heard_again", "lost") and isinstance(rank, int):
                since.pop(rank, None)
            elif kind in ("fault", "resume"):  # earlier events are of the job before
                since.clear()
        return {rank: max(0.0, self.wall - when) for rank, when in since.items()}

    def waited_for(self) -> JsonDict | None:
        """Return the event of the straggler that blocks all others, or None.

        The first rank records this event.
        """
        lead = self.lead()
        events = [line for line in self.events if line["event"] in ("waited_for", *_ANOTHER_GROUP)]
        if lead is None or lead.last is None or not events or events[-1]["event"] in _ANOTHER_GROUP:
            return None
        step, rank = events[-1].get("step"), events[-1].get("rank")
        now = isinstance(step, int) and step > lead.last.step and isinstance(rank, int)
        return events[-1] if now else None

    # -- who leads

    def lead(self) -> Track | None:
        """Return the steps of the rank with the latest step; None before the first step."""
        rank = self._leading()
        return None if rank is None else self.tracks[rank]

    def _leading(self) -> int | None:
        known = [(track.last.step, -rank) for rank, track in self.tracks.items() if track.last]
        return -max(known)[1] if known else None


def get_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def files_in(
    folders: Sequence[RunFolder], files: Callable[[RunFolder], dict[K, Path]]
) -> dict[K, Path]:
    """Return a run's files by rank or host, from the run's folder and the folders of copies.

    The first folder takes precedence.

    Args:
        folders: the run's folder, and the folders of copies.
        files: function that returns the files in one folder, by rank or host.
    """
    result: dict[K, Path] = {}
    for folder in reversed(folders):
        result |= files(folder)
    return result


def thinned(lines: Sequence[bytes], last: int, before: int) -> Sequence[bytes]:
    """Return ``before`` evenly spread earlier lines, followed by the last ``last`` lines."""
    rest = len(lines) - last
    if rest <= before:
        return lines
    return [*(lines[rest * index // before] for index in range(before)), *lines[rest:]]


def trained_hosts(about: Mapping[str, Any]) -> set[str]:
    """Return the names of the hosts that train, by run.json."""
    return {str(rank.get("host")) for rank in workers(about)}


def workers(about: Mapping[str, Any]) -> list[JsonDict]:
    """Return the ranks that train now, by run.json."""
    return read_workers(about.get("ranks"))


def hosts_elsewhere(followed: RunFollower) -> list[str]:
    """Return the names of training hosts whose steps and GPU samples this host lacks."""
    lead, there = followed.lead(), dict[str, bool]()
    if lead is None or len(lead.recent) < _BEGUN:
        return []  # the hosts may not have written any records yet
    for worker in workers(followed.about):
        host, rank = str(worker.get("host")), worker["rank"]
        there[host] = there.get(host, False) or host in followed.devices or rank in followed.tracks
    return [host for host, here in there.items() if not here]


def slow_link(about: Mapping[str, Any]) -> str:
    """Return a sentence on the slowest network link in run.json; empty if none is slow."""
    try:
        links = Links.from_json(about["links"])
    except (KeyError, TypeError, AttributeError):
        return ""
    slowest = links.slowest()
    return "" if slowest is None else links.remark(slowest)


def read_object(line: bytes) -> JsonDict | None:
    """Return the JSON object in a line; None if the line is damaged or not an object."""
    try:
        result = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None

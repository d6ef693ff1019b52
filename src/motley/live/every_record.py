"""Reads every record of one run, each once, while it writes them; :mod:`motley.live.follow` keeps
the last ones alone."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.live.follow import Tail, files_in, read_object
from motley.live.track import read_step
from motley.records.gpu_csv import GpuRows, GpuSample
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder, of_older_version


@dataclass
class Position:
    """How far a run's records are read. Who saves it and gives it back reads on from there:

    ``{"steps": {"0": 119, "1": 119}, "evaluation": 120, "events": 7, "samples": {"tesla0": 64}}``

    Attributes:
        steps: the last step of each rank. evaluation: the steps taken before the last one.
        events, samples: lines that are read of events.jsonl, and of each host's GPU log.
    """

    steps: dict[int, int] = field(default_factory=dict)
    evaluation: int = -1
    events: int = 0
    samples: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> JsonDict:
        """The line above."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: Any) -> "Position":
        """What :meth:`as_json` gave; TypeError, ValueError, KeyError or AttributeError of anything
        else."""
        return cls(
            {int(rank): int(step) for rank, step in told["steps"].items()},
            int(told["evaluation"]), int(told["events"]),
            {str(host): int(lines) for host, lines in told["samples"].items()},
        )  # fmt: skip


@dataclass(frozen=True)
class NewRecords:
    """What a look found.

    Attributes:
        steps: lines of each rank. samples: of each host's devices.
        more: there is more already, for the next look.
        position: after them.
    """

    steps: dict[int, list[JsonDict]]
    evaluations: list[JsonDict]
    events: list[JsonDict]
    samples: dict[str, list[GpuSample]]
    more: bool
    position: Position

    def __bool__(self) -> bool:
        return any((self.steps, self.evaluations, self.events, self.samples))


class RunReader:
    """Reads all that is new of a run's records, some hundred KiB of a file at a look.

    A step that is taken again, since the run went back to a checkpoint, is not read again.

    Args:
        run: its folder. copies: as of :class:`motley.live.follow.RunFollower`.
        after: where somebody has read to.
    """

    def __init__(
        self, run: RunFolder, copies: Sequence[RunFolder] = (), after: Position | None = None
    ) -> None:
        self._run, self._folders = run, (run, *copies)
        self._position = copy.deepcopy(after) if after else Position()
        self._tails: dict[Path, Tail] = {}
        self._lines: dict[Path, int] = {}  # that were read since its first
        self._rows: dict[Path, GpuRows] = {}
        self._more = False

    def look(self, clock: float, wall: float) -> NewRecords:
        """Read what is new; arguments as of :meth:`motley.live.follow.Tail.look`."""
        self._more, at = False, self._position
        steps = {
            rank: self._steps(rank, path, clock, wall)
            for rank, path in files_in(self._folders, RunFolder.step_files).items()
        }
        evaluations = []
        for line in filter(None, map(read_object, self._new(self._run.epochs_file, clock, wall))):
            number = line.get("step")
            if isinstance(number, int) and number > at.evaluation:
                at.evaluation = number
                evaluations.append(line)
        events = self._events(clock, wall)
        samples = {
            host: self._samples(host, path, clock, wall)
            for host, path in files_in(self._folders, RunFolder.gpu_files).items()
        }
        return NewRecords(
            {rank: found for rank, found in steps.items() if found}, evaluations, events,
            {host: found for host, found in samples.items() if found}, self._more,
            copy.deepcopy(at),
        )  # fmt: skip

    def left_out(self) -> list[str]:
        """Return a line for each GPU log of which some rows so far are no samples."""
        return [*filter(None, (rows.left_out(none_read=False) for rows in self._rows.values()))]

    def _steps(self, rank: int, path: Path, clock: float, wall: float) -> list[JsonDict]:
        last, found = self._position.steps.get(rank, -1), []
        for line in filter(None, map(read_object, self._new(path, clock, wall))):
            step = read_step(line)
            if step is not None and step.step > last:
                last = step.step
                found.append(of_older_version(line))
        if found:
            self._position.steps[rank] = last
        return found

    def _events(self, clock: float, wall: float) -> list[JsonDict]:
        known, found = self._position.events, []
        for number, line in self._numbered(self._run.events_file, clock, wall):
            self._position.events = max(known, number)
            event = read_object(line)
            if number > known and event is not None and isinstance(event.get("event"), str):
                found.append(event)
        return found

    def _samples(self, host: str, path: Path, clock: float, wall: float) -> list[GpuSample]:
        known, found = self._position.samples.get(host, 0), []
        numbered = self._numbered(path, clock, wall)
        rows = self._rows.setdefault(path, GpuRows(path))
        for number, line in numbered:
            self._position.samples[host] = max(known, number)
            try:
                sample = rows.read(line.decode(errors="replace"))  # the first has the columns
            except MotleyError:  # it is none of ours: nothing can be read of it
                return []
            if sample is not None and number > known:
                found.append(sample)
        return found

    def _numbered(self, path: Path, clock: float, wall: float) -> list[tuple[int, bytes]]:
        """New lines with their numbers, from 1."""
        lines = self._new(path, clock, wall)
        before = self._lines.get(path, 0)
        self._lines[path] = before + len(lines)
        return [*enumerate(lines, start=before + 1)]

    def _new(self, path: Path, clock: float, wall: float) -> list[bytes]:
        if path not in self._tails:
            self._tails[path] = Tail(path, samples=None)
        new = self._tails[path].look(clock, wall)
        if new.anew:
            self._lines[path] = 0
            self._rows.pop(path, None)
        self._more |= new.more
        return new.lines

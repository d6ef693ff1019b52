"""The published series of a run, such as the loss of each step, and their names.

The module reads each record of a run once, even while the run writes records.

Names sort in the order in which users read them. Series whose names begin with ``all/`` describe
all ranks together. Other names begin with ``cpu/HOST/``, ``evaluation/``, ``gpu/HOST_NUMBER/``,
``others/`` or ``rank/NUMBER_HOST/``. With many ranks, only the first rank writes steps, and
``others/`` is the first rank's summary of all other ranks.
"""

import copy
import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.live.follow import Tail, files_in, read_object, workers
from motley.live.snapshot import fraction_of_limit
from motley.live.track import read_step
from motley.live.words import event, mapping, plain
from motley.records.gpu_csv import GpuRows, GpuSample, device_name
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder, upgrade_record
from motley.records.training import EpochRecord, RankGroups


@dataclass
class Position:
    """The position of a reader in a run's records.

    A reader continues from a saved position. The position is saved in this form:

        {"steps": {"0": 119, "1": 119}, "evaluation": 120, "events": 7, "samples": {"tesla0": 64}}

    Attributes:
        steps: the last step that was read, by rank.
        evaluation: number of steps that the run had taken at the last evaluation that was read.
        events: number of lines of events.jsonl that were read.
        samples: number of lines of the GPU log that were read, by host.
    """

    steps: dict[int, int] = field(default_factory=dict)
    evaluation: int = -1
    events: int = 0
    samples: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> JsonDict:
        """Return the position in the form in which it is saved; see :class:`Position`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: Any) -> "Position":
        """Return the position that :meth:`as_json` has encoded.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: ``told`` is not a position in this
                form.
        """
        return cls(
            {int(rank): int(step) for rank, step in told["steps"].items()},
            int(told["evaluation"]), int(told["events"]),
            {str(host): int(lines) for host, lines in told["samples"].items()},
        )  # fmt: skip


@dataclass(frozen=True)
class NewRecords:
    """The records that one reading found.

    Attributes:
        steps: lines of steps, by rank.
        evaluations: lines of evaluations.
        events: lines of events.
        samples: samples of devices, by host.
        more: True if further records are available already.
        position: position of the reader after these records.
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
    """A reader of all new records of a run, at most some hundred KiB of each file at a time.

    If the run returns to a checkpoint and repeats steps, the repeated steps are not read again.

    Args:
        run: folder of the run.
        copies: folders with copies of other hosts' records; see
            :class:`motley.live.follow.RunFollower`.
        after: position up to which an earlier reader has read the records.
    """

    def __init__(
        self, run: RunFolder, copies: Sequence[RunFolder] = (), after: Position | None = None
    ) -> None:
        self._run, self._folders = run, (run, *copies)
        self._position = copy.deepcopy(after) if after else Position()
        self._tails: dict[Path, Tail] = {}
        self._lines: dict[Path, int] = {}  # number of lines that were read of each file
        self._rows: dict[Path, GpuRows] = {}
        self._more = False

    def look(self, clock: float, wall: float) -> NewRecords:
        """Return the new records; for the arguments see :meth:`motley.live.follow.Tail.look`."""
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
            {rank: result for rank, result in steps.items() if result}, evaluations, events,
            {host: result for host, result in samples.items() if result}, self._more,
            copy.deepcopy(at),
        )  # fmt: skip

    def left_out(self) -> list[str]:
        """Return a line for each GPU log with rows that are not valid samples."""
        return [*filter(None, (rows.left_out(none_read=False) for rows in self._rows.values()))]

    def _steps(self, rank: int, path: Path, clock: float, wall: float) -> list[JsonDict]:
        last, result = self._position.steps.get(rank, -1), []
        for line in filter(None, map(read_object, self._new(path, clock, wall))):
            step = read_step(line)
            if step is not None and step.step > last:
                last = step.step
                result.append(upgrade_record(line))
        if result:
            self._position.steps[rank] = last
        return result

    def _events(self, clock: float, wall: float) -> list[JsonDict]:
        known, result = self._position.events, []
        for number, line in self._numbered(self._run.events_file, clock, wall):
            self._position.events = max(known, number)
            event = read_object(line)
            if number > known and event is not None and isinstance(event.get("event"), str):
                result.append(event)
        return result

    def _samples(self, host: str, path: Path, clock: float, wall: float) -> list[GpuSample]:
        known, result = self._position.samples.get(host, 0), []
        numbered = self._numbered(path, clock, wall)
        rows = self._rows.setdefault(path, GpuRows(path))
        for number, line in numbered:
            self._position.samples[host] = max(known, number)
            try:
                sample = rows.read(line.decode(errors="replace"))  # the first line has the columns
            except MotleyError:  # the file is no GPU log of Motley's
                return []
            if sample is not None and number > known:
                result.append(sample)
        return result

    def _numbered(self, path: Path, clock: float, wall: float) -> list[tuple[int, bytes]]:
        """Return the new lines of a file with their line numbers, from 1."""
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


Parameter = str | float | int | bool

# Published names of the fields of a step's line.
_GLOBAL = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "loss_scale": "loss_scale",
           "n_global": "global_batch", "epoch": "epoch"}  # fmt: skip
_OWN = {"t_data": "data_s", "t_compute": "compute_s", "t_wait": "wait_s", "t_comm": "comm_s",
        "t_opt": "opt_s", "t_host": "host_s", "n_local": "samples",
        "mem_peak_mib": "memory_peak_mib"}  # fmt: skip
_OTHERS = {"least": "first", "middle": "middle", "largest": "last"}  # order of being ready
_SAMPLE = ("load", "memory_used_mib", "temperature_c", "power_w", "others_memory_mib")
_LONGEST = 60  # characters of a part of a name


@dataclass
class Row:
    """The values of one step, one evaluation or one sample of a device.

    Attributes:
        step: number of the step; None: unknown. For an evaluation, the number of steps taken before
            it.
        time: seconds since 1970.
        values: values by name; unknown values are left out.
    """

    step: int | None
    time: float
    values: dict[str, float]


@dataclass(frozen=True)
class Note:
    """An event of a run, with a description for the user.

    Attributes:
        step: step of the event; None: it belongs to no step.
        time: seconds since 1970.
        kind: kind of the event.
        text: description of the event.
    """

    step: int | None
    time: float
    kind: str
    text: str


def step_rows(about: Mapping[str, Any], new: NewRecords, known: int) -> list[Row]:
    """Return one row per step, with values of all ranks that have recorded the step.

    Args:
        about: content of the run's run.json.
        new: records since the last reading.
        known: the last step for which the series ``all/`` are already published.
    """
    rows: dict[int, Row] = {}
    groups = RankGroups(about)
    known_ranks = (worker["rank"] for group in groups.groups for worker in group["ranks"])
    width = len(str(max([*known_ranks, *new.steps], default=0)))
    for rank, lines in sorted(new.steps.items()):
        for line in lines:
            host = groups.worker(rank, line["step"]).get("host")
            host = f"_{clean(str(host))}" if host else ""
            row = rows.setdefault(line["step"], Row(line["step"], line["time"], {}))
            row.time = max(row.time, line["time"])
            if line["step"] > known:
                known = line["step"]
                row.values |= _of_all(about, line)
            own = {name: line.get(field) for field, name in _OWN.items()}
            row.values |= _named(f"rank/{rank:0{width}}{host}", own)
    return [rows[step] for step in sorted(rows) if rows[step].values]


def _of_all(about: Mapping[str, Any], line: JsonDict) -> dict[str, float]:
    values = {name: line.get(field) for field, name in _GLOBAL.items()}
    rate, count = line.get("samples_per_s"), line.get("n_global")
    if isinstance(rate, int | float) and isinstance(count, int) and count:
        weight = line.get("weight")
        unit = clean(str(mapping(about, "task").get("unit") or "samples"))
        values[f"{unit}_per_s"] = rate * (
            weight / count if isinstance(weight, int | float) else 1.0
        )
        if mapping(mapping(about, "plan"), "forecast").get("global_batch") == count:
            values["fraction_of_limit"] = fraction_of_limit(about, rate)
    summary = line.get("others_ready")
    others = {
        f"{word}_ready_s": mapping(summary, name).get("ready_s")
        for name, word in _OTHERS.items() if isinstance(summary, dict)
    }  # fmt: skip
    return _named("all", values) | _named("others", others)


def evaluation_rows(new: NewRecords) -> list[Row]:
    """Return one row per evaluation."""
    return [
        Row(line["step"], line["time"], values)
        for line in new.evaluations
        if _is_number(line.get("time"))
        and (values := _named("evaluation", EpochRecord.read_metrics(line)))
    ]


def sample_rows(new: NewRecords) -> list[Row]:
    """Return one row per sample of a device."""
    return [
        Row(sample.step, sample.time, values)
        for host, samples in sorted(new.samples.items()) for sample in samples
        if (values := _of_device(host, sample))
    ]  # fmt: skip


def _of_device(host: str, sample: GpuSample) -> dict[str, float]:
    where = f"cpu/{clean(host)}" if sample.gpu is None else f"gpu/{clean(host)}_{clean(sample.gpu)}"
    return _named(where, {name: getattr(sample, name) for name in _SAMPLE})


def notes(new: NewRecords, now: float) -> list[Note]:
    """Return one note per event.

    Args:
        new: records since the last reading.
        now: time that is used for events without a time, in seconds since 1970.
    """
    result = []
    for line in new.events:
        text, step = event(line), line.get("step")
        step = step if type(step) is int and step >= 0 else None
        when = now if text.time is None else text.time
        result.append(Note(step, when, clean(text.kind), text.text or text.kind))
    return result


def parameters(about: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the options, versions, hosts and plan of a run by name, without unset options."""
    plan, ranks = mapping(about, "plan"), workers(about)
    counts = plan.get("counts")
    facts: JsonDict = {
        "command": _command(about.get("command")),
        "commit": about.get("commit"),
        "task": mapping(about, "task").get("title"),
        "hosts": ", ".join(dict.fromkeys(str(each["host"]) for each in ranks if each.get("host"))),
        "ranks": len(ranks) or None,
        "config": about.get("config"),
        "versions": about.get("versions"),
        "model": about.get("model"),
        "plan": {
            "wire": plan.get("wire"),
            "samples_by_rank": " + ".join(map(str, counts)) if isinstance(counts, list) else None,
            **{name: mapping(plan, "forecast").get(name) for name in ("step_s", "limit_s")},
        },
        "rank": {f"{worker['rank']:0{len(str(len(ranks)))}}": _device(worker) for worker in ranks},
    }
    return dict(_flat(facts))


def _command(words: Any) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def _device(worker: Mapping[str, Any]) -> str:
    """Return a worker's host, device and precision, for example ``tesla3, RTX 3070, bf16``."""
    facts = (
        worker.get("host"),
        device_name(str(worker.get("device") or "")),
        worker.get("precision"),
    )
    return ", ".join(str(fact) for fact in facts if fact)


def _flat(told: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Parameter]]:
    for name, value in told.items():
        name = f"{before}{clean(str(name))}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, bool | int | float):
            yield name, value
        elif value not in (None, "", []):
            yield name, plain(value)


def _named(before: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, by full name. A full name begins with ``before``."""
    known = {name: value for name, value in values.items() if _is_number(value)}
    return {f"{before}/{clean(name)}": float(value) for name, value in known.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def clean(name: str) -> str:
    """Return a name in which ``_`` replaces characters that trackers treat as special."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST] or "_"

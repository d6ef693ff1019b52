"""The folder of a run, ``logs/<run>/``: its lock, its files, and their writers and readers.

No other module has names of files in it.

The lock is flock(2) on the file ``.lock``, which names its holder. NFS passes such locks on to its
server, so all hosts see them; where a disk is mounted without locks (Lustre without ``flock``,
BeeGFS by default) they are not known on other hosts, or at all.

    run.json              what was run, on what, and how it ended
    steps.rank<k>.jsonl   one line a training step of rank k; see motley.records.training
    epochs.jsonl          one line an evaluation
    events.jsonl          overflow, left-out rank, bad image, fault, ...
    trace.rank<k>.json.gz profiled steps of a rank; see motley.records.trace
    published.<tracker>.json   how far it is published there; see motley.publish.publisher
    nccl.rank<k>.<host>.<process>.log   output of NCCL, where NCCL_DEBUG asks for it
    gpu.<host>.csv        one line a GPU and sample (a host without a GPU: one line a sample)
    checkpoints/          see motley.checkpoint.store

An unknown value is empty (null in JSON), never 0. A line that a crash cut short costs itself
alone: see motley.records.json_files.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from motley.errors import MotleyError
from motley.records.gpu_csv import GpuLog
from motley.records.json_files import (
    JsonDict,
    JsonLines,
    Reserve,
    keep_lines,
    make_gone_error,
    read_json,
    read_json_lines,
    read_last_lines,
    to_json,
    write_json,
)
from motley.records.training import OWN_PART, OWN_STEP

_FILE = ".lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # other errors: this disk has no locks
_TRIES, _BETWEEN_S = 10, 0.02  # a process that checks if a lock is free holds it briefly


def take_folder(folder: Path, busy: str, then: str, name: str = _FILE) -> TextIO:
    """Take a folder for this process; the lock goes when the returned file is closed.

    Args:
        folder: the folder.
        busy: message if another process has the folder. Its holder and the time are appended.
        then: remedy in that message.
        name: name of the lock file, if a part of the folder is locked and not all of it.
    """
    file = (folder / name).open("a+")
    for remaining in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in _HELD:
                break
            if not remaining:
                who = _owner(file)
                file.close()
                raise MotleyError(f"{busy}{who}; {then}") from None
            time.sleep(_BETWEEN_S)
    own = {"host": os.uname().nodename, "pid": os.getpid(), "since": time.time()}
    with contextlib.suppress(OSError):  # of a full disk: it is locked all the same
        file.truncate(0)
        file.write(json.dumps(own))
        file.flush()
    return file


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with this file; a disk without locks lets all in."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _owner(file: TextIO) -> str:
    """Return the owner of a lock in words; empty if the owner is unknown.

    An example is ", by process 714 on ecetesla0 since 2026-11-24 20:18:15".
    """
    try:
        file.seek(0)
        text = json.loads(file.read(1000))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(text["since"]))
        return f", by process {int(text['pid'])} on {text['host']} since {since}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return ""


def refuse_link(folder: Path) -> None:
    """Raise MotleyError where a run's folder leads elsewhere: to another run's records, say."""
    if folder.is_symlink():
        raise MotleyError(
            f"the run folder {folder} is a symbolic link, to {folder.resolve()}; name that one by "
            "--logs DIR and --run NAME, or by --resume PATH"
        )


def is_free(folder: Path) -> bool:
    """Return True if surely no living process has taken a folder."""
    try:
        with (folder / _FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # it is held, or that cannot be found out
        return False
    return True


# Readers rely on these parts of run.json, each null or absent where it is not known.
_OBJECTS = ("config", "result", "failure", "plan", "task")
_LISTS = ("ranks", "left_out", "facts", "groups", "advice")  # of objects
_MEND = "; restore it, or write {} into it: all other records are read then"


def _misshapen(content: Mapping[str, Any]) -> str:
    """Return which part of run.json has a shape that no writer gave it; empty if all are right."""
    plan = content.get("plan")
    forecast = plan.get("forecast") if isinstance(plan, dict) else None
    named = {**{name: content.get(name) for name in _OBJECTS}, "forecast": forecast}
    for name, result in named.items():
        if not isinstance(result, dict | None):
            return f"its {name} is no object"
    for name in _LISTS:
        result = content.get(name)
        objects = isinstance(result, list) and all(isinstance(each, dict) for each in result)
        if result is not None and not objects:
            return f"its {name} is no list of objects"
    ranks = content.get("ranks") or []
    if any(not isinstance(each.get("host", ""), str | None) for each in ranks):
        return "one of its hosts is no name"
    if any(isinstance(value, str) for value in (content.get("result") or {}).values()):
        return "its result holds a text in place of a number"
    return ""


class RunFolder:
    """The folder of one run, ``DIR/NAME``: opens writers and finds files.

    Several ranks share it where they share a disk; each writes only files of its own
    (rank 0: run.json, epochs.jsonl, events.jsonl, checkpoints/).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reserve: Reserve | None = None
        self._written: Mapping[str, Any] | None = None

    @property
    def checkpoints(self) -> Path:
        """See motley.checkpoint.store."""
        return self.path / "checkpoints"

    @property
    def run_file(self) -> Path:
        """Its run.json."""
        return self.path / "run.json"

    @property
    def epochs_file(self) -> Path:
        """Its ``epochs.jsonl``."""
        return self.path / "epochs.jsonl"

    @property
    def events_file(self) -> Path:
        """Its ``events.jsonl``."""
        return self.path / "events.jsonl"

    def create(self) -> None:
        """Make the folder; raise MotleyError if that is not possible, or a link is there."""
        refuse_link(self.path)  # each host may have a disk of its own
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Two hosts that share the disk may well have a process of the same number.
            probe = self.path / f".probe.{os.uname().nodename}.{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise MotleyError(
                f"cannot write to the run folder {self.path}: {error.strerror}; choose another "
                "place with --logs DIR"
            ) from None

    def lock(self) -> TextIO:
        """Take the folder for this process; see :func:`take_folder`."""
        return take_folder(
            self.path, f"the run folder {self.path} is in use by another run",
            "wait for it, end it to take its place, or choose another name with --run NAME (if "
            f"that host is gone for good and the lock stays, remove {self.path / '.lock'})",
        )  # fmt: skip

    def published_file(self, tracker: str) -> Path:
        """Its ``published.<tracker>.json``."""
        return self.path / f"published.{tracker}.json"

    # -- run.json

    def write_run(self, content: Mapping[str, Any], keep_room: bool = False) -> None:
        """Replace run.json in one piece.

        At least ``status`` (running, finished, stopped or failed), ``result``, ``config``,
        ``task``, ``facts``, ``plan``, ``start`` (seconds, see motley.launch.start_watch); as in
        ``{"status": "finished", "result": {"top1": 0.97, ...}, "config": {"model": "vit_digits",
        ...}, "ranks": [{"rank": 0, "host": "a"}], "start": {"imports": 1.9, ...}, ...}``.

        Args:
            content: content of the file.
            keep_room: reserve room on the disk, and a file descriptor, so that the file can be
                replaced whatever else fails.
        """
        if keep_room:
            self._reserve = Reserve(self.run_file, content)
        write_json(self.run_file, content, None if keep_room else self._reserve)
        self._written = content
        if self._reserve is not None and not keep_room:
            self._reserve.give_back()
            self._reserve = None

    def read_run(self) -> JsonDict:
        """Read run.json; an empty dict if there is none, MotleyError if it is damaged.

        A run whose file says running is ``stopped`` if no process holds its lock.
        """
        try:
            content = read_json(self.run_file)
        except FileNotFoundError:
            return {}
        except MotleyError as error:
            raise MotleyError(f"{error}{_MEND}") from None
        if result := _misshapen(content):
            raise MotleyError(f"{self.run_file} is damaged: {result}{_MEND}")
        if content.get("status") == "running" and is_free(self.path):
            content["status"] = "stopped"
        model = (content.get("config") or {}).get("model")
        if model and "task" not in content:  # of an older version, which knew images alone
            title = f"{model} on {content['config'].get('dataset', 'images')}"
            content["task"] = {"name": "image", "unit": "images", "weight": 1.0, "title": title}
            upgrade_record(content.get("result") or {})
        return content

    def update_run(self, **changes: Any) -> None:
        """Change some fields of run.json, which it has; MotleyError if it is gone."""
        path = self.run_file
        if not path.exists():
            raise make_gone_error(path)
        self.write_run({**(self._written or self.read_run()), **changes})

    # -- jsonl

    def step_file(self, rank: int) -> Path:
        """Its ``steps.rank<k>.jsonl``."""
        return self.path / f"steps.rank{rank}.jsonl"

    def steps(self, rank: int) -> "JsonLines":
        """Open ``steps.rank<k>.jsonl`` for appending."""
        return JsonLines(self.step_file(rank))

    def epochs(self) -> "JsonLines":
        """Open ``epochs.jsonl`` for appending."""
        return JsonLines(self.epochs_file)

    def event(self, kind: str, /, **content: Any) -> None:
        """Append one event, durable at once.

        An example of a line:

        ``{"time": 1763693554.1, "event": "overflow", "step": 3, "loss_scale": 65536.0}``
        """
        with JsonLines(self.events_file) as lines:
            lines.write({"time": time.time(), "event": kind, **content})

    def drop_after(
        self, step: int, rank: int, ranks: Sequence[int], diverges: bool = False
    ) -> None:
        """Drop this rank's lines of steps that will be taken again after a resume.

        The first of ``ranks``, which train now, also does it for those that were there before.

        Args:
            step: step at which the run continues.
            rank: number of this rank.
            ranks: numbers of the ranks that train now.
            diverges: True if each rank takes steps of its own; see motley.engines.protocol.
        """
        first = rank == ranks[0]
        lost = [other for other in self._ranks() if other not in ranks] if first else []
        for each in (rank, *lost):
            keep_lines(self.step_file(each), step)
            (self.path / f"done.rank{each}.json").unlink(missing_ok=True)
        if first:
            keep_lines(self.epochs_file, step + 1)
            self._complete(rank, step, OWN_PART | OWN_STEP if diverges else OWN_PART)

    def _complete(self, rank: int, step: int, unknown: JsonDict) -> None:
        """Add a rank's missing records of steps before ``step`` from the records of others.

        The rank, or the one that had its number before, may have been killed before it wrote the
        last ones.
        """
        path = self.step_file(rank)
        last = max((line["step"] for line in read_last_lines(path)), default=-1)  # all are ours
        if last >= step - 1:
            return
        missing: dict[int, JsonDict] = {}
        for other in self._ranks():
            for line in read_last_lines(self.step_file(other)):
                if isinstance(line.get("step"), int) and last < line["step"] < step:
                    missing.setdefault(line["step"], {**line, **unknown})
        with self.steps(rank) as lines:
            for _, line in sorted(missing.items()):
                lines.write(line)

    def read_steps(self) -> dict[int, list[JsonDict]]:
        """All step records by rank, in order."""
        return {
            rank: [upgrade_record(line) for line in read_json_lines(path)]
            for rank, path in self.step_files().items()
        }

    def read_last_steps(self) -> dict[int, list[JsonDict]]:
        """Return the last some hundred step records of each rank, in order."""
        return {rank: read_last_lines(path) for rank, path in self.step_files().items()}

    def step_files(self) -> dict[int, Path]:
        """Files of step records by rank, ascending."""
        return {rank: self.step_file(rank) for rank in self._ranks()}

    def last_steps(self) -> list[JsonDict]:
        """Return the last step records, some hundred, of the rank that has written last."""
        files = sorted(self.path.glob("steps.rank*.jsonl"), key=lambda path: path.stat().st_mtime)
        return read_last_lines(files[-1]) if files else []

    def record_files(self) -> list[Path]:
        """Its files of lines: steps, evaluations, events."""
        return sorted(self.path.glob("*.jsonl"))

    def _ranks(self) -> list[int]:
        """Ranks that have step records here."""
        return _numbers(self.path, "steps.rank", ".jsonl")

    def read_epochs(self) -> list[JsonDict]:
        """All evaluations, in order."""
        return list(read_json_lines(self.epochs_file))

    def read_events(self) -> list[JsonDict]:
        """All events, in order."""
        return list(read_json_lines(self.events_file))

    # -- completion, and the GPU log

    def write_done(self, rank: int, host: str) -> None:
        """Write the completion record of this rank, ``done.rank<k>.json``.

        An example:

        ``{"rank": 0, "host": "a", "time": 1763693554.1}``
        """
        path = self.path / f"done.rank{rank}.json"
        path.write_text(to_json({"rank": rank, "host": host, "time": time.time()}) + "\n")

    def trace(self, rank: int) -> Path:
        """Return the path of a rank's profiled steps; see motley.records.trace."""
        return self.path / f"trace.rank{rank}.json.gz"

    def traces(self) -> list[Path]:
        """Return the traces of all ranks that have one, in order."""
        result = {rank: self.trace(rank) for rank in _numbers(self.path, "trace.rank", ".json.gz")}
        return [result[rank] for rank in sorted(result)]

    def trace_of_all(self) -> Path:
        """They are put together here."""
        return self.path / "trace.json.gz"

    def nccl_log(self, rank: int) -> str:
        """Return the path for NCCL_DEBUG_FILE: NCCL puts in the host and the process."""
        path = self.path.absolute() / f"nccl.rank{rank}."
        return f"{path}".replace("%", "%%") + "%h.%p.log"

    def gpu_log(self, host: str) -> "GpuLog":
        """Open ``gpu.<host>.csv`` for appending."""
        return GpuLog(self.gpu_file(host))

    def gpu_file(self, host: str) -> Path:
        """Its ``gpu.<host>.csv``."""
        return self.path / f"gpu.{host}.csv"

    def gpu_files(self) -> dict[str, Path]:
        """GPU logs by host."""
        result = sorted(self.path.glob("gpu.*.csv"))
        return {path.name.removeprefix("gpu.").removesuffix(".csv"): path for path in result}


def _numbers(folder: Path, before: str, after: str) -> list[int]:
    """Return the numbers in the names of files, ascending."""
    names = (path.name for path in folder.glob(f"{before}*{after}"))
    numbers = (name.removeprefix(before).removesuffix(after) for name in names)
    return sorted(int(number) for number in numbers if number.isdigit())


def find_runs(paths: list[Path]) -> list[RunFolder]:
    """Every run folder at or under ``paths``, oldest name first; a run holds no other."""
    result = set()
    for path in paths:
        for folder, names, files in os.walk(path):
            if "run.json" in files:
                result.add(Path(folder))
                names.clear()  # its checkpoints may be many files
    return [RunFolder(path) for path in sorted(result)]


def upgrade_record(line: JsonDict) -> JsonDict:
    """Return a record of an older version with the rate by its present name."""
    if "images_per_s" in line:
        line["samples_per_s"] = line.pop("images_per_s")
    return line


_NAMED = 5  # runs that are named in an error


def open_run(path: str | Path) -> RunFolder:
    """Return the run of a folder, such as ``logs/RUN``.

    Raises:
        MotleyError: it is none; says what it is.
    """
    folder = Path(path)
    if not folder.exists():
        raise MotleyError(f"there is no {folder}: name a run's folder, as in logs/RUN")
    if not folder.is_dir():
        raise MotleyError(f"{folder} is a file: name the run's folder, {folder.parent}")
    run = RunFolder(folder)
    if run.run_file.exists() or run.record_files():
        return run
    result = find_runs([folder])
    if not result:
        raise MotleyError(f"{folder} is no run and holds none: it has no run.json")
    names = [str(each.path) for each in sorted(result, key=_changed, reverse=True)]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise MotleyError(
        f"{folder} holds {len(names)} run{'s' if len(names) > 1 else ''}; name one, the newest "
        f"first: {', '.join(names[:_NAMED])}{more}"
    )


def _changed(run: RunFolder) -> float:
    return run.run_file.stat().st_mtime

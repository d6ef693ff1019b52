"""The folder of a run, ``logs/<run>/``: its lock, its files, and their writers and readers.

This module alone contains the names of the files in the folder.

The lock is flock(2) on the file ``.lock``, which names the holder of the lock. NFS passes flock(2)
on to its server, so that the lock holds on all hosts. Some disks are mounted without these locks
(Lustre without ``flock``, BeeGFS by default). On such a disk, the lock does not exclude processes
of other hosts, or excludes no process at all.

    run.json              what was run, on what, and how it ended
    steps.rank<k>.jsonl   one line per training step of rank k; see motley.records.training
    epochs.jsonl          one line per evaluation
    events.jsonl          overflow, left-out rank, bad image, fault, ...
    trace.rank<k>.json.gz profiled steps of a rank; see motley.records.trace
    published.<tracker>.json   extent of publication to a tracker; see motley.publish.publisher
    nccl.rank<k>.<host>.<process>.log   output of NCCL, if NCCL_DEBUG asks for it
    gpu.<host>.csv        one line per GPU and sample (a host without a GPU: one line per sample)
    checkpoints/          see motley.checkpoint.store

An unknown value is empty (null in JSON), never 0. If a crash cuts a line short, all other lines
remain valid: see motley.records.json_files.
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
from motley.text import plural

_FILE = ".lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # other errors mean that the disk has no locks
_TRIES, _BETWEEN_S = 10, 0.02  # a process that checks if a lock is free holds it briefly


def take_folder(folder: Path, busy: str, then: str, name: str = _FILE) -> TextIO:
    """Lock a folder for this process, and return the lock file.

    Closing the returned file releases the lock.

    Args:
        folder: the folder.
        busy: error message if another process holds the lock. The holder of the lock and the time
            are appended.
        then: part of the error message that explains the fix.
        name: name of the lock file, if only a part of the folder is locked.

    Raises:
        MotleyError: another process holds the lock.
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
    with contextlib.suppress(OSError):  # the lock holds even if the disk is full
        file.truncate(0)
        file.write(json.dumps(own))
        file.flush()
    return file


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is in a ``with`` block of this function with the same file.

    On a disk without locks, no process waits.
    """
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _owner(file: TextIO) -> str:
    """Return a phrase that names the holder of a lock; empty if the holder is unknown.

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
    """Raise MotleyError if a run's folder is a symbolic link, which may lead to another run."""
    if folder.is_symlink():
        raise MotleyError(
            f"the run folder {folder} is a symbolic link to {folder.resolve()}; name that folder "
            "with --logs DIR and --run NAME, or with --resume PATH"
        )


def is_free(folder: Path) -> bool:
    """Return True if no running process has locked a folder. Return False in case of doubt."""
    try:
        with (folder / _FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # the lock is held, or its state is unknown
        return False
    return True


# Readers rely on these fields of run.json. Each is null or absent if it is unknown.
_OBJECTS = ("config", "result", "failure", "plan", "task")
_LISTS = ("ranks", "left_out", "facts", "groups", "advice")  # lists of objects
_MEND = "; restore it, or write {} into it, and all other records can still be read"


def _misshapen(content: Mapping[str, Any]) -> str:
    """Return a description of a field of run.json with a wrong type; empty without one."""
    plan = content.get("plan")
    forecast = plan.get("forecast") if isinstance(plan, dict) else None
    named = {**{name: content.get(name) for name in _OBJECTS}, "forecast": forecast}
    for name, result in named.items():
        if not isinstance(result, dict | None):
            return f"its {name} is not an object"
    for name in _LISTS:
        result = content.get(name)
        objects = isinstance(result, list) and all(isinstance(each, dict) for each in result)
        if result is not None and not objects:
            return f"its {name} is not a list of objects"
    ranks = content.get("ranks") or []
    if any(not isinstance(each.get("host", ""), str | None) for each in ranks):
        return "the host of a rank is not a string"
    if any(isinstance(value, str) for value in (content.get("result") or {}).values()):
        return "its result holds a string instead of a number"
    return ""


class RunFolder:
    """The folder of one run, ``DIR/NAME``, with methods that open and find its files.

    Several ranks may share the folder on one disk. Each rank writes only its own files. Rank 0 also
    writes run.json, epochs.jsonl, events.jsonl and checkpoints/.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reserve: Reserve | None = None
        self._written: Mapping[str, Any] | None = None

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints; see motley.checkpoint.store."""
        return self.path / "checkpoints"

    @property
    def run_file(self) -> Path:
        """Path of run.json."""
        return self.path / "run.json"

    @property
    def epochs_file(self) -> Path:
        """Path of ``epochs.jsonl``."""
        return self.path / "epochs.jsonl"

    @property
    def classes_file(self) -> Path:
        """Path of ``classes.csv``."""
        return self.path / "classes.csv"

    @property
    def confusion_file(self) -> Path:
        """Path of ``confusion.csv``."""
        return self.path / "confusion.csv"

    @property
    def samples_file(self) -> Path:
        """Path of ``samples.txt``."""
        return self.path / "samples.txt"

    @property
    def worst_file(self) -> Path:
        """Path of ``worst.json``."""
        return self.path / "worst.json"

    @property
    def events_file(self) -> Path:
        """Path of ``events.jsonl``."""
        return self.path / "events.jsonl"

    def create(self) -> None:
        """Create the folder.

        Raises:
            MotleyError: the folder cannot be created or written to, or is a link.
        """
        refuse_link(self.path)  # each host may have a disk of its own
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Two hosts that share the disk may have processes with the same number.
            probe = self.path / f".probe.{os.uname().nodename}.{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise MotleyError(
                f"cannot write to the run folder {self.path}: {error.strerror}; choose another "
                "place with --logs DIR"
            ) from None

    def lock(self) -> TextIO:
        """Lock the folder for this process. Return the lock file; see :func:`take_folder`."""
        return take_folder(
            self.path, f"the run folder {self.path} is in use by another run",
            "wait until that run ends, end it to take its place, or choose another name with "
            "--run NAME (if that host is gone for good and the lock stays, remove "
            f"{self.path / '.lock'})",
        )  # fmt: skip

    def published_file(self, tracker: str) -> Path:
        """Return the path of ``published.<tracker>.json``."""
        return self.path / f"published.{tracker}.json"

    # -- run.json

    def write_run(self, content: Mapping[str, Any], keep_room: bool = False) -> None:
        """Replace run.json atomically.

        The content has at least ``status`` (running, finished, stopped or failed), ``result``,
        ``config``, ``task``, ``facts``, ``plan`` and ``start`` (seconds, see
        motley.launch.start_watch). An example is ``{"status": "finished", "result": {"top1": 0.97,
        ...}, "config": {"model": "vit_digits", ...}, "ranks": [{"rank": 0, "host": "a"}], "start":
        {"imports": 1.9, ...}, ...}``.

        Args:
            content: content of the file.
            keep_room: True: reserve disk space and a file descriptor, so that the file can be
                replaced even if none are left.
        """
        if keep_room:
            self._reserve = Reserve(self.run_file, content)
        write_json(self.run_file, content, None if keep_room else self._reserve)
        self._written = content
        if self._reserve is not None and not keep_room:
            self._reserve.give_back()
            self._reserve = None

    def write_config(self, options: str) -> None:
        """Write ``config.toml``, with which the user can start the run again.

        Args:
            options: the options that the user typed, as TOML.
        """
        path = self.path / "config.toml"
        path.write_text(
            f"# The options of this run, as typed. They start it again: --config {path}\n{options}",
            encoding="utf-8",
        )

    def read_run(self) -> JsonDict:
        """Return the content of run.json; an empty dict if there is none.

        If the status is ``running`` but no process holds the run's lock, return the status
        ``stopped``.

        Raises:
            MotleyError: the file is damaged.
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
        if model and "task" not in content:  # an older version, which had only the image task
            title = f"{model} on {content['config'].get('dataset', 'images')}"
            content["task"] = {"name": "image", "unit": "images", "weight": 1.0, "title": title}
            upgrade_record(content.get("result") or {})
        return content

    def update_run(self, **changes: Any) -> None:
        """Change some fields of run.json.

        Raises:
            MotleyError: run.json is missing.
        """
        path = self.run_file
        if not path.exists():
            raise make_gone_error(path)
        self.write_run({**(self._written or self.read_run()), **changes})

    # -- jsonl

    def step_file(self, rank: int) -> Path:
        """Return the path of ``steps.rank<k>.jsonl``."""
        return self.path / f"steps.rank{rank}.jsonl"

    def steps(self, rank: int) -> "JsonLines":
        """Open ``steps.rank<k>.jsonl`` for appending."""
        return JsonLines(self.step_file(rank))

    def epochs(self) -> "JsonLines":
        """Open ``epochs.jsonl`` for appending."""
        return JsonLines(self.epochs_file)

    def event(self, kind: str, /, **content: Any) -> None:
        """Append one event, which reaches the file immediately.

        An example of a line:

        ``{"time": 1763693554.1, "event": "overflow", "step": 3, "loss_scale": 65536.0}``
        """
        with JsonLines(self.events_file) as lines:
            lines.write({"time": time.time(), "event": kind, **content})

    def drop_after(
        self, step: int, rank: int, ranks: Sequence[int], diverges: bool = False
    ) -> None:
        """Remove this rank's records of steps that are repeated after a resume.

        The first of ``ranks`` also does this for ranks that trained before, but do not train now.

        Args:
            step: step at which the run continues.
            rank: number of this rank.
            ranks: numbers of the ranks that train now.
            diverges: True if the parameters of ranks differ between averaging rounds, as in Local
                SGD; see motley.engines.protocol.
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
        """Add missing step records of a rank before ``step``, from the records of other ranks.

        Records are missing if the rank was killed before it wrote its last records. Records are
        also missing if a rank of an earlier launch, with the same number, wrote the file.
        """
        path = self.step_file(rank)
        # All lines have a step.
        last = max((line["step"] for line in read_last_lines(path)), default=-1)
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
        """Return all step records by rank, in order."""
        return {
            rank: [upgrade_record(line) for line in read_json_lines(path)]
            for rank, path in self.step_files().items()
        }

    def read_last_steps(self) -> dict[int, list[JsonDict]]:
        """Return the last few hundred step records of each rank, in order."""
        return {rank: read_last_lines(path) for rank, path in self.step_files().items()}

    def step_files(self) -> dict[int, Path]:
        """Return the paths of the step records by rank, ascending."""
        return {rank: self.step_file(rank) for rank in self._ranks()}

    def last_steps(self) -> list[JsonDict]:
        """Return the last few hundred step records of the rank that wrote most recently."""
        files = sorted(self.path.glob("steps.rank*.jsonl"), key=lambda path: path.stat().st_mtime)
        return read_last_lines(files[-1]) if files else []

    def record_files(self) -> list[Path]:
        """Return the paths of all JSON-lines files: steps, evaluations, events."""
        return sorted(self.path.glob("*.jsonl"))

    def _ranks(self) -> list[int]:
        """Return the ranks whose step records are in the folder, ascending."""
        return _numbers(self.path, "steps.rank", ".jsonl")

    def read_epochs(self) -> list[JsonDict]:
        """Return all evaluations, in order."""
        return list(read_json_lines(self.epochs_file))

    def read_events(self) -> list[JsonDict]:
        """Return all events, in order."""
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
        """Return the path of the trace of a rank; see motley.records.trace."""
        return self.path / f"trace.rank{rank}.json.gz"

    def traces(self) -> list[Path]:
        """Return the paths of all ranks' traces, ascending by rank."""
        result = {rank: self.trace(rank) for rank in _numbers(self.path, "trace.rank", ".json.gz")}
        return [result[rank] for rank in sorted(result)]

    def trace_of_all(self) -> Path:
        """Return the path of the trace into which all ranks' traces are merged."""
        return self.path / "trace.json.gz"

    def nccl_log(self, rank: int) -> str:
        """Return the value for NCCL_DEBUG_FILE, in which NCCL fills in the host and the process."""
        path = self.path.absolute() / f"nccl.rank{rank}."
        return f"{path}".replace("%", "%%") + "%h.%p.log"

    def gpu_log(self, host: str) -> "GpuLog":
        """Open ``gpu.<host>.csv`` for appending."""
        return GpuLog(self.gpu_file(host))

    def gpu_file(self, host: str) -> Path:
        """Return the path of ``gpu.<host>.csv``."""
        return self.path / f"gpu.{host}.csv"

    def gpu_files(self) -> dict[str, Path]:
        """Return the paths of the GPU logs by host."""
        result = sorted(self.path.glob("gpu.*.csv"))
        return {path.name.removeprefix("gpu.").removesuffix(".csv"): path for path in result}


def _numbers(folder: Path, before: str, after: str) -> list[int]:
    """Return the numbers in file names of the form ``before``, number, ``after``; ascending."""
    names = (path.name for path in folder.glob(f"{before}*{after}"))
    numbers = (name.removeprefix(before).removesuffix(after) for name in names)
    return sorted(int(number) for number in numbers if number.isdigit())


def find_runs(paths: list[Path]) -> list[RunFolder]:
    """Return every run folder at or under ``paths``, sorted by path.

    Folders inside a run folder are not searched.
    """
    result = set()
    for path in paths:
        for folder, names, files in os.walk(path):
            if "run.json" in files:
                result.add(Path(folder))
                names.clear()  # checkpoints may have many files
    return [RunFolder(path) for path in sorted(result)]


def upgrade_record(line: JsonDict) -> JsonDict:
    """Return a record with the present field names, even if an older version wrote the record."""
    if "images_per_s" in line:
        line["samples_per_s"] = line.pop("images_per_s")
    return line


_NAMED = 5  # most runs that an error names


def open_run(path: str | Path) -> RunFolder:
    """Return the run in a folder, such as ``logs/RUN``.

    Raises:
        MotleyError: the folder is not the folder of a run.
    """
    folder = Path(path)
    if not folder.exists():
        raise MotleyError(f"{folder} does not exist; name a run's folder, as in logs/RUN")
    if not folder.is_dir():
        raise MotleyError(f"{folder} is a file; name the run's folder, {folder.parent}")
    run = RunFolder(folder)
    if run.run_file.exists() or run.record_files():
        return run
    result = find_runs([folder])
    if not result:
        raise MotleyError(f"{folder} is neither a run nor a folder of runs: it has no run.json")
    names = [str(each.path) for each in sorted(result, key=_changed, reverse=True)]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise MotleyError(
        f"{folder} holds {plural(len(names), 'run')}; name one of them "
        f"(newest first): {', '.join(names[:_NAMED])}{more}"
    )


def _changed(run: RunFolder) -> float:
    return run.run_file.stat().st_mtime

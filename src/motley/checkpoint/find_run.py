"""Which folder a run has, and what it continues from."""

import itertools
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from motley.checkpoint.read import checkpoints_at
from motley.config.options import Config
from motley.errors import MotleyError
from motley.records.folder_lock import refuse_link
from motley.records.run_folder import RunFolder, find_runs


def find_run(config: Config) -> tuple[Path, list[Path]]:
    """The run's folder, and the checkpoints that ``--resume`` finds for it."""
    try:
        path, found = _find_run(config, Path(config.logs))
    except OSError as error:
        raise MotleyError(
            f"cannot read {error.filename}: {error.strerror}; choose another place with --logs DIR"
        ) from None
    refuse_link(path)
    if found and (continued := run_of(found[0])):
        try:
            RunFolder(continued).read_run()
        except MotleyError as error:
            print(
                f"motley: {error}; its checkpoints are used, and who does how much is planned anew"
            )
    return path, found


def _find_run(config: Config, logs: Path) -> tuple[Path, list[Path]]:
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
        found = checkpoints_at(Path(config.resume))
        if not found:
            raise MotleyError(
                f"--resume {config.resume}: no checkpoint there; name a run folder, or a folder "
                "checkpoints/step_... in one"
            )
        return named or run_of(found[0]) or _by_time(logs), found
    if named:
        return named, checkpoints_at(named)
    return _newest_stopped(logs, config.task) or (_by_time(logs), [])


def explain_new_run(config: Config) -> str:
    """Return what to say where ``--resume auto`` has found nothing to continue."""
    logs = Path(config.logs)
    if config.run is not None:
        return f"{logs / config.run} has no checkpoint; --resume auto begins it anew"
    return (
        f"no unfinished run with a checkpoint is in {logs.absolute()}; --resume auto begins a new "
        "run. Name the place with --logs DIR, or a run with --run NAME"
    )


def _newest_stopped(logs: Path, task: str) -> tuple[Path, list[Path]] | None:
    """The run of this task that was started last of those that have not finished, and have a
    checkpoint; one that is in use is refused when it is taken."""
    stopped: list[tuple[float, Path, str]] = []
    for run in find_runs([logs]) if logs.exists() else []:
        try:
            content = run.read_run()
        except MotleyError as error:
            print(
                f"motley: {error}; --resume auto passes this run over; --run {run.path.name} "
                "--resume auto goes on from its checkpoints"
            )
            continue
        started = content.get("started")
        if content.get("status") != "finished":
            learns = content.get("config", {}).get("task", task)
            started = started if isinstance(started, int | float) else 0.0
            stopped.append((started, run.path, str(learns)))
    for _, path, learns in sorted(stopped, reverse=True):
        if not (found := checkpoints_at(path)):
            continue
        if Path(learns).name == Path(task).name:
            return path, found
        print(
            f"motley: {path} learns --task {learns}; --resume auto passes it over. Add "
            f"--task {shlex.quote(learns)} to continue it"
        )
    return None


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that has made it; None for a copy elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _by_time(logs: Path) -> Path:
    return next(path for path in _names(logs / time.strftime("%Y-%m-%d_%H-%M-%S"))
                if not path.exists())  # fmt: skip


def _names(path: Path) -> Iterator[Path]:
    """A name, and with numbers after it."""
    return (path.with_name(f"{path.name}-{n}") if n > 1 else path for n in itertools.count(1))


def new_folder(path: Path) -> Path:
    """Make a folder that nobody has, of this name or with a number after it."""
    for each in _names(path):
        try:
            each.mkdir(parents=True)
            return each
        except OSError:
            if not each.exists():  # RunFolder.create says what is wrong
                return each
    raise AssertionError("numbers do not end")


def _run_name(name: str) -> str:
    if not name:
        raise MotleyError("--run is empty; give a name, or leave it out (default: the time)")
    if name in (".", "..") or "/" in name or "\0" in name or "\n" in name:
        raise MotleyError(f"--run {name!r} is a name, not a path; choose the place with --logs DIR")
    return name

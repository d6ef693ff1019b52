"""Opens the one run that a user names, or says what it is that was named."""

from pathlib import Path

from motley.errors import MotleyError
from motley.records.run_folder import RunFolder, find_runs

_NAMED = 5  # runs that are named in an error


def open_run(path: str | Path) -> RunFolder:
    """The run of a folder, such as ``logs/RUN``.

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
    found = find_runs([folder])
    if not found:
        raise MotleyError(f"{folder} is no run and holds none: it has no run.json")
    names = [str(each.path) for each in sorted(found, key=_changed, reverse=True)]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise MotleyError(
        f"{folder} holds {len(names)} run{'s' if len(names) > 1 else ''}; name one, the newest "
        f"first: {', '.join(names[:_NAMED])}{more}"
    )


def _changed(run: RunFolder) -> float:
    return run.run_file.stat().st_mtime

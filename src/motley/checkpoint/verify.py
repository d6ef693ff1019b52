"""Looks through what a run has left, file by file: what is whole, and what is damaged."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from motley.checkpoint.read import checkpoints_at, open_checkpoint
from motley.errors import MotleyError
from motley.records.json_files import read_json_lines
from motley.records.run_folder import RunFolder


@dataclass(frozen=True)
class Finding:
    """What was found of one file or checkpoint, in words. damaged: it is not what was written."""

    text: str
    damaged: bool = False


def verify(path: Path) -> Iterable[Finding]:
    """Look at all checkpoints and records of a run, or at one checkpoint.

    A line of records that a crash cut short is told, and is no damage: it costs itself alone.

    Args:
        path: a run folder, its ``checkpoints/``, or one checkpoint.

    Raises:
        MotleyError: there is none.
    """
    run = RunFolder(path)
    is_run = (path / "run.json").exists() or any(run.record_files())
    checkpoints = checkpoints_at(path)
    if not is_run:
        if not checkpoints:
            raise MotleyError(
                f"{path}: neither a run nor a checkpoint is there; name a run's folder"
            )
        checkpoints = checkpoints[:1] if path in checkpoints else checkpoints
    else:
        yield _of_run(run)
        for file in run.record_files():
            yield _of_lines(file)
    for folder in checkpoints:
        yield _of_checkpoint(folder)
    if is_run and not checkpoints:
        yield Finding("no checkpoint")
    yield from _of_pointer(run.checkpoints if is_run else path)


def _of_pointer(place: Path) -> Iterable[Finding]:
    """``latest`` names the newest checkpoint, for people; nothing is said where it does."""
    latest = place / "latest"
    try:
        name = latest.read_text(errors="replace").strip()
    except FileNotFoundError:
        return
    except OSError as error:
        yield Finding(f"{latest} cannot be read: {error.strerror}", damaged=True)
        return
    if not name or not (place / name).is_dir():
        yield Finding(
            f"{latest} is damaged: it names {name or 'nothing'}, which is not there; --resume does "
            f"not need it, but takes the newest checkpoint. Write the name of one that is there "
            "into it, or remove it", damaged=True,
        )  # fmt: skip


def _of_run(run: RunFolder) -> Finding:
    try:
        content = run.read_run()
    except MotleyError as error:
        return Finding(str(error), damaged=True)
    if not content:
        return Finding(f"{run.path / 'run.json'} is damaged: it is missing", damaged=True)
    return Finding(f"{run.path / 'run.json'}: {content.get('status', 'of unknown status')}")


def _of_lines(file: Path) -> Finding:
    torn: list[int] = []
    try:
        whole = sum(1 for _ in read_json_lines(file, torn.append))
    except OSError as error:
        return Finding(f"{file} cannot be read: {error.strerror}", damaged=True)
    words = f"{file}: {whole} lines"
    if torn:
        listed = ", ".join(map(str, torn[:5])) + ", ..." * (len(torn) > 5)
        words += f"; {len(torn)} more cut short, and left out by all that read it: line {listed}"
    return Finding(words)


def _of_checkpoint(folder: Path) -> Finding:
    try:
        opened = open_checkpoint(folder)
        size = opened.check() / 2**20
    except MotleyError as error:
        if not folder.exists():
            return Finding(f"{folder}: removed meanwhile, for a newer one")
        return Finding(str(error), damaged=True)
    return Finding(f"{folder}: whole, step {opened.progress['step']}, {size:,.1f} MiB")

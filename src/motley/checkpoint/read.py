"""Readers of checkpoints, and the check of all files that a run has left.

Readers load only bytes whose hashes match the checkpoint's manifest. torch.load and safetensors
read a flipped bit without an error. These readers name the damaged checkpoint, and load the
previous checkpoint instead.
"""

import contextlib
import hashlib
import json
import stat
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load
from torch import Tensor

from motley.checkpoint.store import BEST, MORE, PARTS, Checkpoints, parse_step, read_best
from motley.checkpoint.tensor_files import Parts, is_index, part_names
from motley.errors import MotleyError
from motley.records.json_files import read_json_lines
from motley.records.run_folder import RunFolder

_FILES = {*(f"{part}.safetensors" for part in PARTS), "progress.json"}
_MORE_FILES = {f"{part}.safetensors" for part in MORE}
_MOST_MANIFEST = 1 << 20  # bytes; a manifest has 500, and 120 more per part
Seen = TypeVar("Seen")
_COUNTS, _OBJECTS = {"step", "epoch", "consumed", "ranks"}, {"scale", "config", "optimizer"}


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is open, but whose tensors are not read yet.

    Attributes:
        folder: folder of the checkpoint.
        manifest: size and SHA-256 of each file.
        progress: entries of progress.json.
        parts: reader of a checkpoint in parts, in which each rank has saved its own rows. None: the
            files hold whole tensors.
    """

    folder: Path
    manifest: Mapping[str, Mapping[str, Any]]
    progress: dict[str, Any]
    parts: Parts | None

    def read(self, only: Collection[str] = ()) -> dict[str, Tensor]:
        """Return all tensors by name. Only bytes whose hashes match the manifest are loaded.

        Args:
            only: prefixes of tensor names to read, such as ``model``; empty: all tensors.

        Raises:
            MotleyError: a file is damaged. The message names the file.
        """
        wanted = [part for part in (*PARTS, *MORE) if part in (only or (*PARTS, *MORE))]
        if self.parts is not None:
            names = [each for each in self.parts.shapes() if each.partition(".")[0] in wanted]
            return {name: self.parts.load(name) for name in names}
        tensors: dict[str, Tensor] = {}
        for part in wanted:
            path = self.folder / f"{part}.safetensors"
            if path.name not in self.manifest:
                continue
            with _reading(path):
                content = load(_read_vouched(path, self.manifest[path.name]))
            tensors |= {f"{part}.{name}": tensor for name, tensor in content.items()}
        return tensors

    def digest(self, part: str) -> str:
        """Return a SHA-256 that identifies all tensors with a prefix, such as ``model``.

        The method reads no tensor. For a checkpoint in parts, the result is a hash of the hashes of
        all pieces of these tensors.
        """
        if self.parts is not None:
            return self.parts.digest(part)
        return str(self.manifest[f"{part}.safetensors"]["sha256"])

    def check(self) -> int:
        """Compare all hashes, and return the total size of all tensors in bytes.

        Raises:
            MotleyError: a file is damaged. The message names the file.
        """
        if self.parts is not None:
            return self.parts.check()
        return sum(tensor.nbytes for tensor in self.read().values())


def open_checkpoint(folder: Path, needs: Collection[str] = ()) -> Opened:
    """Open one checkpoint, and check its manifest and progress.

    Args:
        folder: folder of the checkpoint.
        needs: entries that progress.json must have, besides the step.

    Raises:
        MotleyError: a file is missing or damaged. The message names the file.
    """
    manifest = _read_manifest(folder / "manifest.json")
    path = folder / "progress.json"
    with _reading(path):
        progress = json.loads(_read_vouched(path, manifest[path.name]))
        _check_progress(progress, needs)
    indexes = []
    for name in sorted(filter(is_index, manifest)):
        with _reading(folder / name):
            indexes.append(json.loads(_read_vouched(folder / name, manifest[name])))
    parts = Parts(folder, indexes, _reading) if indexes else None
    return Opened(folder, manifest, progress, parts)


def load_checkpoint(
    folder: Path, needs: Collection[str] = (), only: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the progress of one checkpoint.

    See :func:`open_checkpoint` and :meth:`Opened.read` for the arguments and errors.
    """
    opened = open_checkpoint(folder, needs)
    return opened.read(only), opened.progress


def load_newest_intact(
    folders: list[Path], needs: Collection[str] = (), only: Collection[str] = ()
) -> tuple[Path, dict[str, Tensor], dict[str, Any], list[str]]:
    """Load the newest intact checkpoint among ``folders``.

    Args:
        folders: folders of checkpoints, the newest first.
        needs: see :func:`open_checkpoint`.
        only: see :meth:`Opened.read`.

    Returns:
        The folder, its tensors, its progress, and the errors of newer checkpoints.

    Raises:
        MotleyError: no checkpoint is intact.
    """
    problems: list[str] = []
    result, content = find_first_intact(
        folders, lambda each: load_checkpoint(each, needs, only), problems
    )
    return result, *content, problems


def find_first_intact(
    folders: list[Path], look: Callable[[Path], Seen], problems: list[str]
) -> tuple[Path, Seen]:
    """Return the first of ``folders`` that ``look`` can read, and the result of ``look``.

    Args:
        folders: folders of checkpoints, the newest first.
        look: function that reads a checkpoint, and raises MotleyError if it is damaged.
        problems: list to which the errors of newer checkpoints are appended.

    Raises:
        MotleyError: no folder is accepted.
    """
    for folder in folders:
        try:
            return folder, look(folder)
        except MotleyError as error:
            problems.append(str(error))
    raise MotleyError("no checkpoint is intact: " + "; ".join(problems))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert every error in a ``with`` block to a MotleyError that reports a damaged file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # safetensors, JSON and torch raise types of their own
        gone = isinstance(error, FileNotFoundError)
        text = "it is missing" if gone else " ".join(str(error).split()) or type(error).__name__
        raise MotleyError(f"{path} is damaged: {text}") from None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the size and SHA-256 of each file of a checkpoint, by name.

    Raises:
        MotleyError: the manifest is damaged, or lists files that a checkpoint does not have.
    """
    with _reading(path):
        _check_size(path, range(_MOST_MANIFEST))
        manifest: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or not (
            manifest.keys() - _MORE_FILES == _FILES or _are_parts(manifest.keys())
        ):
            raise ValueError(f"it has to list {', '.join(sorted(_FILES))} and nothing else")
        for name, described in manifest.items():
            if not isinstance(described, dict) or described.keys() != {"bytes", "sha256"}:
                raise ValueError(f"it lacks the size or the SHA-256 of {name}")
    return manifest


def _are_parts(names: Collection[str]) -> bool:
    """Return True if the file names are those of a checkpoint in parts.

    The manifest of a checkpoint in parts lists only the index of each part, and progress.json.
    """
    indexes = {part_names(rank)[1] for rank in range(len(names) - 1)}
    return len(names) > 1 and {*names} == {*indexes, "progress.json"}


def _read_vouched(path: Path, expected: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file.

    Raises:
        ValueError: the size or the hash of the file differs from the manifest.
    """
    _check_size(path, [expected["bytes"]])
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if {"bytes": len(content), "sha256": digest} != expected:
        raise ValueError(
            f"{len(content)} bytes, SHA-256 {digest[:12]}, not {expected['bytes']}, "
            f"{str(expected['sha256'])[:12]}"
        )
    return content


def _check_size(path: Path, allowed: Container[int]) -> None:
    """Raise ValueError unless the path is a regular file of an allowed size.

    A pipe or a device must not be read, because reading might never end.
    """
    result = path.stat()
    if not stat.S_ISREG(result.st_mode) or result.st_size not in allowed:
        raise ValueError(f"it has {result.st_size} bytes, not the recorded size")  # fmt: skip


def _check_progress(progress: Any, needs: Collection[str]) -> None:
    """Raise ValueError unless the progress has the entries that :meth:`Checkpoints.save` writes.

    Args:
        progress: content of progress.json.
        needs: entries that the progress must have, besides the step.
    """
    if not isinstance(progress, dict):
        raise ValueError(f"it is a {type(progress).__name__}, not an object")
    for name in ("step", *needs):
        if name not in progress:
            raise ValueError(f"it has no '{name}'")
    for name in _COUNTS & progress.keys():
        if type(progress[name]) is not int or progress[name] < 0:
            raise ValueError(f"its {name} is {progress[name]!r}, not a count")
    for name in _OBJECTS & progress.keys():
        if not isinstance(progress[name], dict):
            raise ValueError(f"its {name} is {progress[name]!r}, not an object")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints that ``--resume PATH`` names, the preferred one first.

    Args:
        path: the folder of a checkpoint or of a copy, the link ``best``, the file ``latest``, the
            folder ``checkpoints/``, or a run folder.
    """
    if path.name == "latest" and path.is_file():
        path = path.parent
    if path.name == BEST and (name := read_best(path.parent)):
        path = path.with_name(name)
    if (step := parse_step(path)) is not None:
        return [path, *Checkpoints(path.parent, 1).list_folders(step - 1)]
    if (path / "manifest.json").is_file():
        return [path]
    for place in (path / "checkpoints", path):
        if result := Checkpoints(place, 1).list_folders():
            return result
    return []


@dataclass(frozen=True)
class Finding:
    """The result of a check of one file or checkpoint.

    Attributes:
        text: sentence that describes the result.
        damaged: True if the content differs from what was written.
    """

    text: str
    damaged: bool = False


def verify(path: Path) -> Iterable[Finding]:
    """Check all checkpoints and records of a run, or one checkpoint, and yield the results.

    The function yields one result for each file of records and for each checkpoint. A crash may
    leave an incomplete line of records. The function reports this line, but does not count it as
    damage, because the other lines are not affected.

    Args:
        path: a run folder, its ``checkpoints/``, or one checkpoint.

    Raises:
        MotleyError: the path contains neither a run nor a checkpoint.
    """
    run = RunFolder(path)
    is_run = (path / "run.json").exists() or any(run.record_files())
    checkpoints = checkpoints_at(path)
    if not is_run:
        if not checkpoints:
            raise MotleyError(f"{path} is neither a run nor a checkpoint; name the folder of a run")
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
    """Yield a damaged :class:`Finding` if ``latest`` or ``best`` names a missing checkpoint."""
    if (best := read_best(place)) and not (place / best).is_dir():
        yield Finding(
            f"{place / BEST} is damaged: it names {best}, which does not exist; remove the link",
            damaged=True,
        )
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
            f"{latest} is damaged: it names {name or 'nothing'}, which does not exist. --resume "
            "does not need this file, since it takes the newest checkpoint. Write the name of an "
            "existing checkpoint into it, or remove it", damaged=True,
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
        words += (
            f"; {len(torn)} more lines are cut short, and all programs leave them out: line "
            f"{listed}"
        )
    return Finding(words)


def _of_checkpoint(folder: Path) -> Finding:
    try:
        opened = open_checkpoint(folder)
        size = opened.check() / 2**20
    except MotleyError as error:
        if not folder.exists():
            return Finding(f"{folder} was removed during this check, for a newer checkpoint")
        return Finding(str(error), damaged=True)
    return Finding(f"{folder}: whole, step {opened.progress['step']}, {size:,.1f} MiB")

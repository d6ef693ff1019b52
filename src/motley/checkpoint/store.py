"""Checkpoints: saved in one piece or not at all, and never loaded unless they are whole.

    checkpoints/
      step_00000120/
        model.safetensors       timm's names: timm.create_model(..., checkpoint_path=...) reads it
        optimizer.safetensors   <parameter>.<slot>
        ema.safetensors, ema_numbers.safetensors    --model-ema: the average, and its steps
        ranks.safetensors       <rank>.<what that rank alone holds>
        progress.json           step, epoch, samples consumed, loss scale, batch, shares, ...
        manifest.json           size and SHA-256 of each file above
      latest                    the name of the newest folder, written last, for people
      aside_step_00000140/      damaged, or of a branch that a resume has left

Only folders of these exact names are ours: whatever else lies there is left alone, and never taken
for a checkpoint unless --resume names it.
A checkpoint is written to a hidden folder, flushed to the disk, hashed, and renamed.
torch.load and safetensors read a flipped bit without a word, so nothing is loaded but bytes that
the manifest vouches for; a damaged checkpoint is named and the one before it is used.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Collection, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor

from motley.engines.named_state import part_of
from motley.errors import MotleyError
from motley.records.lines import fix_for

_NAME = re.compile(r"step_([0-9]{8,})")
_HALF_WRITTEN = re.compile(r"\.step_[0-9]{8,}\.([0-9]+)(\.[0-9]+)?")  # by a process, and thread
_PARTS = ("model", "optimizer", "ranks")
_MORE = ("ema", "ema_numbers")  # of a run that averages
_FILES = {*(f"{part}.safetensors" for part in _PARTS), "progress.json"}
_MORE_FILES = {f"{part}.safetensors" for part in _MORE}
_MOST_MANIFEST = 65_536  # bytes; one has 500
_COUNTS, _OBJECTS = {"step", "epoch", "consumed", "ranks"}, {"scale", "config", "optimizer"}


class Checkpoints:
    """The checkpoints of one run; rank 0 alone writes.

    Args:
        path: the folder ``checkpoints/``.
        keep: newest ones that stay on the disk.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    def save_behind(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """As :meth:`save`, while training goes on; first waits for the one before.

        Args:
            tensors: nobody changes them any more.

        Raises:
            MotleyError: why the one before could not be saved.
        """
        self.wait()
        self._writing = self._writer.submit(self.save, tensors, progress)

    def wait(self, limit_s: float | None = None) -> None:
        """Until what :meth:`save_behind` was given is on the disk; raises what that has, and
        TimeoutError after ``limit_s`` seconds."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result(limit_s)

    def check(self) -> None:
        """Raise what :meth:`save_behind` has, if it has ended by now."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def save(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> Path:
        """Write one checkpoint.

        Args:
            tensors: names start with ``model.``, ``optimizer.``, ``ranks.``, ``ema.`` or
                ``ema_numbers.``.
            progress: JSON; has at least ``step``.

        Raises:
            MotleyError: the disk is full or not writable; nothing is left behind.
        """
        final = self.path / f"step_{progress['step']:08d}"
        # A thread's own: a state may be rescued while it is saved.
        temporary = self.path / f".{final.name}.{os.getpid()}.{threading.get_ident()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.sweep()
            temporary.mkdir()
            self._write(temporary, tensors, progress)
            if final.exists():  # the same step again, after a resume
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(self.path)
            self._point_to(final)
        except Exception as error:  # safetensors raises its own type for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError) and "SafetensorError" not in type(error).__name__:
                raise
            size, free = sum(t.nbytes for t in tensors.values()), free_bytes(self.path)
            room = (
                f"it takes {size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free; free some "
                "disk, or choose another with --logs DIR"
            )
            wrong = f"cannot save the checkpoint {final}: {error}; {fix_for(error, room)}"
            raise MotleyError(f"{wrong}, then continue with --resume") from None
        for old in self.found(progress["step"])[self._keep :]:
            shutil.rmtree(old)
        return final

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps to ``aside_...``: those of a branch that a
        resume from ``step`` leaves, or damaged ones. Else the next resume would take them."""
        for folder in set(self.found()) - set(self.found(step)):
            aside = folder.with_name(f"aside_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)

    def found(self, until: int | None = None) -> list[Path]:
        """Folders of checkpoints, newest first, whole or not.

        Args:
            until: those of this step, and before; None: all.
        """
        folders = self.path.glob("step_*")
        found = [(step, folder) for folder in folders if (step := step_of(folder)) is not None]
        return [
            folder for step, folder in sorted(found, reverse=True) if until is None or step <= until
        ]

    def _write(
        self, folder: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
    ) -> None:
        for part in (*_PARTS, *_MORE):
            chosen = _apart(part_of(tensors, part))
            if part in _MORE and not chosen:
                continue
            save_file(chosen, folder / f"{part}.safetensors")
        (folder / "progress.json").write_text(json.dumps(progress, indent=1) + "\n")
        manifest = {file.name: _describe(file) for file in sorted(folder.iterdir())}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)

    def _point_to(self, final: Path) -> None:
        pointer = self.path / f".latest.{os.getpid()}"
        pointer.write_text(final.name + "\n")
        _sync(pointer)
        pointer.replace(self.path / "latest")

    def sweep(self) -> None:
        """Remove what a crash of another process left half-written; the run's lock is held."""
        for leftover in self.path.glob(".step_*"):
            found = _HALF_WRITTEN.fullmatch(leftover.name)
            if found and int(found[1]) != os.getpid():
                shutil.rmtree(leftover, ignore_errors=True)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, where no two share memory, as tied ones do: safetensors takes no others."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes
        found[name] = tensor.contiguous() if alone else tensor.clone().contiguous()
        seen.add(storage.data_ptr())
    return found


def step_of(path: Path) -> int | None:
    """Of a checkpoint's folder; None of a file, a link, and what has another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name and path.is_dir() and not path.is_symlink() else None


def load_checkpoint(
    folder: Path, needs: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read one checkpoint; what is loaded are the very bytes whose hashes were compared.

    Args:
        needs: what the progress must tell, besides the step.

    Raises:
        MotleyError: names the file that is missing or damaged.
    """
    manifest = _read_manifest(folder / "manifest.json")
    tensors: dict[str, Tensor] = {}
    for part in (*_PARTS, *_MORE):
        path = folder / f"{part}.safetensors"
        if path.name not in manifest:
            continue
        with _reading(path):
            content = load(_read_vouched(path, manifest[path.name]))
        tensors |= {f"{part}.{name}": tensor for name, tensor in content.items()}
    path = folder / "progress.json"
    with _reading(path):
        progress = json.loads(_read_vouched(path, manifest[path.name]))
        _check_progress(progress, needs)
    return tensors, progress


def newest_whole(
    folders: list[Path], needs: Collection[str] = ()
) -> tuple[Path, dict[str, Tensor], dict[str, Any], list[str]]:
    """Load the first of ``folders`` that is whole.

    Args:
        needs: as for :func:`load_checkpoint`.

    Returns:
        It, its content, and what was wrong with those before it.
    """
    problems: list[str] = []
    for folder in folders:
        try:
            return folder, *load_checkpoint(folder, needs), problems
        except MotleyError as error:
            problems.append(str(error))
    raise MotleyError("no checkpoint is whole: " + "; ".join(problems))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a reader makes of garbage, it is said of the file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # safetensors, JSON and torch raise types of their own
        gone = isinstance(error, FileNotFoundError)
        text = "it is missing" if gone else " ".join(str(error).split()) or type(error).__name__
        raise MotleyError(f"{path} is damaged: {text}") from None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file that is loaded, and of no other."""
    with _reading(path):
        _check_size(path, range(_MOST_MANIFEST))
        manifest: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or manifest.keys() - _MORE_FILES != _FILES:
            raise ValueError(f"it does not list {', '.join(sorted(_FILES))}, and these alone")
        for name, described in manifest.items():
            if not isinstance(described, dict) or described.keys() != {"bytes", "sha256"}:
                raise ValueError(f"it does not give size and SHA-256 of {name}")
    return manifest


def _read_vouched(path: Path, expected: Mapping[str, Any]) -> bytes:
    """A file's bytes; ValueError where they are not those that the manifest describes."""
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
    """ValueError unless it is a file of such a size: no other is read, for it may be endless."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size not in allowed:
        raise ValueError(f"it is no file of the size that it was saved with, but {found.st_size} "
                         "bytes")  # fmt: skip


def _check_progress(progress: Any, needs: Collection[str]) -> None:
    """ValueError unless it is what :meth:`Checkpoints.save` takes."""
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
    """The checkpoints that ``--resume PATH`` means, the preferred one first.

    Args:
        path: one checkpoint's folder, a copy of one, ``checkpoints/``, or a run folder.
    """
    if (step := step_of(path)) is not None:
        return [path, *Checkpoints(path.parent, 1).found(step - 1)]
    if (path / "manifest.json").is_file():
        return [path]
    for place in (path / "checkpoints", path):
        if found := Checkpoints(place, 1).found():
            return found
    return []


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Of the disk where a folder is, or is going to be."""
    return shutil.disk_usage(path).free if path.exists() else free_bytes(path.parent)

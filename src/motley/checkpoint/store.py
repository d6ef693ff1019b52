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
A checkpoint is written to a hidden folder, hashed on its way there, flushed to the disk, and
renamed. How they are read is in motley.checkpoint.read.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from motley.checkpoint.tensor_file import write_tensors
from motley.engines.named_state import part_of
from motley.errors import MotleyError
from motley.records.lines import fix_for

_NAME = re.compile(r"step_([0-9]{8,})")
_HALF_WRITTEN = re.compile(r"\.step_[0-9]{8,}\.([0-9]+)(\.[0-9]+)?")  # by a process, and thread
PARTS = ("model", "optimizer", "ranks")
MORE = ("ema", "ema_numbers")  # of a run that averages


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
        if self._writing is not None:
            self._writing.result(limit_s)

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
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
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
        manifest = {}
        for part in (*PARTS, *MORE):
            chosen = part_of(tensors, part)
            if part in MORE and not chosen:
                continue
            name = f"{part}.safetensors"
            manifest[name] = write_tensors(folder / name, chosen)
        text = (json.dumps(progress, indent=1) + "\n").encode()
        (folder / "progress.json").write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        manifest["progress.json"] = {"bytes": len(text), "sha256": digest}
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


def step_of(path: Path) -> int | None:
    """Of a checkpoint's folder; None of a file, a link, and what has another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name and path.is_dir() and not path.is_symlink() else None


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

"""The writing of checkpoints, which hold the training state gathered from all ranks.

A checkpoint is written atomically, so an incomplete checkpoint is never loaded.

    checkpoints/
      step_00000120/
        model.safetensors       timm's names: timm.create_model(..., checkpoint_path=...) reads it
        optimizer.safetensors   <parameter>.<slot>
        ema.safetensors, ema_numbers.safetensors    --model-ema: the average, and its steps
        ranks.safetensors       <rank>.<state that this rank alone holds>
        progress.json           step, epoch, samples consumed, loss scale, batch, shares, ...
        manifest.json           size and SHA-256 of each file above
        part_00000.safetensors, part_00000.json, ...    in place of all tensors above, of a model
                                that no rank holds whole: see motley.checkpoint.tensor_files
      latest                    the name of the newest folder, written last, for people
      best                      --keep-best: a link to the folder with the best evaluation
      aside_step_00000140/      damaged, or later than the step from which a run has resumed

Motley manages only folders of exactly these names. Motley neither changes other files nor loads
them as a checkpoint, unless --resume names them. A checkpoint is written to a hidden folder, hashed
while it is written, flushed to the disk, and renamed. The module motley.checkpoint.read reads
checkpoints.

A thread writes while the training continues. Hashing and copying to the disk take CPU time from
ranks that compute on CPUs. For a checkpoint of 1 GB, beside two ranks on two CPU cores, this cost
1.7 s of the training. At the lowest priority it cost 0.2 s, because the thread uses the time in
which ranks wait for each other. A thread cannot raise its priority again without privileges.
A second thread of usual priority therefore finishes a checkpoint for which the training waits. The
second thread also takes over after half a minute if other programs leave no idle time.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.tensor_files import (
    part_names,
    sync,
    telling,
    wait_for_parts,
    write_part,
    write_tensors,
)
from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.engines.named_state import State, select_part
from motley.engines.protocol import Engine, HoldsParts, Scope
from motley.errors import MotleyError
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.records.json_files import fix_for

_LOWEST = 19  # niceness
PATIENCE_S = 30.0  # limit of writing in idle time only


class IdleThread:
    """A thread of the lowest CPU priority, which runs queued functions one after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint", self._begin)
        self._usual = ThreadPoolExecutor(1, "checkpoint_awaited")
        self._until = 0.0  # until this monotonic time, only idle time is used
        self._ident: int | None = None

    def _begin(self) -> None:
        self._ident = threading.get_ident()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

    def submit(self, work: Callable[..., Path], *values: Any) -> Future[Path]:
        """Queue ``work(*values)``, and return a future of its result."""
        self._until = time.monotonic() + PATIENCE_S
        self._usual.submit(
            int
        )  # starts the thread from here, since a thread inherits the priority of its starter
        return self._thread.submit(work, *values)

    def hurry(self) -> None:
        """Finish the queued work at the usual priority, because a caller waits for the result."""
        self._until = 0.0

    def run(self, pieces: Iterator[None]) -> None:
        """Do all work of an iterator. Any thread may call this method.

        Args:
            pieces: iterator that does a small piece of work each time an item is requested.
        """
        for _ in pieces:
            if time.monotonic() > self._until and threading.get_ident() == self._ident:
                try:
                    rest = self._usual.submit(deque, pieces, 0)
                except RuntimeError:  # Python is ending, and waits for this thread
                    continue
                rest.result()


_NAME = re.compile(r"step_([0-9]{8,})")
_HALF_WRITTEN = re.compile(
    r"\.step_[0-9]{8,}\.([0-9]+)(\.[0-9]+)?"
)  # process and thread that wrote it
BEST = "best"  # the link to the best checkpoint
PARTS = ("model", "optimizer", "ranks")
MORE = ("ema", "ema_numbers")  # further parts with --model-ema


class Checkpoints:
    """The checkpoints of one run. Only rank 0 writes, unless each rank saves its own part.

    Args:
        path: path of the folder ``checkpoints/``.
        keep: number of newest checkpoints to keep on the disk, besides the best one.

    Attributes:
        in_parts: True if all ranks see this disk. Each rank then writes the rows that it holds.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self.in_parts = False
        self._writer = IdleThread()
        self._writing: Future[Path] | None = None

    def save_behind(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Save a checkpoint while training continues. Wait for the previous checkpoint first.

        Args:
            tensors: tensors of the state. The caller must not change the tensors afterwards.
            progress: entries of the checkpoint besides tensors.

        Raises:
            MotleyError: the previous checkpoint could not be saved.
        """
        self.wait()
        self._writing = self._writer.submit(self.save, tensors, progress)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until the checkpoint that is being saved has reached the disk.

        Args:
            limit_s: largest number of seconds to wait; None: no limit.

        Raises:
            MotleyError: the checkpoint could not be saved.
            TimeoutError: the checkpoint is not on the disk after ``limit_s`` seconds.
        """
        if self._writing is not None:
            if not self._writing.done():
                self._writer.hurry()
            self._writing.result(limit_s)

    def check(self) -> None:
        """Raise the error of the last checkpoint if saving has failed. Do not wait for the disk."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def save(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> Path:
        """Write one checkpoint.

        Args:
            tensors: tensors by name. A name starts with ``model.``, ``optimizer.``, ``ranks.``,
                ``ema.`` or ``ema_numbers.``.
            progress: content of progress.json, with at least ``step``.

        Raises:
            MotleyError: the disk is full or not writable. The incomplete checkpoint is removed.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        # Each thread has its own folder: a state may be rescued while it is saved.
        with self._new(progress["step"], size, threading.get_ident()) as temporary:
            self._write(temporary, tensors, progress)
        return self._final(progress["step"])

    def mark_best_behind(self, step: int) -> None:
        """Make ``best`` a link to a step's checkpoint, after all queued checkpoints are saved."""
        before = self._writing

        def mark() -> Path:
            if before is not None:
                before.result()  # raises the error of a checkpoint that could not be saved
            self.mark_best(step)
            self._remove_old(step)
            return self._final(step)

        self._writing = self._writer.submit(mark)

    def mark_best(self, step: int | None) -> None:
        """Make ``best`` a link to the checkpoint of a step. None: remove the link."""
        best, link = self.path / BEST, self.path / f".{BEST}.{os.getpid()}"
        with self._saying(step or 0, 0):
            if step is None:
                best.unlink(missing_ok=True)
                return
            link.unlink(missing_ok=True)
            link.symlink_to(self._final(step).name)
            link.replace(best)

    def begin_parts(self, step: int) -> Path:
        """Wait for the previous checkpoint, then create the folder for the parts of all ranks."""
        self.wait()
        temporary = self._temporary(step, 0)
        with self._saying(step, 0):
            shutil.rmtree(temporary, ignore_errors=True)  # left when this step was first reached
            self._make(temporary)
        return temporary.absolute()

    def save_part_behind(
        self, folder: Path, rank: int, tensors: Mapping[str, Tensor], step: int
    ) -> None:
        """Write a rank's part while training continues.

        Args:
            folder: folder of :meth:`begin_parts`.
            rank: number of the rank.
            tensors: the rank's rows; see motley.checkpoint.tensor_files.
            step: step of the checkpoint.

        Raises:
            MotleyError: the previous checkpoint could not be saved.
        """
        self.wait()
        self._writing = self._writer.submit(self._write_part, folder, rank, tensors, step)

    def save_parts_behind(
        self, folder: Path, ranks: int, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
    ) -> None:
        """Write rank 0's part and complete the checkpoint, while training continues.

        The checkpoint is complete once ``ranks`` ranks have written their parts.
        """
        self._writing = self._writer.submit(self._unite, folder, ranks, tensors, progress)

    def _write_part(
        self, folder: Path, rank: int, tensors: Mapping[str, Tensor], step: int
    ) -> Path:
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._saying(step, size), telling(folder, rank):
            write_part(folder, rank, tensors, self._writer.run)
        return folder

    def _unite(
        self, folder: Path, ranks: int, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
    ) -> Path:
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._new(progress["step"], size, 0, folder):
            self._write_part(folder, 0, tensors, progress["step"])
            wait_for_parts(folder, ranks)
            manifest = {}
            for name in (part_names(rank)[1] for rank in range(ranks)):
                manifest[name] = _hash_progress((folder / name).read_bytes())
            self._write_manifest(folder, manifest, progress)
        return self._final(progress["step"])

    def _final(self, step: int) -> Path:
        return self.path / f"step_{step:08d}"

    def _temporary(self, step: int, thread: int) -> Path:
        return self.path / f".{self._final(step).name}.{os.getpid()}.{thread}"

    def _make(self, temporary: Path) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        temporary.mkdir()

    @contextlib.contextmanager
    def _new(self, step: int, size: int, thread: int, begun: Path | None = None) -> Iterator[Path]:
        """Yield a folder for the files of a checkpoint, then rename the folder to its final name.

        The folder is removed if the ``with`` block raises an error.

        Args:
            step: step of the checkpoint.
            size: total size of the tensors in bytes.
            thread: id of the thread that writes, for the name of a new folder.
            begun: a folder that exists already; None: create a new folder.
        """
        final, temporary = self._final(step), begun or self._temporary(step, thread)
        try:
            with self._saying(step, size):
                if begun is None:
                    self._make(temporary)
                yield temporary
                if final.exists():  # the same step again, after a resume
                    shutil.rmtree(final)
                temporary.rename(final)
                sync(self.path)
                self._point_to(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Remove old checkpoints. Keep the best one, and the number of newest ones to keep."""
        best = read_best(self.path)
        for old in self.list_folders(step)[self._keep :]:
            if old.name != best:
                shutil.rmtree(old)

    @contextlib.contextmanager
    def _saying(self, step: int, size: int) -> Iterator[None]:
        """Convert an OSError in a ``with`` block to a MotleyError about the checkpoint."""
        try:
            yield
        except OSError as error:
            free = free_bytes(self.path)
            room = (
                f"it takes {size / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free; free "
                "some space, or choose another folder with --logs DIR"
            )
            wrong = (
                f"cannot save the checkpoint {self._final(step)}: {error}; {fix_for(error, room)}"
            )
            raise MotleyError(f"{wrong}, then continue with --resume") from None

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps to ``aside_...``.

        The run continues from ``step``, so later checkpoints are damaged or no longer belong to the
        run. With their old names, the next resume would use these checkpoints.
        """
        remaining = self.list_folders(step)
        later = set(self.list_folders()) - set(remaining)
        if later and remaining:
            self._point_to(remaining[0])
        elif later:
            (self.path / "latest").unlink(missing_ok=True)
        for folder in later:
            aside = folder.with_name(f"aside_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        if read_best(self.path) in {folder.name for folder in later}:
            self.mark_best(None)

    def list_folders(self, until: int | None = None) -> list[Path]:
        """Return the folders of all checkpoints, the newest first. Checkpoints may be damaged.

        Args:
            until: last step to include; None: include all steps.
        """
        folders = self.path.glob("step_*")
        found = [(step, folder) for folder in folders if (step := parse_step(folder)) is not None]
        return [
            folder for step, folder in sorted(found, reverse=True) if until is None or step <= until
        ]

    def _write(
        self, folder: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
    ) -> None:
        manifest = {}
        for part in (*PARTS, *MORE):
            chosen = select_part(tensors, part)
            if part in MORE and not chosen:
                continue
            name = f"{part}.safetensors"
            manifest[name] = write_tensors(folder / name, chosen, run=self._writer.run)
        self._write_manifest(folder, manifest, progress)

    def _write_manifest(
        self, folder: Path, manifest: dict[str, Any], progress: Mapping[str, Any]
    ) -> None:
        content = (json.dumps(progress, indent=1) + "\n").encode()
        (folder / "progress.json").write_bytes(content)
        manifest["progress.json"] = _hash_progress(content)
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for file in folder.iterdir():
            sync(file)
        sync(folder)

    def _point_to(self, final: Path) -> None:
        pointer = self.path / f".latest.{os.getpid()}"
        pointer.write_text(final.name + "\n")
        sync(pointer)
        pointer.replace(self.path / "latest")

    def sweep(self) -> None:
        """Remove incomplete checkpoints of a crashed process. The caller holds the run's lock."""
        for leftover in self.path.glob(".step_*"):
            result = _HALF_WRITTEN.fullmatch(leftover.name)
            if result and int(result[1]) != os.getpid():
                shutil.rmtree(leftover, ignore_errors=True)


def read_best(path: Path) -> str:
    """Return the name of the checkpoint to which a folder's link ``best`` points, or ""."""
    try:
        return str((path / BEST).readlink())
    except OSError:
        return ""


def parse_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for any other path."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name and path.is_dir() and not path.is_symlink() else None


def _hash_progress(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def free_bytes(path: Path) -> int:
    """Return the free space in bytes of a folder's disk. The folder need not exist yet."""
    return shutil.disk_usage(path).free if path.exists() else free_bytes(path.parent)


@dataclass(frozen=True)
class KeptState:
    """A copy of a job's state, in this process's memory, that outlives the process group.

    A surviving rank continues from this copy after another rank was lost.

    Attributes:
        state: position of the training.
        plan: split of a full batch at that step.
        engine_state: parameters, optimizer state and other state of the engine, on the CPU.
        scale: state of the loss scale.
        seen: changes of the batch norm statistics on this rank since all ranks last added up their
            changes.
        estimated: estimated buffers of the batch norms, for a checkpoint that this rank writes
            alone.
    """

    state: TrainState
    plan: Plan
    engine_state: State
    scale: dict[str, Any]
    seen: dict[str, Tensor]
    estimated: dict[str, Tensor]


def save(
    engine: Engine, checkpoints: Checkpoints, position: TrainState, config: dict[str, Any]
) -> None:
    """Save a checkpoint while training continues. All ranks call this function.

    Rank 0 writes the checkpoint. If ranks shard the model and see the disk of rank 0, each rank
    writes its part.
    """
    if checkpoints.in_parts and isinstance(engine, HoldsParts):
        _save_parts(engine, engine.state(Scope.ROWS), checkpoints, position, config)
        return
    state = engine.state(Scope.GLOBAL)
    own: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object(engine.state(Scope.RANK).tensors, own if first else None)
    if not first:
        return
    tensors = dict(state.tensors)
    for rank, part in enumerate(own):
        tensors |= {f"ranks.{rank}.{name}": value for name, value in part.items()}
    progress = make_progress(position, len(own), engine.scale.state_dict(), config, state.plain)
    checkpoints.save_behind(tensors, progress)


def _save_parts(
    engine: Engine,
    part: State,
    checkpoints: Checkpoints,
    position: TrainState,
    config: dict[str, Any],
) -> None:
    checkpoints.wait()  # all ranks wait: rank 0 needs each rank's previous part
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received: list[Any] = [checkpoints.begin_parts(position.step) if rank == 0 else None]
    dist.broadcast_object_list(received, src=0, device=engine.device)
    if rank > 0:
        checkpoints.save_part_behind(received[0], rank, part.tensors, position.step)
        return
    progress = make_progress(position, ranks, engine.scale.state_dict(), config, part.plain)
    checkpoints.save_parts_behind(received[0], ranks, part.tensors, progress)


def make_progress(
    position: TrainState,
    ranks: int,
    scale: dict[str, Any],
    config: dict[str, Any],
    optimizer: dict[str, Any],
) -> dict[str, Any]:
    """Return the entries of a checkpoint besides tensors.

    Args:
        position: position of the training.
        ranks: number of ranks whose own tensors, such as optimizer shards, are in the checkpoint.
        scale: state of the loss scale.
        config: values of the options that a checkpoint stores.
        optimizer: values of the optimizer that are not tensors.
    """
    return {**asdict(position), "ranks": ranks, "scale": scale, "config": config,
            "optimizer": optimizer}  # fmt: skip


def go_on(engine: Engine, kept: KeptState) -> tuple[TrainState, list[str]]:
    """Continue from the copies of the state that the surviving ranks have kept.

    All ranks call this function. The ranks continue from the copy of the rank with the most steps.
    If all ranks have finished the same step, the copies are equal, and no state is sent. In Local
    SGD, ranks may be several steps apart, and each rank's steps must count. The ranks then continue
    from the mean of their parameters, at rank 0's step.

    Args:
        engine: the engine that loads the state.
        kept: the state of this rank.

    Returns:
        The position of the training, and notes for the user.
    """
    state, notes = _unite(engine, kept) if engine.diverges else (_newest(engine, kept), [])
    return state, [*notes, *engine.load_state(Scope.RANK, State())]


def _newest(engine: Engine, kept: KeptState) -> TrainState:
    # At equal steps, ranks that have united their batch norms' statistics are ahead.
    steps = kept.seen.get("steps")
    own = float(kept.state.step), 0.0 if steps is None else -float(steps.max())
    received = all_gather_floats(own)
    newest, state = received.index(max(received)), kept.engine_state
    position: TrainState
    position, plain, scale = all_gather_object((kept.state, state.plain, kept.scale))[newest]
    if min(received) < max(received):
        tensors = state.tensors if dist.get_rank() == newest else {}
        state = State(spread(tensors, engine.device, newest), plain)
    engine.load_state(Scope.GLOBAL, state)
    engine.scale.load_state_dict(scale)
    # The newest state already has the statistics of all ranks.
    seen = {} if own[1] < received[newest][1] else kept.seen
    engine.load_state(Scope.STATISTICS, State(seen))
    return position


def _unite(engine: Engine, kept: KeptState) -> tuple[TrainState, list[str]]:
    positions = all_gather_object(kept.state)
    engine.load_state(Scope.GLOBAL, kept.engine_state)
    engine.scale.load_state_dict(kept.scale)
    engine.unite()
    engine.load_state(Scope.STATISTICS, State(kept.seen))
    steps = [position.step for position in positions]
    where = f"{min(steps)} to {max(steps)}" if min(steps) < max(steps) else f"{steps[0]}"
    note = (
        f"continuing from the mean of the surviving ranks' parameters, at their steps {where}; "
        "the steps that the lost rank had taken since the last exchange are lost"
    )
    return positions[0], [note]


def spread(tensors: dict[str, Tensor], device: torch.device, source: int = 0) -> dict[str, Tensor]:
    """Broadcast one rank's tensors, and return the tensors on the CPU of every rank.

    The tensors are sent one by one, so no device has to hold all of them at once.

    Args:
        tensors: tensors by name; ignored on other ranks than ``source``.
        device: device on which ranks communicate.
        source: rank that has the tensors.
    """
    header: list[Any] = [[(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]]
    dist.broadcast_object_list(header, src=source, device=device)
    result, first = {}, dist.get_rank() == source
    for name, shape, dtype in header[0]:
        tensor = (
            tensors[name].to(device, copy=True).contiguous()
            if first
            else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(tensor, src=source)
        result[name] = tensor.cpu()
    return result

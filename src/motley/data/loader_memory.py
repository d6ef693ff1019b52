"""Memory and number of loader processes.

Loader processes pass batches to their rank through slots in shared memory, which are created once
for the whole run. The module limits the number of processes by the free memory of the host, and
raises the number during a run if needed.

New shared memory for each batch would cost more than a copy of the batch. The system would have to
zero the pages, map them twice and free them. The rank would hold the GIL during this time, so no
thread of the rank could launch a kernel. On a host with an H100, passing 256 images of 224 pixels
in new shared memory took 30 ms, and freeing the memory took 5.4 ms. A copy takes 6.7 ms.

The number of processes grows during training, because a trial of a fraction of a second before
training says little about the hours that follow.
"""

import contextlib
import math
import mmap
import os
import re
import shutil
import socket
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from motley.data.source import Batch, Tensors
from motley.errors import MotleyError
from motley.records.training import StepRecord

PREFETCH = 2  # batches that each process prepares ahead
# A process is asked for another batch when the rank takes one of its batches. The rank takes a
# batch when the batch before is copied. The process therefore writes to a slot that is not read.
OF_EACH = PREFETCH + 1
_ALIGNED = 64  # bytes; a multiple of the size of every dtype


class Place(NamedTuple):
    """The position and layout of a tensor in a slot of shared memory.

    Attributes:
        offset: bytes from the beginning of the slot.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Passed:
    """A batch whose tensors lie in a slot of shared memory.

    Attributes:
        slot: number of the slot.
        batch: the batch without its tensors.
        data: place of each tensor of the batch, by name.
        weights: place of the sample weights; None if the batch has no weights.
    """

    slot: int
    batch: Batch
    data: dict[str, Place]
    weights: Place | None


class Slots:
    """Shared memory for the batches of each loader process.

    The rank creates the slots before it starts the processes.

    Args:
        workers: number of loader processes.
        size: size of a slot in bytes. A larger batch is passed in separate shared memory.
        device: device of the rank. A GPU copies from the slots.
        complete: function that does the device's part of the work on a batch, after the copy.
    """

    def __init__(
        self,
        workers: int,
        size: int,
        device: torch.device,
        complete: Callable[[Tensors], Tensors] = lambda batch: batch,
    ) -> None:
        # Whole pages, and one more for the gaps between tensors.
        self._size = (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        self._memory = _shared(workers * OF_EACH * self._size) if workers and size else None
        self._made = 0  # batches that this process has put into slots
        self._device, self._complete = device, complete
        self._known: set[int] = set()  # slots that are pinned, or cannot be pinned
        self._pins: list[int] = []  # addresses of pinned slots
        weakref.finalize(self, _unpin, self._pins).atexit = False

    def put(self, batch: Batch) -> Passed | Batch:
        """Copy a batch into a slot, and return the positions of its tensors.

        A loader process calls this method.

        If the slot is too small, return the batch in separate shared memory. This method raises
        errors about the batch, because the thread that sends the batch would only print an error.
        The rank would then wait until its timeout.
        """
        tensors = batch.tensors()
        places, size = _places(tensors)
        if self._memory is None or size > self._size:
            for tensor in tensors:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return batch
        worker = get_worker_info()
        assert worker is not None
        slot = worker.id * OF_EACH + self._made % OF_EACH
        self._made += 1
        for tensor, place in zip(tensors, places, strict=True):
            self._view(slot, place).copy_(tensor)
        return Passed(
            slot, replace(batch, data={}, weights=None),
            dict(zip(batch.data, places, strict=False)),
            None if batch.weights is None else places[-1],
        )  # fmt: skip

    def take(self, found: Passed | Batch) -> Batch:
        """Return a batch on the device, copied from its slot if the batch lies in a slot.

        The rank's own process calls this method. The copy to a GPU is asynchronous. The rank
        must request the next batch only after the copy has finished.
        """
        if isinstance(found, Batch):
            batch = found.to(self._device)
            return replace(batch, data=self._complete(batch.data))
        if self._device.type == "cuda" and found.slot not in self._known:
            self._pin(found.slot)
        data = {
            name: self._view(found.slot, place).to(self._device, non_blocking=True, copy=True)
            for name, place in found.data.items()
        }
        weights = found.weights and self._view(found.slot, found.weights).clone()
        return replace(found.batch, data=self._complete(data), weights=weights)

    def _view(self, slot: int, place: Place) -> Tensor:
        dtype, shape, strides, offset = place
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        assert self._memory is not None
        start = slot * self._size + offset
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        return flat.as_strided(shape, strides)

    def _pin(self, slot: int) -> None:
        """Register a slot's memory as pinned with CUDA. If this fails, copies take longer."""
        self._known.add(slot)
        start = self._view(slot, Place(torch.uint8, (1,), (1,), 0)).data_ptr()
        failed = torch.cuda.cudart().cudaHostRegister(start, self._size, 0)  # type: ignore[no-untyped-call]
        if int(failed) == 0:
            self._pins.append(start)
            return
        with contextlib.suppress(RuntimeError):  # CUDA raises the error at the next kernel launch
            torch.zeros(1, device=self._device)


def _shared(size: int) -> mmap.mmap | None:
    """Return memory that this process and its children share, or None if memory is short.

    Without this memory, each batch is passed in separate shared memory.

    Args:
        size: size of the memory in bytes.
    """
    try:
        return mmap.mmap(-1, size)
    except OSError:
        return None


def _places(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Give each tensor the next place in a slot.

    Returns:
        The places, and their total size in bytes.
    """
    places, end = list[Place](), 0
    for tensor in tensors:
        shape = tuple(tensor.shape)
        strides = torch.empty_like(tensor, device="meta").stride()  # without gaps
        places.append(Place(tensor.dtype, shape, strides, end))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return places, end


def _unpin(pins: Sequence[int]) -> None:
    for start in pins:
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]


_GIB = 2**30
_USED = 0.8  # part of the free memory; the rest is for other needs of a step
_ALONE = 3  # batches held without processes: samples, their batch, and the one being computed
_TOGETHER = 2  # batches that the rank holds: one being computed, one ready or being copied
_MADE = 1  # batches that each process is assembling
_SHARED = "/dev/shm"  # file system through which a batch without a slot is passed
# Torch's messages for a process that finds /dev/shm full, or is killed for writing past its end.
_NO_ROOM = re.compile(r"shared memory\(shm\)|Bus error|unable to (allocate|resize|mmap|open).*shm")
_RECEIVES = "torch/multiprocessing/reductions.py"  # receives tensors from another process
_DIED = re.compile(r"DataLoader worker \(pid.*(killed|exited)")


def free_memory(ranks: int) -> float:
    """Return the bytes of free memory on the host that this rank may use now.

    Args:
        ranks: number of ranks of this host, which may all start their loaders at once.
    """
    return _USED * psutil.virtual_memory().available / ranks


def count_bytes(batch: Batch) -> float:
    """Return the mean bytes per sample of a batch."""
    return sum(each.nbytes for each in batch.tensors()) / max(1, len(batch))


def held(workers: int) -> int:
    """Return the number of micro-batches that are in memory at once.

    Args:
        workers: number of loader processes.
    """
    return (OF_EACH + _MADE) * workers + _TOGETHER if workers else _ALONE


def workers_that_fit(
    wanted: int, sample: float, micro_batch: int, free: Callable[[], float]
) -> tuple[int, str]:
    """Return the number of loader processes that fit into memory, up to ``wanted``, and a message.

    The message is empty if all wanted processes fit.

    Args:
        wanted: number of processes.
        sample: size of a sample in bytes.
        micro_batch: number of samples in a micro-batch.
        free: function that returns this rank's part of the free memory, in bytes.

    Raises:
        MotleyError: a micro-batch does not fit even without loader processes.
    """
    batch = sample * micro_batch
    if not batch:
        return wanted, ""
    there = free()
    for workers in range(wanted, -1, -1):
        if held(workers) * batch <= there:
            if workers == wanted:
                return wanted, ""
            return workers, (
                f"{workers} loader processes instead of {wanted}: a micro-batch is {micro_batch} "
                f"samples of {_text(sample)}, {wanted} processes would hold {held(wanted)} "
                f"micro-batches, and this rank's part of the free memory is {_text(there)}"
            )
    fits = int(there / (_ALONE * sample))
    raise MotleyError(
        f"reading micro-batches of {micro_batch} samples of {_text(sample)} needs memory "
        f"for {_ALONE} micro-batches, {_text(_ALONE * batch)}, and this rank's part of the host's "
        f"free memory is {_text(there)}; "
        + (
            f"--micro-batch {fits} fits"
            if fits
            else "not even one sample fits: start fewer ranks per host"
        )
    )


@contextlib.contextmanager
def explain_workers(workers: int) -> Iterator[None]:
    """Convert torch's error about a failed loader process into a MotleyError.

    The process has died, or shared memory was full. A signal reports the death of a process, so
    torch may raise the error at any line of the main thread. If a process dies while it hands over
    a tensor, the connection to it fails first.

    Args:
        workers: number of loader processes of this rank.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        text = str(error)
        no_room = _NO_ROOM.search(text)
        if _fails_in_transfer(error):
            text = f"its connection failed ({type(error).__name__})"
        elif not no_room and not _DIED.search(text):
            raise
        there, memory = shutil.disk_usage(_SHARED), psutil.virtual_memory()
        raise MotleyError(
            f"a loader process on {socket.gethostname()} "
            + (f"found no room in {_SHARED}" if no_room else f"died: {text.splitlines()[0]}")
            + f"; {_text(there.free)} of {_text(there.total)} are free in {_SHARED}, and "
            f"{_text(memory.available)} of {_text(memory.total)} of the host's memory are. "
            f"Micro-batches that are larger than the first one pass through {_SHARED}, up to "
            f"{PREFETCH * workers + _TOGETHER} at once with {workers} loader processes per rank. "
            "Start fewer loader processes with --workers (0: none), take a smaller --micro-batch, "
            f"or enlarge {_SHARED} (in a container: --shm-size)"
        ) from None


def _fails_in_transfer(error: BaseException) -> bool:
    """Return True if torch raised the error while it received a tensor from a loader process."""
    frames = traceback.extract_tb(error.__traceback__)
    is_lost = isinstance(error, ConnectionError | EOFError)
    return is_lost and any(Path(frame.filename).match(_RECEIVES) for frame in frames)


def _text(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"


WINDOW = 16  # steps that are evaluated together
WORTH_IT = 0.03  # fraction of time that a rank waits for samples, from which growth is worth it
_SETTLING = 4  # steps after a change that are ignored, while new processes fill their queues
_STALLS = 2  # slowest steps of a window, which are ignored: a slow file, for example
_HELPED = 0.8  # remaining part of the wait above which processes did not help, but disk limits


@dataclass(frozen=True)
class Growth:
    """A request for more loader processes.

    Attributes:
        workers: requested number of processes.
        waited: fraction of its time that the rank waits for samples.
    """

    workers: int
    waited: float


class LoaderGrowth:
    """An object that decides from a rank's finished steps when to add loader processes.

    The first addition is one process. Each later addition doubles the number of processes. Growth
    ends if an addition has not shortened the wait for samples.

    Args:
        workers: current number of loader processes.
        most: largest number of loader processes.
        idle_cores: function that returns the mean number of the rank's cores that were idle since
            the function's last call.
    """

    def __init__(
        self, workers: int, most: int, idle_cores: Callable[[], float] | None = None
    ) -> None:
        self._workers, self._most = workers, most
        self._idle_cores = idle_cores or _idle_cores
        self._seen = -1  # number of the last step
        self._before: float | None = None  # fraction waited before processes were added last
        self._steps: list[tuple[float, float]] = []  # seconds waited, and seconds of the step
        self._skip = _SETTLING

    def step(self, record: StepRecord) -> Growth | None:
        """Process the record of a finished step of this rank.

        Return a request for more loader processes, or None.
        """
        if self._workers >= self._most or record.step == self._seen:
            return None
        self._seen = record.step
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._idle_cores()
            return None
        # Waiting for input costs nothing while other ranks take longer still.
        waited = record.t_data - (record.t_wait or 0.0)
        self._steps.append((waited, record.n_global / record.samples_per_s))
        if len(self._steps) < WINDOW:
            return None
        usual = sorted(self._steps)[:-_STALLS]
        waited, total = map(sum, zip(*usual, strict=True))
        part, idle, before = waited / total, self._idle_cores(), self._before
        self._steps, self._before = [], None
        if before is not None and part > _HELPED * before:
            self._most = 0
        if part < WORTH_IT:
            return None
        added = min(max(1, self._workers), self._most - self._workers, round(idle))
        return Growth(self._workers + added, part) if added > 0 else None

    def take(self, workers: int, waited: float) -> None:
        """Record the new number of processes, after a request was handled.

        Args:
            workers: new number of processes. If the number is unchanged, no more processes fit.
            waited: see :class:`Growth`.
        """
        if workers == self._workers:
            self._most = workers
        self._before, self._workers = waited, workers
        self._steps, self._skip = [], _SETTLING


def _idle_cores() -> float:
    """Return the mean number of this process's cores that were idle since the last call."""
    own = os.sched_getaffinity(0)
    used = enumerate(psutil.cpu_percent(percpu=True))
    return sum(1 - percent / 100 for core, percent in used if core in own)

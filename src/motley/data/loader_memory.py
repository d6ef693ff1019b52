"""Memory and number of loader processes.

Processes pass batches to their rank through slots, which are made once for the whole run. The
module limits the number of processes to those that the host has room for, and adds processes during
a run.

A batch in shared memory of its own costs more than its copy: its pages are zeroed, mapped twice
and given back, at the rank under Python's lock, so that none of its threads can launch a kernel.
Beside an H100, 256 images of 224 pixels took 30 ms to put there and 5.4 to give back; a copy takes
6.7.

A trial of a fraction of a second, before training, says little about the hours that follow.
"""

import contextlib
import math
import mmap
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from motley.data.source import Batch, Tensors
from motley.errors import MotleyError
from motley.records.training import StepRecord

PREFETCH = 2  # batches that each process makes ahead
# A process is asked for another batch once one of its own is taken, and one is taken once that
# before it is copied. The process therefore writes to a slot that is no longer read.
OF_EACH = PREFETCH + 1
_ALIGNED = 64  # bytes; a multiple of every dtype's


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        offset: bytes, in its slot.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Passed:
    """A batch that lies in a slot.

    Attributes:
        slot: its number. batch: without tensors. data: each one's place.
    """

    slot: int
    batch: Batch
    data: dict[str, Place]
    weights: Place | None


class Slots:
    """Room for the batches of each loader process; the rank makes it before there are any.

    Args:
        workers: number of loader processes.
        size: largest number of bytes of a batch. A larger batch is passed in memory of its own.
        device: device of the rank. A GPU copies from the slots.
        complete: the device's work on a batch that it has.
    """

    def __init__(
        self,
        workers: int,
        size: int,
        device: torch.device,
        complete: Callable[[Tensors], Tensors] = lambda batch: batch,
    ) -> None:
        # Whole pages, and one for the gaps between its tensors.
        self._size = (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        self._memory = _shared(workers * OF_EACH * self._size) if workers and size else None
        self._made = 0  # by this process
        self._device, self._complete = device, complete
        self._known: set[int] = set()  # slots that the GPU knows, or that it cannot
        self._pins: list[int] = []  # addresses
        weakref.finalize(self, _unpin, self._pins).atexit = False

    def put(self, batch: Batch) -> Passed | Batch:
        """Pass a batch on; in a loader process.

        Faults of the batch are raised here. The thread that sends it would print the error, and the
        rank would wait for the batch until the run counts as stuck.
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
        """Return a copy on the device, or an object that was passed otherwise; in the rank.

        On a GPU the copy runs beside the host: ask for the next batch once it is done.
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
        """Where that fails, the copy takes longer."""
        self._known.add(slot)
        start = self._view(slot, Place(torch.uint8, (1,), (1,), 0)).data_ptr()
        failed = torch.cuda.cudart().cudaHostRegister(start, self._size, 0)  # type: ignore[no-untyped-call]
        if int(failed) == 0:
            self._pins.append(start)
            return
        with contextlib.suppress(RuntimeError):  # CUDA raises the error at the next kernel launch
            torch.zeros(1, device=self._device)


def _shared(size: int) -> mmap.mmap | None:
    """Return memory that this process and its children share, or None.

    The system may not grant as much. Each batch has its own memory in this case.
    """
    try:
        return mmap.mmap(-1, size)
    except OSError:
        return None


def _places(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """One behind the other, and the bytes that they take."""
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
_USED = 0.8  # of what is free; the rest is for what else a step needs
_ALONE = 3  # batches at once without processes: the samples, they together, and what is computed
_TOGETHER = 2  # with them: the one that is computed, and the one that is ready or being copied
_MADE = 1  # what each process puts together, before it passes it
_SHARED = "/dev/shm"  # through which a batch is passed that has no slot
# torch's messages for a process that runs short of it, or is killed for writing past its end.
_NO_ROOM = re.compile(r"shared memory\(shm\)|Bus error|unable to (allocate|resize|mmap|open).*shm")
_DIED = re.compile(r"DataLoader worker \(pid.*(killed|exited)")


def free_memory(ranks: int) -> float:
    """Bytes that this rank may use now: its part of what is free on the host.

    Args:
        ranks: of this host, who may all start their loaders at once.
    """
    return _USED * psutil.virtual_memory().available / ranks


def count_bytes(batch: Batch) -> float:
    """Return the bytes of one sample."""
    return sum(each.nbytes for each in batch.tensors()) / max(1, len(batch))


def held(workers: int) -> int:
    """Micro-batches in memory at once."""
    return (OF_EACH + _MADE) * workers + _TOGETHER if workers else _ALONE


def workers_that_fit(
    wanted: int, sample: float, micro_batch: int, free: Callable[[], float]
) -> tuple[int, str]:
    """Return how many of ``wanted`` loader processes fit, and a message if fewer do.

    Args:
        wanted: number of processes.
        sample: bytes of a sample.
        micro_batch: samples in a micro-batch.
        free: returns this rank's part of the free memory, in bytes.

    Raises:
        MotleyError: not even this process alone can hold what it reads.
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
                f"{workers} loader processes in place of {wanted}: {micro_batch} samples of "
                f"{_text(sample)} are a micro-batch, {wanted} would hold {held(wanted)} of those, "
                f"and this rank's part of the free memory is {_text(there)}"
            )
    fits = int(there / (_ALONE * sample))
    raise MotleyError(
        f"a micro-batch of {micro_batch} samples of {_text(sample)} is read by holding {_ALONE} of "
        f"them, {_text(_ALONE * batch)}, and this rank's part of the host's free memory is "
        f"{_text(there)}; "
        + (f"--micro-batch {fits} fits" if fits else "no sample fits: take fewer ranks a host")
    )


@contextlib.contextmanager
def explain_workers(workers: int) -> Iterator[None]:
    """Turn torch's error about a loader process that died, or had no room, into a MotleyError.

    Torch raises it in the main thread at any line, since a signal reports the death.

    Args:
        workers: loader processes of this rank.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        no_room = _NO_ROOM.search(text)
        if not no_room and not _DIED.search(text):
            raise
        there, memory = shutil.disk_usage(_SHARED), psutil.virtual_memory()
        raise MotleyError(
            f"a loader process on {socket.gethostname()} "
            + (f"found no room in {_SHARED}" if no_room else f"died: {text.splitlines()[0]}")
            + f"; it is for micro-batches larger than that of the first samples, up to "
            f"{PREFETCH * workers + _TOGETHER} at once with {workers} processes a rank, and "
            f"{_text(there.free)} of {_text(there.total)} are free, of the memory "
            f"{_text(memory.available)} of {_text(memory.total)}; take fewer with --workers (0: "
            "none), a smaller --micro-batch, or make more room (of a container: --shm-size)"
        ) from None


def _text(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"


WINDOW = 16  # steps that are judged together
WORTH_IT = 0.03  # of the time, that a rank waits for its samples
_SETTLING = 4  # steps behind a change, in which new processes make their first batches
_STALLS = 2  # steps of a window that may have waited for anything, such as a slow file
_HELPED = 0.8  # of that wait; more is left where the disk or something else is the limit


@dataclass(frozen=True)
class Growth:
    """A wish for more loader processes.

    Attributes:
        workers: that there should be. waited: part of the time that the rank waits for samples.
    """

    workers: int
    waited: float


class LoaderGrowth:
    """Decision, from finished steps, when a rank adds loader processes: one, then twice as many.

    The growth stops for good once an addition has not shortened the wait.

    Args:
        workers: present number of processes.
        most: largest number of processes.
        idle_cores: returns how many of the rank's cores were idle since its last call.
    """

    def __init__(
        self, workers: int, most: int, idle_cores: Callable[[], float] | None = None
    ) -> None:
        self._workers, self._most = workers, most
        self._idle_cores = idle_cores or _idle_cores
        self._seen = -1  # the last step
        self._before: float | None = None  # the wait, when processes were added last
        self._steps: list[tuple[float, float]] = []  # seconds waited, and of the step
        self._skip = _SETTLING

    def step(self, record: StepRecord) -> Growth | None:
        """Take in a finished step of this rank; return a wish, or None."""
        if self._workers >= self._most or record.step == self._seen:
            return None
        self._seen = record.step
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._idle_cores()
            return None
        # While others take longer still, input costs this rank nothing.
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
        """Go on with so many processes; see :class:`Growth`. Unchanged: no more fit."""
        if workers == self._workers:
            self._most = workers
        self._before, self._workers = waited, workers
        self._steps, self._skip = [], _SETTLING


def _idle_cores() -> float:
    """Return how many of this process's cores did nothing since the last call."""
    own = os.sched_getaffinity(0)
    used = enumerate(psutil.cpu_percent(percpu=True))
    return sum(1 - percent / 100 for core, percent in used if core in own)

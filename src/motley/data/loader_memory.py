"""How many loader processes a host's memory has room for: a sample may be of a gigabyte."""

import contextlib
import re
import shutil
import socket
from collections.abc import Callable, Iterator

import psutil

from motley.data.batch import Batch
from motley.data.slots import OF_EACH, PREFETCH
from motley.errors import MotleyError

_GIB = 2**30
_USED = 0.8  # of what is free; the rest is for what else a step needs
_ALONE = 3  # batches at once without processes: the samples, they together, and what is computed
_TOGETHER = 2  # with them: the one that is computed, and the one that is ready or being copied
_MADE = 1  # what each process puts together, before it passes it
_SHARED = "/dev/shm"  # through which a batch is passed that has no slot
# As torch says it of a process that is short of it, or is killed for writing where there is none.
_NO_ROOM = re.compile(r"shared memory\(shm\)|Bus error|unable to (allocate|resize|mmap|open).*shm")
_DIED = re.compile(r"DataLoader worker \(pid.*(killed|exited)")


def free_memory(ranks: int) -> float:
    """Bytes that this rank may use now: its part of what is free on the host.

    Args:
        ranks: of this host, who may all start their loaders at once.
    """
    return _USED * psutil.virtual_memory().available / ranks


def bytes_of(batch: Batch) -> float:
    """Of one sample of it."""
    return sum(each.nbytes for each in batch.tensors()) / max(1, len(batch))


def held(workers: int) -> int:
    """Micro-batches in memory at once."""
    return (OF_EACH + _MADE) * workers + _TOGETHER if workers else _ALONE


def workers_that_fit(
    wanted: int, sample: float, micro_batch: int, free: Callable[[], float]
) -> tuple[int, str]:
    """How many of ``wanted`` loader processes fit, and what is said if fewer do.

    Args:
        sample: its bytes. micro_batch: samples of one.

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

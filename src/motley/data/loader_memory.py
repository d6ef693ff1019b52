"""How many loader processes a host's memory has room for: a sample may be of a gigabyte."""

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from motley.data.batch import Batch
from motley.errors import MotleyError

_GIB = 2**30
_USED = 0.8  # of what is free; the rest is for what else a step needs
_ALONE = 3  # batches at once without processes: the samples, they together, and what is computed
_TOGETHER = 2  # with them: what is computed, and what is being copied for the GPU
PREFETCH = 2  # batches that each process makes ahead
_OF_EACH = PREFETCH + 1  # and the samples that the last is made of
_SHARED = "/dev/shm"  # through which they are passed
# As torch says it of a process that is short of it, or is killed for writing where there is none.
_NO_ROOM = re.compile(r"shared memory\(shm\)|Bus error|unable to (allocate|resize|mmap|open).*shm")
_DIED = re.compile(r"DataLoader worker \(pid.*(killed|exited)")


@dataclass(frozen=True)
class Free:
    """Bytes that this rank may use: its part of what is free on the host, and of that what
    processes can pass to one another through."""

    memory: float
    shared: float

    @classmethod
    def here(cls, ranks: int) -> "Free":
        """As it is now.

        Args:
            ranks: of this host, who may all start their loaders at once.
        """
        memory = _USED * psutil.virtual_memory().available / ranks
        try:
            return cls(memory, _USED * shutil.disk_usage(_SHARED).free / ranks)
        except OSError:
            return cls(memory, memory)


def bytes_of(batch: Batch) -> float:
    """Of one sample of it."""
    return sum(each.nbytes for each in batch.data.values()) / max(1, len(batch))


def held(workers: int) -> int:
    """Micro-batches in memory at once."""
    return _OF_EACH * workers + _TOGETHER if workers else _ALONE


def shared(workers: int) -> int:
    """Micro-batches in /dev/shm at once: those made ahead, and what is computed and copied."""
    return PREFETCH * workers + _TOGETHER if workers else 0


def workers_that_fit(
    wanted: int, sample: float, micro_batch: int, free: Callable[[], Free]
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
        if held(workers) * batch <= there.memory and shared(workers) * batch <= there.shared:
            if workers == wanted:
                return wanted, ""
            least = held(wanted) * batch, shared(wanted) * batch
            scarce = "memory" if least[0] > there.memory else _SHARED
            return workers, (
                f"{workers} loader processes in place of {wanted}: {micro_batch} samples of "
                f"{_text(sample)} are a micro-batch, {wanted} would hold {held(wanted)} of those, "
                f"and this rank's part of the free {scarce} is "
                f"{_text(there.memory if scarce == 'memory' else there.shared)}"
            )
    fits = int(there.memory / (_ALONE * sample))
    raise MotleyError(
        f"a micro-batch of {micro_batch} samples of {_text(sample)} is read by holding {_ALONE} of "
        f"them, {_text(_ALONE * batch)}, and this rank's part of the host's free memory is "
        f"{_text(there.memory)}; "
        + (f"--micro-batch {fits} fits" if fits else "no sample fits: take fewer ranks a host")
    )


def explained(batches: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """The same batches; MotleyError where a loader process had no room for its own, or died."""
    try:
        yield from batches
    except RuntimeError as error:
        text = str(error)
        no_room = _NO_ROOM.search(text)
        if not no_room and not _DIED.search(text):
            raise
        there, memory = shutil.disk_usage(_SHARED), psutil.virtual_memory()
        raise MotleyError(
            f"a loader process on {socket.gethostname()} "
            + (f"found no room in {_SHARED}" if no_room else f"died: {text.splitlines()[0]}")
            + f"; {shared(workers)} micro-batches are there at once with {workers} processes a "
            f"rank, and {_text(there.free)} of {_text(there.total)} are free, of the memory "
            f"{_text(memory.available)} of {_text(memory.total)}; take fewer with --workers (0: "
            "none), a smaller --micro-batch, or make more room (of a container: --shm-size)"
        ) from None


def _text(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"

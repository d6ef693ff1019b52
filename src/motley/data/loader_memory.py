"""How many loader processes a host's memory has room for: a sample may be of a gigabyte."""

import shutil
from collections.abc import Callable
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
        if held(workers) * batch <= there.memory and workers * PREFETCH * batch <= there.shared:
            if workers == wanted:
                return wanted, ""
            least = held(wanted) * batch, wanted * PREFETCH * batch
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


def _text(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"

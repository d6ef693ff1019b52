"""Memory through which loader processes pass batches to their rank: made once, for the whole run.

A batch in shared memory of its own costs more than its copy: its pages are zeroed, mapped twice and
given back, at the rank under Python's lock, so that none of its threads can launch a kernel. Beside
an H100, 256 images of 224 pixels took 30 ms to put there and 5.4 to give back; a copy takes 6.7.
"""

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from motley.data.batch import Batch

PREFETCH = 2  # batches that each process makes ahead
# A process is asked for another batch once one of its own is taken, and one is taken once that
# before it is copied: so it writes where nobody reads any more.
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
        size: bytes of a batch at most; a larger one is passed in memory of its own.
        device: the rank's; a GPU copies from there.
    """

    def __init__(self, workers: int, size: int, device: torch.device) -> None:
        # Whole pages, and one for the gaps between its tensors.
        self._size = (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        self._memory = _shared(workers * OF_EACH * self._size) if workers and size else None
        self._made = 0  # by this process
        self._device = device
        self._known: set[int] = set()  # slots that the GPU knows, or that it cannot
        self._pins: list[int] = []  # addresses
        weakref.finalize(self, _unpin, self._pins).atexit = False

    def put(self, batch: Batch) -> Passed | Batch:
        """Pass a batch on; in a loader process. What is wrong with it is said here: by the thread
        that sends it, an error would be printed, and the batch waited for until the run is taken
        for stuck."""
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
        """A copy on the device, or what was passed otherwise; in the rank. Of a GPU it runs beside
        the host: the next batch is to be asked for once it is done."""
        if isinstance(found, Batch):
            return found.to(self._device)
        if self._device.type == "cuda" and found.slot not in self._known:
            self._pin(found.slot)
        data = {
            name: self._view(found.slot, place).to(self._device, non_blocking=True, copy=True)
            for name, place in found.data.items()
        }
        weights = found.weights and self._view(found.slot, found.weights).clone()
        return replace(found.batch, data=data, weights=weights)

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
        with contextlib.suppress(RuntimeError):  # CUDA tells whoever launches a kernel next
            torch.zeros(1, device=self._device)


def _shared(size: int) -> mmap.mmap | None:
    """Memory that this process and its children see; None where the system grants no so large one:
    each batch has its own then."""
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

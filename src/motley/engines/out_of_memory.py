"""Out-of-memory errors: their detection, their report, and the retry in halves."""

import gc
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist

from motley.cluster.gpus import MIB, amd_uuid_at, read_gpu_processes
from motley.errors import NoMemoryError
from motley.faults import says_no_memory

_PLACE = ("domain", "bus", "device")  # parts of an address on the PCI bus

Found = TypeVar("Found")


def out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed: on a GPU, in a GPU library, or on the host.

    A failure in a collective does not count. The other ranks have continued, so the pass cannot be
    repeated.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, dist.DistError)
        and says_no_memory(str(error))
    )


def set_aside() -> None:
    """Exclude all objects that exist now from later garbage collections.

    Otherwise, a garbage collection after the compilation of a model takes 50 ms, in the middle of a
    step.
    """
    gc.collect()
    gc.freeze()


def release() -> None:
    """Free memory that is cached but unused, except objects of :func:`set_aside`.

    Do not call this function in the ``except`` block of the error. There the error still refers to
    all tensors of the failed pass.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_all() -> None:
    """Release memory as :func:`release` does, including objects of :func:`set_aside`.

    Call this function only if all ranks call it, or if no rank waits for this rank. Python examines
    all imported objects, and meanwhile no thread can send a heartbeat. The function takes half a
    second, or fifteen seconds if other programs leave only a twentieth of a core.
    """
    gc.unfreeze()
    release()
    gc.freeze()


def in_halves(compute: Callable[[slice], Found], part: slice) -> list[Found]:
    """Compute a part of a batch, and return the results.

    If memory runs out, each half of the part is computed separately, if necessary in halves again.
    The list has one result for each slice that was computed.

    Args:
        compute: function that computes the rows of a slice.
        part: the rows to compute.
    """
    try:
        return [compute(part)]
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or part.stop - part.start < 2:
            raise
    release()
    middle = (part.start + part.stop) // 2
    halves = slice(part.start, middle), slice(middle, part.stop)
    return [result for half in halves for result in in_halves(compute, half)]


def shortage(error: BaseException, device: torch.device) -> str:
    """Return one line with the allocator's message and the processes that use the memory."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]  # CUDA adds advice
    if device.type != "cuda":
        return f"{text}; {psutil.virtual_memory().available / MIB:,.0f} MiB of RAM are free"
    uuid = get_uuid(device)
    result = [process for process in read_gpu_processes() or () if process.uuid == uuid]
    others = [
        f"{process.user} (pid {process.pid})"
        + ("" if process.mib is None else f" {process.mib:,.0f} MiB")
        for process in sorted(result, key=lambda process: -(process.mib or 0))
        if process.pid != os.getpid()
    ]
    return (
        f"{text}; other processes on the GPU: {', '.join(others) or 'none that the driver names'}"
    )


def get_uuid(device: torch.device) -> str:
    """Return a GPU's UUID as its driver writes it.

    For AMD's GPUs, torch's UUID differs from the driver's. The function then reads the UUID from
    the driver, for the GPU at the same address on the PCI bus.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        numbers = [getattr(properties, f"pci_{each}_id", 0) for each in _PLACE]
        if result := amd_uuid_at("{:04x}:{:02x}:{:02x}.0".format(*numbers)):
            return result
    return f"GPU-{properties.uuid}"


def no_second_try(error: BaseException, device: torch.device, words: str, instead: str) -> NoReturn:
    """Raise the error for a pass that ran out of memory and cannot be repeated.

    A pass cannot be repeated if it communicates with other ranks.

    Args:
        error: the error of the pass.
        device: device whose memory ran out.
        words: description of the communication in a pass, from the engine's traits.
        instead: name of an engine to use instead.

    Raises:
        NoMemoryError: always.
    """
    raise NoMemoryError(
        f"{shortage(error, device)}. The step cannot be repeated with smaller micro-batches, "
        f"since {words}. Lower --micro-batch, add --grad-checkpointing, or take {instead}"
    ) from error

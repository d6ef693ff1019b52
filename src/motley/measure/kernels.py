"""Measures what a device's own kernels do, by precision."""

import time
from dataclasses import dataclass

import torch

from motley.tasks.model import AUTOCAST, set_matmul_precision


@dataclass(frozen=True)
class KernelSpeed:
    """A matrix product in one precision.

    Attributes:
        tflops: 1e12 floating-point operations a second; None if the device cannot do it.
        error: what it said then.
    """

    precision: str
    tflops: float | None
    error: str = ""


def kernel_speed(device: torch.device, precision: str, seconds: float = 0.1) -> KernelSpeed:
    """Time square matrix products (warm, synchronised) and check their result.

    A claim of support can be emulation, and a build that lacks the GPU's architecture
    passes ``is_available()`` and fails at its first kernel; so a real kernel runs.

    Args:
        seconds: about how long to measure.
    """
    size = 4096 if device.type == "cuda" else 256
    dtype = AUTOCAST[precision] or torch.float32
    set_matmul_precision(precision)
    try:
        ones = torch.ones(size, size, device=device, dtype=dtype)
        if not torch.equal(ones @ ones, torch.full_like(ones, size)):
            return KernelSpeed(precision, None, "wrong result")
        count, spent = 1, 0.0
        while spent < seconds / 2:
            start = time.perf_counter()
            for _ in range(count):
                ones @ ones
            wait_for(device)
            spent = time.perf_counter() - start
            count *= 2
    except RuntimeError as error:
        return KernelSpeed(precision, None, str(error).splitlines()[0])
    finally:
        set_matmul_precision("fp32")
    return KernelSpeed(precision, 2 * size**3 * (count / 2) / spent / 1e12)


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

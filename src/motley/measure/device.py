"""The speed of a device: matrix products by precision, and a model by micro-batch size."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from motley.engines.named_state import load_random_state, random_state
from motley.engines.step import gradient_norm, unscale_and_clip
from motley.engines.step_timer import Clock
from motley.errors import NoMemoryError
from motley.plan.memory import amount
from motley.plan.speeds import SpeedTable
from motley.tasks.model import AUTOCAST, TaskModel, set_matmul_precision


@dataclass(frozen=True)
class KernelSpeed:
    """The speed of a matrix product in one precision.

    Attributes:
        precision: the precision, as ``--precision`` names it.
        tflops: speed in 1e12 floating-point operations per second; None if the product fails.
        error: the error message of a product that fails; else empty.
    """

    precision: str
    tflops: float | None
    error: str = ""


def kernel_speed(device: torch.device, precision: str, seconds: float = 0.1) -> KernelSpeed:
    """Time square matrix products, warm and synchronised, and check their result.

    Only a real kernel shows two problems. A device may claim to support a precision, but emulate
    it. A torch build that lacks the GPU's architecture passes ``is_available()``, but fails at its
    first kernel.

    Args:
        device: the device.
        precision: the precision.
        seconds: approximate duration of the measurement.
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
    """Wait until a device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_REPEATS = 3  # least timed runs, after a warm one
PASSES = 1 + _REPEATS  # least passes to time a micro-batch
_LOAD_S = 1.0  # desired time on a GPU, which lowers its clock under load, by some 3 %
_STEP_BEHIND_S = 0.1  # longest micro-batch for which an optimizer step is timed behind it
_MEMORY_MARGIN = 0.9  # part of the free memory to use; the rest is for changes by other users


def measure_speed(
    model: TaskModel,
    make: Callable[[], torch.optim.Optimizer],
    most: int,
) -> SpeedTable:
    """Time the passes over micro-batches of 1, 2, 4, ... samples, and one optimizer step.

    A pass is a forward and a backward pass. If the task has groups of samples that stay together,
    the sizes are 1, 2, 4, ... groups.

    The measurement ends at ``most`` samples, when memory runs out, or when the next size would take
    too long. Larger sizes are timed even if they are no faster, because a longer last backward pass
    hides more of the all-reduce. Parameters and random state are restored, and all memory is
    released.

    Args:
        model: the model.
        make: function that makes the optimizer. The optimizer takes one step with learning rate 0,
            so that its state is in memory as in training.
        most: largest number of samples.

    Raises:
        NoMemoryError: not even one sample fits in memory.
    """
    with _as_it_was(model):
        return _measure_speed(model, make, most, model.measuring_s)


@contextlib.contextmanager
def _as_it_was(model: TaskModel) -> Iterator[None]:
    """Restore parameters and random state after the ``with`` block; release gradients."""
    device = next(model.parameters()).device
    random = random_state(device)
    # MADGRAD adds to the rate, and moves at a rate of 0 too.
    with torch.no_grad():
        before = [torch.empty_like(p, device="cpu").copy_(p) for p in model.parameters()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        load_random_state(random, device)


def _measure_speed(
    model: TaskModel, make: Callable[[], torch.optim.Optimizer], most: int, budget_s: float
) -> SpeedTable:
    """Measure as :func:`measure_speed` does. The optimizer's memory is freed on return."""
    device = next(model.parameters()).device
    optimizer = make()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    start = time.perf_counter()
    sizes: list[int] = []
    seconds: list[float] = []
    memory: list[float | None] = []
    step_s = rest = 0.0
    grain = model.task.grain
    for size in (grain * groups for groups in _doubling(most // grain)):
        next_s = PASSES * 2 * seconds[-1] if sizes else 0.0
        if time.perf_counter() - start + next_s > budget_s:
            break
        more = model.held_mib and model.held_mib - rest
        if not _fits(sizes, memory, size, device, more):
            break
        try:
            spent, peak = time_micro_batch(model, size)
            if not sizes or (device.type == "cuda" and 0.04 < spent <= _STEP_BEHIND_S):
                step_s = _time_step(optimizer, model, size)
        except torch.OutOfMemoryError:
            break
        rest = _allocated_mib(device)
        if not leaves_room(model, peak, rest):
            break
        sizes.append(size)
        seconds.append(spent)
        memory.append(peak)
    if not sizes:
        held = f", besides {amount(model.held_mib)} of the model itself" if model.held_mib else ""
        raise NoMemoryError(
            f"{device} has no room for {('one sample' if grain == 1 else f'{grain} samples')} of "
            f"this model{held}. Add --grad-checkpointing, choose a smaller --model or --img-size, "
            "or see which processes use its memory with: bash setup/test_cn_connection.sh"
        )
    rests = rest if device.type == "cuda" else None
    return SpeedTable(
        tuple(sizes), tuple(seconds), step_s, tuple(memory), grain=grain, rest_mib=rests
    )


def room_mib(device: torch.device) -> float:
    """Return the MiB of a GPU that this process has reserved or could still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device)) / 2**20


def _allocated_mib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


def _doubling(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... below ``most``, and ``most``."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def time_micro_batch(model: TaskModel, size: int) -> tuple[float, float | None]:
    """Return the seconds of a micro-batch, and the peak memory in MiB (None on a CPU).

    Afterwards the gradients of the pass stay in memory.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = _time(_micro_batch(model, size), device)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return seconds, peak


def passes(model: TaskModel, size: int, count: int) -> Iterator[float]:
    """Run passes over a micro-batch, one after another, and yield the seconds of each pass.

    The first pass may include a warm-up. At most ``count`` passes run, and only as many as the
    caller iterates over. The gradients stay in memory.
    """
    run = _micro_batch(model, size)
    for _ in range(count):
        start = time.perf_counter()
        run()
        wait_for(model.device)
        yield time.perf_counter() - start


def _micro_batch(model: TaskModel, size: int) -> Callable[[], None]:
    """Return a function that runs a forward and backward pass over ``size`` random samples."""
    data = model.noise(size)

    def run() -> None:
        torch.autograd.backward([model(data).sum()])

    return run


def _time_step(optimizer: torch.optim.Optimizer, model: TaskModel, size: int) -> float:
    """Return the seconds of an optimizer step that follows a micro-batch.

    The step is queued while a GPU still computes the micro-batch, as in training.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad(set_to_none=False)  # 0 times the gradient must be 0 in fp16 too

    def run() -> None:
        unscale_and_clip(parameters, gradient_norm(parameters), 1.0, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return _time(run, parameters[0].device, before=_micro_batch(model, size))


def _time(
    run: Callable[[], None], device: torch.device, before: Callable[[], None] | None = None
) -> float:
    """Return the median seconds of an operation after a warm-up. Runs follow each other at once.

    Args:
        run: the operation.
        device: device on which it runs.
        before: operation before each run, which is not timed.
    """
    clock = Clock(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    first = time.perf_counter() - start
    load = _LOAD_S if device.type == "cuda" and not before else 0.0
    repeats = max(_REPEATS, min(round(load / first), 3 * _REPEATS))
    laps = []
    clock.restart()
    for _ in range(repeats):
        if before:
            before()
            clock.lap("before")
        run()
        clock.lap("run")
        laps.append(clock.cut())
    return statistics.median(lap.seconds("run") for lap in laps[-_REPEATS:])


def _fits(
    sizes: Sequence[int],
    memory: Sequence[float | None],
    size: int,
    device: torch.device,
    more: float,
) -> bool:
    """Return True if a micro-batch of ``size`` should fit, judged by the growth of memory so far.

    Args:
        sizes: sizes that were measured, in samples.
        memory: peak memory at each size, MiB; None: unknown.
        size: samples of the next micro-batch.
        device: the device.
        more: memory that training needs besides the micro-batch, MiB.
    """
    known = [pair for pair in zip(sizes, memory, strict=True) if pair[1] is not None]
    if len(known) < 2:
        return True
    (before, less), (last, peak) = known[-2:]
    assert less is not None and peak is not None
    grown = (size - last) * (peak - less) / (last - before)
    return peak + grown + more < _MEMORY_MARGIN * room_mib(device)


def leaves_room(model: TaskModel, peak: float | None, rest: float) -> bool:
    """Return True if all other memory of training fits beside a micro-batch that was timed.

    Args:
        model: the model.
        peak: peak memory in the micro-batch, MiB; None: unknown.
        rest: memory in use between two passes, MiB.
    """
    if peak is None or not model.held_mib:
        return True
    return peak - rest + model.held_mib <= room_mib(model.device)


def has_room(model: TaskModel, speed: SpeedTable, size: int) -> bool:
    """Return True if a micro-batch of ``size`` should fit into memory, and is worth timing.

    On a CPU the needed memory is unknown, and sizes up to twice the last size are worth timing.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return size <= 2 * speed.sizes[-1]
    more = model.held_mib and model.held_mib - (speed.rest_mib or 0.0)
    memory = speed.memory_mib or (None,) * len(speed.sizes)
    return _fits(speed.sizes, memory, size, device, more)

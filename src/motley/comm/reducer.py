"""Buckets of gradients, and reducers, which sum buckets over ranks.

The class Reducer sums by a plain all-reduce, and other reducers derive from it. SlowRankReducer
sends less over one slow link.
"""

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from motley.comm.collectives import leave_group
from motley.errors import MotleyError

_T = TypeVar("_T", bound=Tensor)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # dtypes in which gradients are sent


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients sent together, with the interface of torch's dist.GradBucket for hooks.

    Attributes:
        place: number of the bucket in a step, from 0.
        flat: all gradients of the bucket in one vector, [numbers], in the dtype of the parameters
            or of the reducer.
        grads: views of ``flat`` with the parameters' shapes.
        final: True for the last bucket of a step.
    """

    place: int
    flat: Tensor
    grads: Sequence[Tensor]
    final: bool

    def index(self) -> int:
        """Return the number of the bucket in a step."""
        return self.place

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket in one vector."""
        return self.flat

    def gradients(self) -> Sequence[Tensor]:
        """Return views of the gradients with the parameters' shapes."""
        return self.grads

    def is_last(self) -> bool:
        """Return True for the last bucket of a step."""
        return self.final


class Sums:
    """The all-reduces that have started and not ended.

    NCCL's process group holds the memory of sent data on a GPU until the host waits for the work,
    or until more data is sent later. The next forward pass would lack this memory, which can be
    gigabytes. The class therefore stores the work objects, so that :meth:`release` can wait for
    them.
    """

    def __init__(self) -> None:
        self._works: list[Any] = []

    def begin(self, whole: Tensor, dtype: torch.dtype | None, group: Any = None) -> Future[Tensor]:
        """Start to sum a tensor over all ranks, in place, and return a future of the tensor.

        Args:
            whole: the tensor.
            dtype: dtype of the real numbers that are sent; None: the tensor's own.
            group: process group of the ranks to sum over; None: all ranks.
        """
        real = as_real(whole)
        sent = real.to(dtype or real.dtype)  # the same tensor, if it has this dtype
        work = dist.all_reduce(sent, group=group, async_op=True)
        if whole.is_cuda:
            self._works.append(work)

        def put(future: Future[list[Tensor]]) -> Tensor:
            if sent is not real:
                real.copy_(future.value()[0])
            return whole

        return work.get_future().then(put)

    def release(self) -> None:
        """Wait for all stored work objects, and free their data."""
        for work in self._works:
            work.wait()
        self._works.clear()


class Reducer:
    """The reducer that sums buckets by a plain all-reduce, and base class of other reducers.

    Subclasses may keep state between steps. In this class, the methods for this state do nothing.

    Args:
        group: process group of the ranks to sum over; None: all ranks.

    Attributes:
        dtype: dtype in which gradients are sent; None: dtype of the parameters.
    """

    dtype: torch.dtype | None = None

    def __init__(self, group: Any = None) -> None:
        self._group, self._sums = group, Sums()

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """Start to sum a bucket over all ranks, in place.

        Return a future of ``bucket.flat``.
        """
        return self._sums.begin(bucket.flat, self.dtype, self._group)

    def begin_at_once(self) -> None:
        """Skip the exact steps with which PowerSGD begins. Measurements call this method."""

    def after_step(self, taken: bool, factor: float) -> None:
        """Update the state that is kept between steps. All ranks pass the same values.

        Args:
            taken: True if the step was taken. False: restore the state from before the step.
            factor: ratio of the next step's loss scale to this step's loss scale.
        """
        self._sums.release()

    def close(self) -> None:
        """Free process groups and threads. All ranks call it."""
        self._sums.release()

    def state(self) -> dict[str, Tensor]:
        """Return the state that only this rank holds between steps, on the CPU."""
        return {}

    def load_state(self, state: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Restore a result of :meth:`state`.

        Args:
            state: the saved state.
            factor: ratio of the next step's loss scale to that of the saved state.
        """


class Unsent(Reducer):
    """A reducer that sends nothing, for passes whose gradients are not used."""

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """Return a future of the unchanged bucket, like torch's debugging hook ``noop_hook``."""
        future: Future[Tensor] = Future()
        future.set_result(bucket.flat)
        return future


class RoundingReducer(Reducer):
    """A reducer that sends 16-bit numbers.

    The loss is divided by N, the weight of the global batch, and multiplied by the loss scale. The
    gradient therefore has both factors before it is rounded to 16 bits. If a sum overflows, the
    norm of the gradient is not finite.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = DTYPES[dtype]


def as_real(value: Tensor) -> Tensor:
    """Return a real view of a complex tensor, [..., 2], and any other tensor unchanged."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def by_type(tensors: Sequence[_T]) -> list[list[_T]]:
    """Return one list of tensors per dtype, in the order in which dtypes first occur."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]


def grouped(tensors: Sequence[Tensor], numbers: float) -> list[list[Tensor]]:
    """Divide tensors into groups of one dtype, in the order of the tensors.

    A group has at most ``numbers`` elements in total, or consists of one larger tensor.
    """
    groups: list[list[Tensor]] = []
    for alike in by_type(tensors):
        groups.append([])
        for tensor in alike:
            if groups[-1] and sum(t.numel() for t in groups[-1]) + tensor.numel() > numbers:
                groups.append([])
            groups[-1].append(tensor)
    return groups


def empty_bucket(
    place: int, parameters: Sequence[Tensor], final: bool, dtype: torch.dtype | None = None
) -> Bucket:
    """Return a bucket with uninitialised memory for the gradients of some parameters.

    Each gradient has the layout of its parameter. Complex gradients are stored as real numbers.

    Args:
        place: number of the bucket.
        parameters: the parameters, all of one dtype.
        final: True for the last bucket of a step.
        dtype: dtype of the bucket; None: dtype of the parameters.
    """
    reals = [as_real(p.detach()) for p in parameters]
    flat = reals[0].new_empty(sum(p.numel() for p in reals), dtype=dtype)
    parts = torch.split(flat, [p.numel() for p in reals])
    grads = [
        part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
        for part, p in zip(parts, reals, strict=True)
    ]
    return Bucket(place, flat, grads, final)


def make_buckets(parameters: Sequence[Tensor], numbers: float) -> list[Bucket]:
    """Return buckets of random numbers to time a reducer, each with at most ``numbers`` elements.

    A tensor with more elements gets a bucket of its own.
    """
    groups = grouped(parameters, numbers)
    buckets = [
        empty_bucket(place, group, place == len(groups) - 1) for place, group in enumerate(groups)
    ]
    for bucket in buckets:
        bucket.flat.normal_()
    return buckets


def in_thread(
    thread: ThreadPoolExecutor, work: Callable[[], Tensor], device: torch.device | None = None
) -> Future[Tensor]:
    """Run ``work`` in a thread, and return a future of its result.

    On a GPU, the current stream waits for the future, and the host does not wait. If ``work``
    fails, the job ends, because the other ranks wait for this rank's data, and this rank's main
    thread waits in a backward pass.
    """
    future: Future[Tensor] = Future(devices=[device] if device else None)

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            if not isinstance(error, RuntimeError | MemoryError):  # a fault of the program's
                traceback.print_exception(error)
            text = MotleyError(
                f"the all-reduce of gradients failed ({type(error).__name__}: {error}). Continue "
                "with --resume auto; if it happens again, add --wire exact"
            )
            text.__cause__ = error
            threading.excepthook(
                threading.ExceptHookArgs((MotleyError, text, None, threading.current_thread()))
            )

    thread.submit(run)
    return future


# Numbers in a piece that the slow rank sends: a 128th of a bucket. The first and the last piece are
# not hidden by others, so small pieces are better. But each costs the other ranks an all-reduce.
_PIECE, _PIECES = 4 * 1024, 128
# Most pieces whose sums the slow rank has not received: one is sent, one is summed, one comes back,
# and one waits. With all pieces at once, TCP overran the queue before the slow link, and had to
# send a third of them again.
_FLYING = 4


class SlowRankReducer(Reducer):
    """A reducer for one slow link. The rank behind the link sends and receives each bucket once.

    In a ring all-reduce of n ranks, each link carries 2 (n - 1) / n of the bucket in each
    direction. With this reducer, the slow link carries the bucket once in each direction. The slow
    rank sends the bucket in pieces to one other rank. The other rank adds the pieces to its own
    pieces, and sums the result with the remaining ranks. Sums come back while later pieces are
    still being sent. All ranks get equal bits. The sums use gloo and copies on the CPU, which are
    much faster than a slow link.

    Args:
        slow: number of the rank behind the slow link.
        dtype: name of the dtype in which gradients are sent.
        device: device of this rank.
    """

    def __init__(self, slow: int, dtype: str, device: torch.device) -> None:
        super().__init__()
        ranks, self._rank = range(dist.get_world_size()), dist.get_rank()
        self._slow, self._next = slow, next(rank for rank in ranks if rank != slow)
        self._dtype, self._device = DTYPES[dtype], device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pair = sorted((self._slow, self._next))
        others = [rank for rank in ranks if rank != slow]
        # One group per direction, so that a wait in one direction does not block the other.
        groups: list[Any] = [dist.new_group(each, backend="gloo") for each in (pair, pair, others)]
        self._up, self._down, self._inner = groups
        self._thread, self._sending = (
            ThreadPoolExecutor(1, name) for name in ("slow rank", "slow rank up")
        )
        self._flying = Semaphore(_FLYING)

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """Start to sum a bucket over all ranks, and return a future of ``bucket.flat``."""
        flat = as_real(bucket.flat)
        dtype = self._dtype
        if dtype == torch.float32:  # exact: nothing is rounded
            dtype = torch.promote_types(dtype, flat.dtype)
        if self._stream is None:
            return in_thread(self._thread, self._begin(flat.to(dtype), bucket.flat))
        ready = torch.cuda.current_stream(self._device).record_event()
        return in_thread(
            self._thread, lambda: self._through_cpu(bucket.flat, dtype, ready), self._device
        )

    def _through_cpu(self, flat: Tensor, dtype: torch.dtype, ready: torch.cuda.Event) -> Tensor:
        """Sum a GPU's tensor over the ranks by a copy on the CPU, while the GPU computes.

        Args:
            flat: the tensor, which is replaced by the sum.
            dtype: dtype in which the numbers are sent.
            ready: event after which the GPU has computed the tensor.
        """
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host = as_real(flat).to("cpu", dtype)
            as_real(flat).copy_(self._begin(host, host)())
            self._stream.synchronize()
        return flat

    def _begin(self, part: Tensor, into: Tensor) -> Callable[[], Tensor]:
        """Start the operations that can start at once, and return a function that finishes the sum.

        Args:
            part: this rank's part of the sum.
            into: tensor to which the sum is written. The tensor may be ``part`` itself.
        """
        size = max(_PIECE, len(part) // _PIECES)
        pieces = torch.split(part, size)
        if self._rank == self._slow:
            sums = torch.empty_like(part)
            comes = torch.split(sums, size)
            waits: list[Any] = [dist.irecv(piece, self._next, self._down) for piece in comes]
            sending = in_thread(self._sending, lambda: self._go_up(pieces))

            def finish() -> Tensor:
                for wait in waits:
                    wait.wait()
                    self._flying.release()
                sending.wait()
                return _put(into, sums)

        elif self._rank == self._next:
            comes = torch.split(torch.empty_like(part), size)
            waits = [dist.irecv(piece, self._slow, self._up) for piece in comes]

            def finish() -> Tensor:
                backs = list[Any]()
                for piece, come, wait in zip(pieces, comes, waits, strict=True):
                    wait.wait()
                    dist.all_reduce(piece.add_(come), group=self._inner)
                    backs.append(dist.isend(piece, self._slow, self._down))
                for back in backs:
                    back.wait()
                return _put(into, part)

        else:

            def finish() -> Tensor:
                for piece in pieces:
                    dist.all_reduce(piece, group=self._inner)
                return _put(into, part)

        return finish

    def _go_up(self, pieces: Sequence[Tensor]) -> Tensor:
        """Send the slow rank's pieces, with a limit on pending sends, and return the last piece."""
        works = list[Any]()
        for piece in pieces:
            self._flying.acquire()
            works.append(dist.isend(piece, self._next, self._up))
        for work in works:
            work.wait()
        return pieces[-1]

    def close(self) -> None:
        """Free process groups and threads. All ranks call it."""
        self._thread.shutdown()
        self._sending.shutdown()
        for group in (self._up, self._down, self._inner):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                leave_group(group)


def _put(into: Tensor, sums: Tensor) -> Tensor:
    """Copy sums into a tensor, and return the tensor.

    Args:
        into: the tensor, which may be complex.
        sums: the sums as real numbers.
    """
    as_real(into).copy_(sums)
    return into

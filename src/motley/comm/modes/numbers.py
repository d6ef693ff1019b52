"""The gradient's own numbers: exact, or rounded to 16 bits on the way; with ``/leafK`` by an
all-reduce that spares one slow link, since the rank behind it sends its gradient only once.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from motley.comm.collectives import leave_group
from motley.comm.reducer import DTYPES, Bucket, Reducer, as_real, in_thread
from motley.plan.wire import Addition, WireMode

# Numbers that the slow rank sends at once: a bucket's 128th, for what the first and the last piece
# take is not hidden by others; but each costs the other ranks an all-reduce.
_PIECE, _PIECES = 4 * 1024, 128
# Pieces whose sums the slow rank has not heard: one goes up, one is summed, one comes down, and one
# is at hand. With all at once TCP overran the queue before the slow link, and sent a third of it
# again.
_FLYING = 4


class SlowRankReducer(Reducer):
    """Spares one slow link: the rank behind it sends its bucket once and receives the sum once.

    In a ring of n ranks each link carries 2 (n - 1) / n of the bucket each way; here the slow
    one's carries it once. The bucket goes in pieces, so that its sum comes back while it is still
    going. Next to it is one rank that adds its pieces to its own; it and the others
    make the sum among themselves. All get the same bits. Over gloo, from copies on the CPU: a
    link that is worth this is far slower than they are.
    """

    def __init__(self, slow: int, dtype: str, device: torch.device) -> None:
        super().__init__()
        ranks, self._rank = range(dist.get_world_size()), dist.get_rank()
        self._slow, self._next = slow, next(rank for rank in ranks if rank != slow)
        self._dtype, self._device = DTYPES[dtype], device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pair = sorted((self._slow, self._next))
        others = [rank for rank in ranks if rank != slow]
        # One group a direction: what one way has to wait for must not hold up the other.
        groups: list[Any] = [dist.new_group(each, backend="gloo") for each in (pair, pair, others)]
        self._up, self._down, self._inner = groups
        self._thread, self._sending = (
            ThreadPoolExecutor(1, name) for name in ("slow rank", "slow rank up")
        )
        self._flying = Semaphore(_FLYING)

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """See Reducer."""
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
        """Sum what is on a GPU, beside what that still computes."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host = as_real(flat).to("cpu", dtype)
            as_real(flat).copy_(self._begin(host, host)())
            self._stream.synchronize()
        return flat

    def _begin(self, part: Tensor, into: Tensor) -> Callable[[], Tensor]:
        """Post what can be at once; returns what does the rest.

        Args:
            part: of this rank. into: where the sum is to be; may be ``part``.
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
        """Send the slow rank's pieces, each when it may; returns the last."""
        works = list[Any]()
        for piece in pieces:
            self._flying.acquire()
            works.append(dist.isend(piece, self._next, self._up))
        for work in works:
            work.wait()
        return pieces[-1]

    def close(self) -> None:
        """See Reducer."""
        self._thread.shutdown()
        self._sending.shutdown()
        for group in (self._up, self._down, self._inner):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                leave_group(group)


def _put(into: Tensor, sums: Tensor) -> Tensor:
    """Copy real numbers into a tensor, which may be of complex ones."""
    as_real(into).copy_(sums)
    return into


@dataclass(frozen=True)
class Exact(WireMode):
    """In fp32."""

    name = usage = "exact"
    says = "exact, in fp32"
    addition = Addition.NUMBERS

    @classmethod
    def parse(cls, number: str) -> Self:
        """See WireMode; there is no number."""
        return cls()

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """See WireMode."""
        return (EXACT,)

    @property
    def price(self) -> str:
        """See WireMode."""
        return "the gradient is exact"

    def is_free(self, precisions: Collection[str]) -> bool:
        """See WireMode."""
        return True

    def reducer(self, device: Any) -> Any:
        """See WireMode."""
        from motley.comm.modes.numbers import SlowRankReducer
        from motley.comm.reducer import Reducer, RoundingReducer

        if self.slow_rank is not None:
            return SlowRankReducer(self.slow_rank, self.dtype, device)
        return Reducer() if self.dtype == "fp32" else RoundingReducer(self.dtype)


@dataclass(frozen=True)
class Bf16(Exact):
    """Rounded to bf16."""

    name = usage = "bf16"
    says = "rounded to bf16, half the bytes"

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """See WireMode."""
        return () if "fp16" in precisions else (BF16,)

    @property
    def dtype(self) -> str:
        """See WireMode."""
        return self.name

    @property
    def price(self) -> str:
        """See WireMode."""
        return "the gradient is rounded to 16 bits on the way"

    def is_free(self, precisions: Collection[str]) -> bool:
        """See WireMode."""
        return self.name in precisions


@dataclass(frozen=True)
class Fp16(Bf16):
    """Rounded to fp16: finer, of a range that a loss scale has to keep to."""

    name = usage = "fp16"
    says = "or to fp16"

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """See WireMode: where a rank computes in it there is a loss scale anyway."""
        return (FP16,) if "fp16" in precisions else ()


EXACT, BF16, FP16 = Exact(), Bf16(), Fp16()
MODES = (Exact, Bf16, Fp16)

"""A wire mode: gradients rounded to fp8 in the unit of each bucket's largest number."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from motley.plan.wire import Addition, WireMode


@dataclass(frozen=True)
class Fp8(WireMode):
    """A quarter of the bytes."""

    name = usage = "fp8"
    says = "rounded to fp8, a quarter of the bytes, inexact"
    addition = Addition.BUCKETS

    @classmethod
    def parse(cls, number: str) -> Self:
        """See WireMode."""
        return cls()

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """See WireMode."""
        return (cls(),)

    def count_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """See WireMode."""
        return sum(map(math.prod, shapes))

    def reducer(self, device: Any) -> Any:
        """See WireMode."""
        import torch
        import torch.distributed as dist

        from motley.comm.reducer import Bucket, Reducer

        class Fp8Reducer(Reducer):
            def send(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
                unit = bucket.flat.abs().max() / 448 + 1e-30
                own = (bucket.flat / unit).to(torch.float8_e4m3fn).view(torch.uint8)
                units = list(torch.empty(dist.get_world_size()).split(1))
                dist.all_gather(units, unit.view(1))
                all_ranks = [torch.empty_like(own) for _ in units]
                work = dist.all_gather(all_ranks, own, async_op=True)

                def add_up(_: object) -> torch.Tensor:
                    parts = zip(all_ranks, units, strict=True)
                    summed = sum(each.view(torch.float8_e4m3fn).float() * u for each, u in parts)
                    return bucket.flat.copy_(summed)

                return work.get_future().then(add_up)

        return Fp8Reducer()


MODES = (Fp8,)

"""How a rank adds its gradient to the others', one class for each ``--wire``.

A reducer is given buckets in the same order on every rank, and gives back their sums over all
ranks: exact, rounded to 16 bits on the way, past one slow link, or by PowerSGD.
"""

import torch
from torch import Tensor
from torch.futures import Future

from motley.comm.power_sgd import PowerSgdReducer
from motley.comm.reducer import Bucket, Reducer, add_up
from motley.comm.slow_rank import SlowRankReducer
from motley.plan.wire import WireMode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class RoundingReducer(Reducer):
    """Sends 16-bit numbers. The gradient is divided by N and scaled already, so that nothing
    is divided after it is rounded; a sum that overflows is seen in the norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def send(self, bucket: Bucket) -> Future[Tensor]:
        """See Reducer."""
        return add_up(bucket.flat, self._dtype)


def make_reducer(mode: WireMode, device: torch.device) -> Reducer:
    """The reducer of a mode."""
    if mode.kind == "powersgd":
        return PowerSgdReducer(mode, device)
    if mode.slow_rank is not None:
        return SlowRankReducer(mode.slow_rank, _DTYPES.get(mode.kind, torch.float32), device)
    if mode.kind in _DTYPES:
        return RoundingReducer(_DTYPES[mode.kind])
    return Reducer()

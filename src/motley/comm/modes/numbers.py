"""Modes of ``--wire`` that send the elements of the gradient, exact or rounded to 16 bits.

With ``/leafK`` the all-reduce spares one slow link: rank K, behind this link, sends its gradient
only once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from motley.plan.wire import Addition, WireMode


@dataclass(frozen=True)
class Exact(WireMode):
    """The mode of ``--wire exact``: an all-reduce of gradients in fp32."""

    name = usage = "exact"
    says = "exact, in fp32"
    addition = Addition.NUMBERS

    @classmethod
    def parse(cls, number: str) -> Self:
        """Return the mode. The mode has no number after its name."""
        return cls()

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return the modes of this kind that are measured without a user's request."""
        return (EXACT,)

    @property
    def price(self) -> str:
        """Effect of the mode on the gradient and on accuracy, in words."""
        return "the gradient is exact"

    def is_free(self, precisions: Collection[str]) -> bool:
        """Return True if a plan may use the mode without a user's request."""
        return True

    def reducer(self, device: Any) -> Any:
        """Return the reducer of this mode for a device. All ranks call it."""
        from motley.comm.reducer import Reducer, RoundingReducer, SlowRankReducer

        if self.slow_rank is not None:
            return SlowRankReducer(self.slow_rank, self.dtype, device)
        return Reducer() if self.dtype == "fp32" else RoundingReducer(self.dtype)


@dataclass(frozen=True)
class Bf16(Exact):
    """The mode of ``--wire bf16``: an all-reduce of gradients that are rounded to bf16."""

    name = usage = "bf16"
    says = "rounded to bf16, half the bytes"

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return the modes of this kind that are measured without a user's request."""
        return () if "fp16" in precisions else (BF16,)

    @property
    def dtype(self) -> str:
        """Name of the dtype in which numbers are sent."""
        return self.name

    @property
    def price(self) -> str:
        """Effect of the mode on the gradient and on accuracy, in words."""
        return "the gradient is rounded to 16 bits on the way"

    def is_free(self, precisions: Collection[str]) -> bool:
        """Return True if a plan may use the mode without a user's request."""
        return self.name in precisions


@dataclass(frozen=True)
class Fp16(Bf16):
    """The mode of ``--wire fp16``: an all-reduce of gradients that are rounded to fp16.

    The rounding is finer than that to bf16, but gradients need a loss scale.
    """

    name = usage = "fp16"
    says = "or to fp16"

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence[WireMode]:
        """Return this mode if a rank computes in fp16, which needs a loss scale in any case."""
        return (FP16,) if "fp16" in precisions else ()


EXACT, BF16, FP16 = Exact(), Bf16(), Fp16()
MODES = (Exact, Bf16, Fp16)

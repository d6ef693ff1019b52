"""A strategy that shards: as FSDP, but a block is gathered alone, and let go of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from motley.engines.strategies import Strategy
from motley.engines.strategies.fsdp import RESHARDS, FsdpOptions
from motley.plan.memory import GatheredMemory, ModelSize


def _one(numbers: Sequence[int]) -> int:
    return 1


def _estimate(size: ModelSize, wide: int, wire_bytes: int) -> float:
    return 2 * wide * size.outside + size.largest * (3 * wide + 2 * wire_bytes)


TRAITS = replace(RESHARDS, gathered=GatheredMemory(_estimate, _one))


def _engine(model: Any, context: Any) -> Any:
    from motley.engines.fsdp import FsdpEngine

    class BlockwiseEngine(FsdpEngine):
        traits = TRAITS

    return BlockwiseEngine(model, context)


STRATEGIES = (
    Strategy(
        "blockwise", ": as fsdp, a block at a time", lambda config: TRAITS, _engine, (FsdpOptions,)
    ),
)

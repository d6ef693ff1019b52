"""A strategy: as DDP, but nothing is sent before the backward pass has ended."""

from dataclasses import dataclass
from typing import Any

from motley.config.option import Decides, option
from motley.engines.strategies import Strategy
from motley.plan.wire import EngineTraits


@dataclass(frozen=True)
class LateOptions:
    """late"""

    tell: bool = option("say on each rank that it is late", Decides.NOTHING, False)


def _engine(model: Any, context: Any) -> Any:
    from motley.engines.ddp import NoOverlapEngine

    if context.config.group(LateOptions).tell:
        print(f"rank {context.rank} is late", flush=True)
    return NoOverlapEngine(model, context)


STRATEGIES = (
    Strategy(
        "late", ": gradients are sent after the backward pass",
        lambda config: EngineTraits(overlaps=False), _engine, (LateOptions,),
    ),
)  # fmt: skip

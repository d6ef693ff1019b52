"""DDP: each rank keeps the whole model, and ``--wire`` says what travels."""

from typing import TYPE_CHECKING

from motley.engines.strategy import Strategy
from motley.plan.engine_traits import EngineTraits
from motley.plan.wire import Addition

if TYPE_CHECKING:
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    if context.plan.wire.addition is Addition.LOCAL_STEPS:
        from motley.engines.local_sgd import LocalEngine

        return LocalEngine(model, context)
    if context.plan.buckets == 1 or (context.size == 1 and context.plan.wire.is_exact):
        from motley.engines.no_overlap import NoOverlapEngine

        return NoOverlapEngine(model, context)
    from motley.engines.ddp import DdpEngine

    return DdpEngine(model, context)


STRATEGIES = (
    Strategy(
        "ddp", " (default): each rank keeps the whole model", lambda config: EngineTraits(),
        _engine, cells={"ddp": ()},
    ),
)  # fmt: skip

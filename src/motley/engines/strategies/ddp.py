"""DDP: each rank keeps the whole model, and ``--wire`` selects how ranks sum gradients."""

from typing import TYPE_CHECKING

from motley.engines.strategies import Strategy
from motley.plan.wire import Addition, EngineTraits

if TYPE_CHECKING:
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    from motley.comm.collectives import all_gather_object

    if context.plan.wire.addition is Addition.LOCAL_STEPS:
        from motley.engines.local_sgd import LocalEngine

        return LocalEngine(model, context)
    # DDP would wait for ever for a bucket if one of its parameters gets no gradient.
    some_unused = any(all_gather_object(bool(model.sometimes_unused)))
    is_alone = context.size == 1 and context.plan.wire.is_exact
    if some_unused or context.plan.buckets == 1 or is_alone:
        from motley.engines.ddp import NoOverlapEngine

        return NoOverlapEngine(model, context)
    from motley.engines.ddp import DdpEngine

    return DdpEngine(model, context)


STRATEGIES = (
    Strategy(
        "ddp", " (default): each rank keeps the whole model", lambda config: EngineTraits(),
        _engine, cells={"ddp": ()},
    ),
)  # fmt: skip

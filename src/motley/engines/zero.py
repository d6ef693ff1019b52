"""DeepSpeed's ZeRO, stages 0 to 3: what each sends, and how its engine is made.

DeepSpeed is imported when an engine is built (:mod:`motley.engines.zero_engine`), and not before: a
plan, ``-h`` and whoever trains without it need not have it.
"""

from dataclasses import replace

from motley.config.options import Config
from motley.engines.protocol import Engine, EngineContext
from motley.engines.zero_config import config_path, read_stage
from motley.plan.engine_traits import EngineTraits
from motley.plan.wire import Addition
from motley.tasks.model import Classifier

_AFTER = EngineTraits(
    overlaps=False, additions=(Addition.NUMBERS,), spares_slow_rank=False,
    words="DeepSpeed stage 0 sends gradients after the backward pass",
)  # fmt: skip
TRAITS = (  # by stage
    _AFTER,
    replace(
        _AFTER, gathers_per_step=0.5, shards_optimizer=True,
        words="DeepSpeed stage 1 sends gradients after the backward pass, and then parameters",
    ),
    replace(
        _AFTER, allreduces_per_step=0.0, allreduces_per_micro_step=1.0, gathers_per_step=0.5,
        shards_optimizer=True,
        words="DeepSpeed stage 2 sends gradients in each micro-batch, and then parameters",
    ),
    replace(
        _AFTER, allreduces_per_step=0.0, allreduces_per_micro_step=0.5,
        gathers_per_micro_step=1.0, mixed=False, shards_optimizer=True,
        words="DeepSpeed stage 3 gathers parameters and sends gradients in each micro-batch",
    ),
)  # fmt: skip


class ZeroEngines:
    """Implements EngineFactory: DeepSpeed at the stage that the user has chosen."""

    def __init__(self, config: Config) -> None:
        path = config_path(config)
        stage = read_stage(path)
        say = f"zero_optimization.stage in {path} of" if config.deepspeed_config else "--stage"
        others = {
            f"{say} {n}, if memory allows," if n < stage else f"{say} {n}": traits
            for n, traits in enumerate(TRAITS) if n != stage
        }  # fmt: skip
        others["torch_dist/train_vit.py"] = EngineTraits()
        self.traits = replace(TRAITS[stage], others=others)

    def __call__(self, model: Classifier, context: EngineContext) -> Engine:
        """Set the engine on a model."""
        from motley.engines.zero_engine import ZeroEngine

        return ZeroEngine(model, context)

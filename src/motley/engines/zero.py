"""DeepSpeed's ZeRO, stages 0 to 3: what each sends, and how its engine is made.

DeepSpeed is imported when an engine is built (:mod:`motley.engines.zero_engine`), and not before: a
plan, ``-h`` and whoever trains without it need not have it.
"""

from dataclasses import replace

from motley.config.options import Config
from motley.engines.protocol import Engine, EngineContext
from motley.engines.zero_config import config_path, read_stage
from motley.plan.wire import SIXTEEN, Sending
from motley.tasks.model import Classifier

_AFTER = Sending(
    overlaps=False, kinds=("exact", *SIXTEEN), leaf=False,
    words="DeepSpeed stage 0 sends gradients after the backward pass",
)  # fmt: skip
SENDING = (  # by stage
    _AFTER,
    replace(
        _AFTER, gathers=0.5, cuts=True,
        words="DeepSpeed stage 1 sends gradients after the backward pass, and then parameters",
    ),
    replace(
        _AFTER, once=0.0, each=1.0, gathers=0.5, cuts=True,
        words="DeepSpeed stage 2 sends gradients in each micro-batch, and then parameters",
    ),
    replace(
        _AFTER, once=0.0, each=0.5, gathers_each=1.0, mixed=False, cuts=True,
        words="DeepSpeed stage 3 gathers parameters and sends gradients in each micro-batch",
    ),
)  # fmt: skip


class ZeroEngines:
    """Implements EngineMaker: DeepSpeed at the stage that the user has chosen."""

    def __init__(self, config: Config) -> None:
        path = config_path(config)
        stage = read_stage(path)
        say = f"zero_optimization.stage in {path} of" if config.deepspeed_config else "--stage"
        others = {
            f"{say} {n}, if memory allows," if n < stage else f"{say} {n}": sending
            for n, sending in enumerate(SENDING) if n != stage
        }  # fmt: skip
        others["torch_dist/train_vit.py"] = Sending()
        self.sending = replace(SENDING[stage], others=others)

    def __call__(self, model: Classifier, context: EngineContext) -> Engine:
        """Set the engine on a model."""
        from motley.engines.zero_engine import ZeroEngine

        return ZeroEngine(model, context)

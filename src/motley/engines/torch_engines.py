"""The engines of torch.distributed, by what each rank keeps and what travels between them."""

import argparse

from motley.config.options import Config
from motley.engines.ddp import DdpEngine
from motley.engines.fsdp import FsdpEngine
from motley.engines.local_sgd import LocalEngine
from motley.engines.protocol import Engine, EngineContext
from motley.errors import MotleyError
from motley.plan.engine_traits import EngineTraits
from motley.plan.wire import Addition
from motley.tasks.model import Classifier


def add_options(parser: argparse.ArgumentParser) -> None:
    """What torch_dist/train_vit.py has besides the options of all training scripts."""
    group = parser.add_argument_group("torch.distributed")
    group.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="ddp (default): each rank keeps the whole model; fsdp: a part of it, so that larger "
        "ones fit, and sends more",
    )
    group.add_argument(
        "--offload",
        choices=("none", "parameters"),
        default="none",
        help="with fsdp, what is kept in the host's memory: parameters, and with them gradients "
        "and the optimizer; default: none",
    )


class TorchEngines:
    """Implements EngineFactory: FSDP where ``--strategy`` says so; local steps where
    ``--wire`` does; else DDP."""

    def __init__(self, config: Config) -> None:
        self._shards = config.strategy == "fsdp"
        self.traits = FsdpEngine.traits if self._shards else EngineTraits()
        if config.offload != "none" and not self._shards:
            raise MotleyError(
                f"--offload {config.offload}: DDP keeps all on its device; add --strategy fsdp, or "
                "train with deepspeed/train_vit.py"
            )

    def __call__(self, model: Classifier, context: EngineContext) -> Engine:
        """Set the engine of the plan's wire on a model."""
        if self._shards:
            return FsdpEngine(model, context)
        if context.plan.wire.addition is Addition.LOCAL_STEPS:
            return LocalEngine(model, context)
        return DdpEngine(model, context)

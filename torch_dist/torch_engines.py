"""The engines of torch.distributed, by what each rank keeps and what travels between them."""

from ddp_engine import DdpEngine
from fsdp_engine import FsdpEngine
from local_engine import LocalEngine

from motley.engine import Engine, Seating
from motley.errors import MotleyError
from motley.model import Classifier
from motley.options import Config
from motley.wire import Sending


class TorchEngines:
    """Implements motley.engine.EngineMaker: FSDP where ``--strategy`` says so; local steps where
    ``--wire`` does; else DDP."""

    def __init__(self, config: Config) -> None:
        self._shards = config.strategy == "fsdp"
        self.sending = FsdpEngine.sending if self._shards else Sending()
        if config.offload != "none" and not self._shards:
            raise MotleyError(
                f"--offload {config.offload}: DDP keeps all on its device; add --strategy fsdp, or "
                "train with deepspeed/train_vit.py"
            )

    def __call__(self, model: Classifier, seating: Seating) -> Engine:
        """Set the engine of the plan's wire on a model."""
        if self._shards:
            return FsdpEngine(model, seating)
        if seating.plan.wire.kind == "local":
            return LocalEngine(model, seating)
        return DdpEngine(model, seating)

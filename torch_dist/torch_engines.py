"""The engines of torch.distributed, by what travels between ranks."""

from ddp_engine import DdpEngine
from local_engine import LocalEngine

from motley.engine import Engine, Seating
from motley.model import Classifier
from motley.wire import Sending


class TorchEngines:
    """Implements motley.engine.EngineMaker: local steps where ``--wire`` says so, else DDP."""

    sending = Sending()

    def __call__(self, model: Classifier, seating: Seating) -> Engine:
        """Set the engine of the plan's wire on a model."""
        if seating.plan.wire.kind == "local":
            return LocalEngine(model, seating)
        return DdpEngine(model, seating)

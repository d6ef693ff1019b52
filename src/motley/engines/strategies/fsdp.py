"""FSDP: each rank keeps a part of every parameter, of its gradient and of the optimizer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from motley.config.option import Decides, option
from motley.engines.strategy import Strategy
from motley.plan.engine_traits import EngineTraits
from motley.plan.wire import Addition

if TYPE_CHECKING:
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel

TRAITS = EngineTraits(
    overlaps=False, additions=(Addition.NUMBERS,), spares_slow_rank=False, mixed=False,
    shards_optimizer=True, allreduces_per_step=0.0, allreduces_per_micro_step=1.5,
    parameters_per_micro_step=1.0,
    words="FSDP gathers parameters and scatters gradients in each micro-batch",
    others={"--strategy ddp, if memory allows,": EngineTraits()},
)  # fmt: skip
_NAMED = ("--strategy", "fsdp")


@dataclass(frozen=True)
class FsdpOptions:
    """fsdp"""

    offload: str = option(
        "what is kept in the host's memory: parameters, and with them gradients and the optimizer; "
        "default: none",
        Decides.PLAN, "none", choices=("none", "parameters"),
    )  # fmt: skip


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    from motley.engines.fsdp import FsdpEngine

    return FsdpEngine(model, context)


STRATEGIES = (
    Strategy(
        "fsdp", ": a part of it, so that larger ones fit, and sends more", lambda config: TRAITS,
        _engine, (FsdpOptions,),
        cells={"fsdp": _NAMED, "fsdp-offload": (*_NAMED, "--offload", "parameters")},
    ),
)  # fmt: skip

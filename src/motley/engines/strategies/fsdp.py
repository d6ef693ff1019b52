"""FSDP: each rank keeps a part of every parameter, of its gradient and of the optimizer."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from motley.config.option import Decides, option
from motley.engines.strategies import Strategy
from motley.plan.memory import STATE
from motley.plan.wire import Addition, EngineTraits

if TYPE_CHECKING:
    from motley.config.options import Config
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel

TRAITS = EngineTraits(
    overlaps=False, additions=(Addition.NUMBERS,), spares_slow_rank=False, mixed=False,
    shards_optimizer=True, shards_gradients=True, shards_parameters=True, keeps_gathered=True,
    fills_model=True, allreduces_per_step=0.0, allreduces_per_micro_step=0.5,
    gathers_per_micro_step=0.5, narrow_parameters=True,
    words="FSDP gathers parameters and scatters gradients in each micro-batch",
    others={"--strategy ddp, if memory allows,": EngineTraits()},
)  # fmt: skip
_RESHARDS = replace(TRAITS, gathers_per_micro_step=1.0, keeps_gathered=False)
_NAMED = ("--strategy", "fsdp")


@dataclass(frozen=True)
class FsdpOptions:
    """fsdp"""

    offload: str = option(
        "what is kept in the host's memory: parameters, and with them gradients and the optimizer; "
        "default: none",
        Decides.PLAN | Decides.SPEED, "none", choices=("none", "parameters"), per_launch=True,
    )  # fmt: skip
    reshard_after_forward: bool = option(
        "let go of parameters that were gathered for the forward pass, and gather them again for "
        "the backward pass: less memory, and half as much again on the wire",
        Decides.PLAN | Decides.SPEED, False, per_launch=True,
    )  # fmt: skip


def _traits(config: "Config") -> EngineTraits:
    own = config.of(FsdpOptions)
    traits = _RESHARDS if own.reshard_after_forward else TRAITS
    return replace(traits, state_in_host=STATE if own.offload == "parameters" else ())


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    from motley.engines.fsdp import FsdpEngine

    return FsdpEngine(model, context)


STRATEGIES = (
    Strategy(
        "fsdp", ": a part of it, so that larger ones fit, and sends more", _traits,
        _engine, (FsdpOptions,),
        cells={
            "fsdp": _NAMED, "fsdp-reshard": (*_NAMED, "--reshard-after-forward"),
            "fsdp-offload": (*_NAMED, "--offload", "parameters"),
        },
    ),
)  # fmt: skip

"""FSDP: each rank keeps a shard of every parameter, of its gradient and of the optimizer's state.

A piece is a few blocks whose parameters are gathered together, with b bytes per element. Gradients
are reduce-scattered with r bytes per element. Let P be the number of parameters, g the number in
the largest piece, and u the number outside of all pieces. These u parameters and their gradients
stay gathered from the first use to the end of the backward pass. A rank holds at most

    b (P + u) + g (b + 2 r)          parameters stay gathered after the forward pass
    2 b u + g (3 b + 2 r)            --reshard-after-forward: they are gathered again

bytes of gathered parameters and gradients. A piece is gathered while the previous piece is in use.
A gradient is scattered from a copy with r bytes per element, and torch keeps this copy until the
next copy is sent. In 16 bits, b and r are those of ``MixedPrecisionPolicy`` in
torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from motley.config.option import Decides, option
from motley.engines.strategies import Strategy
from motley.plan.memory import STATE, GatheredMemory, ModelSize
from motley.plan.wire import Addition, EngineTraits

if TYPE_CHECKING:
    from motley.config.options import Config
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel

# Number of pieces. The host's time for a small piece exceeds the GPU's computation that should
# hide it, and no computation hides the communication of the last piece.
_PIECES = 6
_MOST = 2**28  # parameters in a piece of several blocks, which limits the memory


def count_blocks(numbers: Sequence[int]) -> int:
    """Return the number of neighbouring blocks that are gathered together.

    Args:
        numbers: number of parameter elements in each block.
    """
    return max(1, min(-(-len(numbers) // _PIECES), _MOST // max([1, *numbers])))


def _estimate_saved_bytes(size: ModelSize, wide: int, wire_bytes: int) -> float:
    return wide * (size.parameters + size.outside) + size.largest * (wide + 2 * wire_bytes)


def _estimate_resharded(size: ModelSize, wide: int, wire_bytes: int) -> float:
    return 2 * wide * size.outside + size.largest * (3 * wide + 2 * wire_bytes)


TRAITS = EngineTraits(
    overlaps=False, additions=(Addition.NUMBERS,), spares_slow_rank=False, mixed=False,
    shards_optimizer=True, shards_gradients=True, shards_parameters=True,
    gathered=GatheredMemory(_estimate_saved_bytes, count_blocks, ("--reshard-after-forward",)),
    fills_model=True, allreduces_per_step=0.0, allreduces_per_micro_step=0.5,
    gathers_per_micro_step=0.5, narrow_parameters=True,
    words="FSDP gathers parameters and scatters gradients in each micro-batch",
    others={"--strategy ddp, if memory allows,": EngineTraits()},
)  # fmt: skip
RESHARDS = replace(
    TRAITS, gathers_per_micro_step=1.0, gathered=GatheredMemory(_estimate_resharded, count_blocks)
)
_NAMED = ("--strategy", "fsdp")


@dataclass(frozen=True)
class FsdpOptions:
    """Options of --strategy fsdp"""

    offload: str = option(
        "what is kept in the host's memory: parameters (with their gradients and optimizer "
        "state); default: nothing",
        Decides.PLAN | Decides.SPEED, "none", choices=("none", "parameters"), per_launch=True,
    )  # fmt: skip
    reshard_after_forward: bool = option(
        "free parameters that were gathered for the forward pass, and gather them again for the "
        "backward pass: less memory, and half as many more bytes to send",
        Decides.PLAN | Decides.SPEED, False, per_launch=True,
    )  # fmt: skip


def _traits(config: "Config") -> EngineTraits:
    own = config.group(FsdpOptions)
    traits = RESHARDS if own.reshard_after_forward else TRAITS
    return replace(traits, state_in_host=STATE if own.offload == "parameters" else ())


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    from motley.engines.fsdp import FsdpEngine

    return FsdpEngine(model, context)


STRATEGIES = (
    Strategy(
        "fsdp",
        ": each rank keeps a part of it, so larger models fit, and ranks send more", _traits,
        _engine, (FsdpOptions,),
        cells={
            "fsdp": _NAMED, "fsdp-reshard": (*_NAMED, "--reshard-after-forward"),
            "fsdp-offload": (*_NAMED, "--offload", "parameters"),
        },
    ),
)  # fmt: skip

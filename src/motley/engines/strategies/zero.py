"""DeepSpeed's ZeRO, stages 0 to 3: the state that each stage keeps, and the data that it sends.

Stage 3 keeps a second copy of the trained parameters for its optimizer: 4 T / W bytes per rank, for
T trained parameters and W ranks. Let P be the number of parameters, g the number in the largest
block and u the number outside of blocks. Stage 3 gathers one block at a time, in fp32, with a
temporary copy, and releases parameters that are not used again within the next L = 10^9 elements.
Gradients are reduced in buckets of B elements of r bytes. A rank holds at most

    4 min(P, L + g) + 4 u + g (8 + r) + 4 min(P, B)

bytes of gathered parameters and gradients in transfer.

DeepSpeed is imported only when an engine is built (:mod:`motley.engines.zero_engine`). A plan,
``-h`` and training with other strategies do not need DeepSpeed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from motley.config.options import Config
from motley.engines.strategies import ZERO, Strategy
from motley.engines.zero_config import (
    BUCKET,
    STAGES,
    ZeroOptions,
    config_path,
    read_stage,
    state_in_host,
)
from motley.errors import MotleyError
from motley.plan.memory import WIDE, GatheredMemory, ModelSize
from motley.plan.wire import Addition, EngineTraits
from motley.text import typed_command

if TYPE_CHECKING:
    from motley.engines.protocol import Engine, EngineContext
    from motley.tasks.model import TaskModel

_AFTER = EngineTraits(
    overlaps=False, additions=(Addition.NUMBERS,), spares_slow_rank=False,
    words="DeepSpeed stage 0 sends gradients after the backward pass",
)  # fmt: skip
_SOON = 1e9  # numbers; default of DeepSpeed's stage3_max_reuse_distance


def _estimate_gathered(size: ModelSize, _: int, wire_bytes: int) -> float:
    live = WIDE * (min(size.parameters, _SOON + size.largest) + size.outside)
    copies = size.largest * (2 * WIDE + wire_bytes)
    return live + copies + WIDE * min(size.parameters, BUCKET)


TRAITS = (  # traits of each stage
    _AFTER,
    replace(
        _AFTER, gathers_per_step=0.5, shards_optimizer=True,
        words="DeepSpeed stage 1 sends gradients after the backward pass, and then parameters",
    ),
    replace(
        _AFTER, allreduces_per_step=0.0, allreduces_per_micro_step=1.0, gathers_per_step=0.5,
        shards_optimizer=True, shards_gradients=True,
        words="DeepSpeed stage 2 sends gradients in each micro-batch, and then parameters",
    ),
    replace(
        _AFTER, allreduces_per_step=0.0, allreduces_per_micro_step=0.5,
        gathers_per_micro_step=1.0, mixed=False, shards_optimizer=True,
        shards_gradients=True, shards_parameters=True, fills_model=True, flat_parts=True,
        gathered=GatheredMemory(_estimate_gathered),
        compiles=False,  # hooks inside a block gather each layer's parameters
        words="DeepSpeed stage 3 gathers parameters and sends gradients in each micro-batch",
    ),
)  # fmt: skip


def _traits(config: Config) -> EngineTraits:
    from motley.engines.optimizers import find_row

    own = config.group(ZeroOptions)
    path = config_path(own)
    stage = read_stage(path)
    if stage and find_row(config.opt) > 1:
        raise MotleyError(
            f"--opt {config.opt} updates whole rows of a parameter, and ZeRO stage {stage} gives "
            "an optimizer flat parts that have no rows. Take torch_dist/train_vit.py --strategy "
            "fsdp, which keeps rows, or --stage 0, or --opt adamw"
        )
    say = f"zero_optimization.stage in {path} of" if own.deepspeed_config else "--stage"
    others = {
        f"{say} {n}, if memory allows," if n < stage else f"{say} {n}": traits
        for n, traits in enumerate(TRAITS) if n != stage
    }  # fmt: skip
    others[typed_command("torch_dist/train_vit.py")] = EngineTraits()
    return replace(TRAITS[stage], others=others, state_in_host=state_in_host(own))


def _engine(model: "TaskModel", context: "EngineContext") -> "Engine":
    from motley.engines.zero_engine import Zero3Engine, ZeroEngine

    is_cut = read_stage(config_path(context.config.group(ZeroOptions))) == 3
    return (Zero3Engine if is_cut else ZeroEngine)(model, context)


STRATEGIES = (
    Strategy(
        "zero", ": DeepSpeed", _traits, _engine, (ZeroOptions,), ZERO,
        ("deepspeed",),
        cells={
            **{f"zero{stage}": ("--stage", str(stage)) for stage in STAGES},
            "zero2-offload": ("--stage", "2", "--offload", "optimizer"),
            "zero3-offload": ("--stage", "3", "--offload", "parameters"),
        },
    ),
)  # fmt: skip

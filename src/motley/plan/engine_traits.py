"""What an engine can do with gradients, known before it is built. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motley.plan.wire import Addition, AllReduceCost, WireMode


@dataclass(frozen=True)
class EngineTraits:
    """What an engine can do with gradients.

    Attributes:
        overlaps: send them while the backward pass still runs.
        additions: that wire modes may ask of it. spares_slow_rank: see WireMode.slow_rank.
        allreduces_per_step, allreduces_per_micro_step: of the gradient, once in a step and once in
            each of its micro-batches.
        gathers_per_step, gathers_per_micro_step: what it costs to gather parameters after a step
            and in each of its micro-batches, in fp32 all-reduces of the gradient.
        narrow_parameters: they are gathered in 16 bits where all ranks compute in the same.
        mixed: whether GPUs and CPUs can do it together.
        shards_optimizer: each rank keeps, and steps, a part of the optimizer alone.
        shards_gradients, shards_parameters: it keeps a part of these alone.
        keeps_gathered: parameters that were gathered for the forward pass stay until the backward
            pass has used them.
        flat_parts: as DeepSpeed's: the optimizer steps a copy of its part of the parameters,
            gradients have their place all the time, and what was gathered stays if it is needed
            again soon.
        state_in_host: which of "parameters", "gradients" and "optimizer" are in the host's memory.
        fills_model: it gives a model its initial numbers as it cuts it, if it has none yet.
        compiles: the model that it wraps may be compiled by blocks.
        words: how it sends, for the user.
        others: engines that send otherwise, by what a user writes to have them.
    """

    overlaps: bool = True
    additions: tuple[Addition, ...] = tuple(Addition)
    spares_slow_rank: bool = True
    allreduces_per_step: float = 1.0
    allreduces_per_micro_step: float = 0.0
    gathers_per_step: float = 0.0
    gathers_per_micro_step: float = 0.0
    narrow_parameters: bool = False
    mixed: bool = True
    shards_optimizer: bool = False
    shards_gradients: bool = False
    shards_parameters: bool = False
    keeps_gathered: bool = False
    flat_parts: bool = False
    state_in_host: tuple[str, ...] = ()
    fills_model: bool = False
    compiles: bool = True
    words: str = "gradients are sent while the backward pass still runs"
    others: Mapping[str, "EngineTraits"] = field(default_factory=dict)

    def can(self, mode: WireMode) -> bool:
        """Whether the engine can do this mode."""
        return mode.addition in self.additions and (self.spares_slow_rank or mode.slow_rank is None)

    def through(
        self,
        wire: AllReduceCost,
        mode: WireMode,
        precisions: Sequence[str] = (),
        exact: AllReduceCost | None = None,
    ) -> AllReduceCost:
        """What was measured of a mode, as the engine uses it.

        Args:
            precisions: of all ranks. exact: what was measured of fp32, in which parameters are
                gathered; None: as long for each byte.
        """
        wide = 1.0 if mode.dtype == "fp32" else 2.0
        if self.narrow_parameters and set(precisions) in ({"bf16"}, {"fp16"}):
            wide /= 2
        elif exact is not None and wire.seconds_once > 0:
            wide = exact.seconds_once / wire.seconds_once
        return dataclasses.replace(
            wire,
            overlaps=wire.overlaps and self.overlaps,
            allreduces_per_step=self.allreduces_per_step + wide * self.gathers_per_step,
            # After a step those alone are gathered that it has changed.
            allreduces_per_micro_step=(
                self.allreduces_per_micro_step
                + wide * self.gathers_per_micro_step * (1 + wire.frozen)
            ),
        )

    def optimizer_shards(self, ranks: int) -> int:
        """Parts that the optimizer is cut into, over so many ranks."""
        return ranks if self.shards_optimizer else 1

    @property
    def numbers(self) -> list[float]:
        """What a forecast depends on, for the records."""
        return [
            self.allreduces_per_step,
            self.allreduces_per_micro_step,
            self.gathers_per_step,
            self.gathers_per_micro_step,
        ]

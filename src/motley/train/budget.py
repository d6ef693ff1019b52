"""What a run is going to take, said before it starts: its time, and the disk of its checkpoints."""

from dataclasses import dataclass, replace
from pathlib import Path

from motley.checkpoint.store import Checkpoints, free_bytes
from motley.config.options import Config
from motley.engines.optimizer_trial import kept_numbers
from motley.errors import MotleyError
from motley.plan.length import Length, TrainState
from motley.plan.plan import Plan
from motley.train.progress import clock


@dataclass(frozen=True)
class Budget:
    """What a run is going to take.

    Attributes:
        steps: that are left. step_s: of each, forecast; None where nothing was measured.
        checkpoint: bytes of one. saves: that are going to be made. keep: that stay.
        there: that are on the disk already, and give way. free: bytes, in ``folder``.
    """

    steps: int
    step_s: float | None
    checkpoint: float
    saves: int
    keep: int
    there: int
    free: float
    folder: Path

    @property
    def needed(self) -> float:
        """Bytes of the disk, at most: a new checkpoint is whole before the oldest goes."""
        return self.checkpoint * min(self.saves, max(1, self.keep + 1 - self.there))

    def check(self) -> None:
        """MotleyError if the disk is too small."""
        if self.needed <= self.free:
            return
        fewer = replace(self, keep=1).needed < self.needed
        raise MotleyError(
            f"checkpoints of {_size(self.checkpoint)} each are going to need {_size(self.needed)}, "
            f"and {_size(self.free)} are free in {self.folder}; free some disk, "
            f"{'keep fewer with --keep 1, ' if fewer else ''}or choose another one with --logs DIR "
            "(there, a run is continued by --resume PATH)"
        )

    def sentence(self) -> str:
        """For the log."""
        taken = f"{self.steps:,} steps"
        if self.step_s is not None:
            taken += f" should take {clock(self.steps * self.step_s)}, and evaluations"
        if not self.saves:
            return f"{taken}; no checkpoints"
        return (
            f"{taken}; checkpoints take up to {_size(self.needed)} of the {_size(self.free)} that "
            f"are free in {self.folder}"
        )


def budget_of(
    checkpoints: Checkpoints,
    length: Length,
    state: TrainState,
    checkpoint: float,
    keep: int,
    step_s: float | None,
) -> Budget:
    """What the rest of a run is going to take, from ``state``; on the rank that writes.

    Args:
        checkpoint: bytes of one. step_s: of a step, as Budget has it.
    """
    checkpoints.sweep()
    return Budget(
        length.last_step(state) - state.step, step_s, checkpoint, length.saves_left(state), keep,
        there=len(checkpoints.found(state.step)), free=free_bytes(checkpoints.path),
        folder=checkpoints.path,
    )  # fmt: skip


def checkpoint_bytes(numbers: int, trained: int, config: Config, plan: Plan) -> float:
    """Of one checkpoint, about: parameters and buffers, what the optimizer keeps of each number,
    their average, and what the wire keeps on each rank.

    Args:
        numbers: in the model. trained: of these; of others nothing else is kept.
    """
    copies = kept_numbers(config) + plan.wire.kept_copies * len(plan.counts)
    copies += config.model_ema
    return float(4 * (numbers + copies * trained))


def _size(number: float) -> str:
    unit = 0
    while number >= 999.5 and unit < 4:
        number, unit = number / 1024, unit + 1
    return f"{number:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"

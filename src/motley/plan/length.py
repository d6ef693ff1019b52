"""The length of a run and its batches, counted in samples.

The module reads no file, clock or hardware.

A length is not counted in steps, because the global batch may grow, as in ``512:2048:32/100M``.
"""

import dataclasses
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from motley.errors import MotleyError

_TEXT = re.compile(r"(\d+):(\d+):(\d+)/(\d+)([KMG]?)")
_TIMES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Ramp:
    """The growth of the batch size during a run.

    Attributes:
        first: samples in the first step.
        most: samples in the last steps.
        by: samples that each growth adds to the batch.
        over: number of samples of the run after which the batch has grown to ``most``; 0: the batch
            does not grow.
    """

    first: int
    most: int
    by: int = 1
    over: int = 0

    def at(self, used: int) -> int:
        """Return the batch size of the step that starts after ``used`` samples of the run."""
        if used >= self.over:
            return self.most
        times = (self.most - self.first) // self.by
        return self.first + self.by * (used * times // self.over)

    def batches(self) -> range:
        """Return all batch sizes, ascending."""
        return range(self.first, self.most + 1, self.by)

    def steps(self, used: int, until: int) -> int:
        """Return the number of steps between two positions of one epoch, counted in samples.

        The last step may be smaller.
        """
        count = 0
        while used < min(until, self.over):
            used += self.at(used)
            count += 1
        return count + max(0, -((used - until) // self.most))

    def __str__(self) -> str:
        return f"{self.first}:{self.most}:{self.by}/{self.over}"


class RampedBatch(int):
    """A growing ``--batch-size``: the largest batch as an int, with the growth as ``ramp``."""

    ramp: Ramp

    def __new__(cls, text: str) -> "RampedBatch":
        """Parse the text as :func:`read_ramp` does."""
        ramp = read_ramp(text)
        made = super().__new__(cls, ramp.most)
        made.ramp = ramp
        return made

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (str(self),)

    def __str__(self) -> str:
        return str(self.ramp)


def make_ramp(batch_size: int) -> Ramp:
    """Return the growth of a batch size. A plain number gives a :class:`Ramp` without growth."""
    if isinstance(batch_size, RampedBatch):
        return batch_size.ramp
    return Ramp(batch_size, batch_size)


def read_ramp(text: str) -> Ramp:
    """Return the growth that ``first:most:by/samples`` describes.

    The number of samples may end with K, M or G, for 10**3, 10**6 or 10**9.

    Raises:
        MotleyError: the text has another form, or ``by`` does not divide the difference of
            ``first`` and ``most``.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MotleyError(
            f"--batch-size {text}: write FIRST:LAST:BY/SAMPLES, as in 512:2048:32/100M, which "
            "raises the batch from 512 to 2048 in steps of 32 over the first 100 million samples"
        )
    first, most, by, over = (int(number) for number in match.groups()[:4])
    over *= _TIMES[match[5]]
    if not (0 < first < most and by > 0 and over > 0):
        raise MotleyError(
            f"--batch-size {text}: give a first batch above 0, a larger last batch, and a number "
            "of samples above 0"
        )
    if (most - first) % by:
        near = first + (most - first) // by * by
        raise MotleyError(
            f"--batch-size {text}: steps of {by} from {first} do not end at {most}; take "
            f"{f'{near} or ' if near > first else ''}{near + by}"
        )
    return Ramp(first, most, by, over)


def growth(ramp: Ramp) -> Iterator[str]:
    """Yield a line for the user that describes the growth of the batch; none without growth."""
    if ramp.over:
        steps = ramp.steps(0, ramp.over)
        yield (
            f"the batch grows from {ramp.first} to {ramp.most} samples, in steps of {ramp.by}, "
            f"over the first {ramp.over:,} samples, which are {steps:,} steps"
        )


@dataclass(frozen=True)
class TrainState:
    """The position of a run in its training.

    Attributes:
        step: number of optimizer steps taken.
        epoch: number of the current epoch.
        consumed: samples of the current epoch that all ranks together have used.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Length:
    """The length of a run in epochs, and its batches.

    If a run continues with another batch size, each sample is still used once per epoch. The number
    of steps counts how often the optimizer stepped.

    Attributes:
        epochs: epochs of the whole run.
        epoch_samples: samples in each epoch.
        batch: samples in a step over all ranks. The last step of an epoch may have fewer.
        max_steps: step after which the run ends at the latest; None: no limit.
        save_every: steps between checkpoints; 0: no checkpoints; None: one checkpoint at the end of
            each epoch.
        by_clock: True if the caller decides by time when to write checkpoints. A checkpoint is also
            due at the end of the run.
        ramp: growth of the batch up to ``batch``; None: the batch does not grow.
        eval_every: steps between evaluations; None: one evaluation at the end of each epoch.
        eval_by_clock: True if the caller decides by time when to evaluate. An evaluation is also
            due at the end of the run.
        eval_at_start: True if an evaluation is due before the first step.
    """

    epochs: int
    epoch_samples: int
    batch: int
    max_steps: int | None = None
    save_every: int | None = None
    by_clock: bool = False
    ramp: Ramp | None = None
    eval_every: int | None = None
    eval_by_clock: bool = False
    eval_at_start: bool = False

    @property
    def steps_an_epoch(self) -> int:
        """Number of steps in an epoch with batches of ``batch`` samples."""
        return math.ceil(self.epoch_samples / self.batch)

    def at(self, position: TrainState) -> TrainState:
        """Return the position, or the start of the next epoch if it is the end of an epoch."""
        if position.consumed < self.epoch_samples:
            return position
        return TrainState(position.step, position.epoch + 1, 0)

    def after(self, position: TrainState, samples: int) -> TrainState:
        """Return the position after a step of ``samples`` samples."""
        consumed = position.consumed + samples
        return self.at(dataclasses.replace(position, step=position.step + 1, consumed=consumed))

    def ended(self, position: TrainState) -> bool:
        """Return True if the run is complete at this position."""
        cut = self.max_steps is not None and position.step >= self.max_steps
        return cut or position.epoch >= self.epochs

    def evaluates(self, position: TrainState) -> bool:
        """Return True if an evaluation is due at this position.

        An evaluation is always due at the end of the run.
        """
        if position.step == 0:
            return self.eval_at_start
        if self.eval_by_clock:
            return self.ended(position)
        if self.eval_every is None:
            return self._ends_epoch(position)
        return self.ended(position) or position.step % self.eval_every == 0

    def _ends_epoch(self, position: TrainState) -> bool:
        """Return True if the position is at the end of an epoch or of the run."""
        return position.step > 0 and (position.consumed == 0 or self.ended(position))

    def saves(self, position: TrainState) -> bool:
        """Return True if a checkpoint is due at this position.

        A checkpoint is always due at the end of the run, unless checkpoints are off.
        """
        if self.by_clock:
            return self.ended(position)
        if self.save_every is None:
            return self._ends_epoch(position)
        return self.save_every > 0 and (
            self.ended(position) or position.step % self.save_every == 0
        )

    def full_batch(self, position: TrainState) -> int:
        """Return the number of samples of a full batch in the next step.

        The epoch may have fewer samples left.
        """
        used = position.epoch * self.epoch_samples + position.consumed
        return self._growth.at(used)

    @property
    def full_batches(self) -> range:
        """Range of all values of :meth:`full_batch`, ascending."""
        return self._growth.batches()

    def updates(self, position: TrainState) -> float:
        """Return the position in the learning-rate schedule, in steps of ``batch`` since the start.

        The position is a whole number, equal to the number of steps, unless the batch changed in
        the middle of the current epoch.
        """
        return position.epoch * self.steps_an_epoch + position.consumed / self.batch

    def updates_at(self, step: int) -> float:
        """Return the position in the schedule after ``step`` steps from the start of the run.

        See :meth:`updates`. The result lies after the last epoch if the run has fewer than ``step``
        steps.
        """
        if self.ramp is None or not self.ramp.over:
            return float(step)
        position = TrainState()
        while position.step < step:
            remaining = self.epoch_samples - position.consumed
            position = self.after(position, min(self.full_batch(position), remaining))
        return self.updates(position)

    def last_step(self, position: TrainState) -> int:
        """Return the number of the last step of a run that continues from a position."""
        if self.ended(position):
            return position.step
        last = position.step + sum(self._steps_of_epochs(position))
        return min(last, self.max_steps or last)

    def saves_left(self, position: TrainState) -> int:
        """Return an upper bound on the number of checkpoints that the run will still write."""
        last, every = self.last_step(position), self.save_every
        if every == 0 or last == position.step:
            return 0
        if self.by_clock:  # an upper bound
            return last - position.step
        if every:
            return last // every - position.step // every + (last % every > 0)
        ends = list(accumulate(self._steps_of_epochs(position), initial=position.step))
        return bisect_left(ends, last)  # an incomplete last epoch counts too

    def evaluations_left(self, position: TrainState) -> int:
        """Return an upper bound on the number of evaluations that the run will still make."""
        last = self.last_step(position)
        if self.eval_by_clock or last == position.step:
            return last - position.step
        if self.eval_every:
            return last // self.eval_every - position.step // self.eval_every + 1
        ends = list(accumulate(self._steps_of_epochs(position), initial=position.step))
        return bisect_left(ends, last)

    @property
    def _growth(self) -> Ramp:
        return self.ramp or Ramp(self.batch, self.batch)

    def _steps_of_epochs(self, position: TrainState) -> Iterator[int]:
        """Yield the number of remaining steps of the current epoch, and of each later epoch."""
        for epoch in range(position.epoch, self.epochs):
            begin = epoch * self.epoch_samples
            consumed = position.consumed if epoch == position.epoch else 0
            yield self._growth.steps(begin + consumed, begin + self.epoch_samples)

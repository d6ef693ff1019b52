"""Evidence that a rank's speed differs from the one its share was made for. Pure.

A column holds the ratio of a rank's time to the expected time, step by step. A window of k steps
shows a change if at least m of them lie beyond a threshold on one side (:data:`WINDOWS`). The
threshold follows from the noise of the column, such that noise alone shows a change in one of a
million looks at all columns (see ARITHMETIC.md).
"""

import math
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from motley.plan.split import Floats

# The steps of a window, and how many of them must agree.
WINDOWS = {3: 3, 4: 4, 8: 7, 16: 12, 32: 21, 64: 39, 128: 73}
LONGEST = max(WINDOWS)
FALSE_ALARM = 1e-6  # chance per look at all columns
LEAST_NOISE = 0.01  # relative standard deviation of a step: a clock is no better
_FIRST = 8  # steps after which noise is estimated for the first time
_BLOCK = 8  # steps whose medians show noise that lasts longer than a step
_TOO_FEW = 0.4  # known steps, of those in which noise would pass a threshold once
_ROUNDED = 1024  # thresholds are multiples of 1/1024: libraries differ in the last bit of exp


class Groups:
    """Columns that belong together.

    Args:
        keys: one per column; columns of one group have equal keys.
    """

    def __init__(self, keys: Sequence[Hashable]) -> None:
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._group = np.array([numbers[key] for key in keys], dtype=int)
        self._size = np.bincount(self._group, minlength=len(numbers))
        self._begin = np.cumsum(self._size) - self._size

    @property
    def are_single(self) -> bool:
        """True if each column is a group of its own."""
        return len(self._size) == len(self._group)

    def median(self, values: Floats) -> Floats:
        """Return the median of its group for each column, the geometric mean of the middle two."""
        if self.are_single:
            return values
        ordered = values[np.lexsort((values, self._group))]
        low, high = self._begin + (self._size - 1) // 2, self._begin + self._size // 2
        middle: Floats = np.sqrt(ordered[low] * ordered[high])[self._group]
        return middle


class Evidence:
    """The last steps of all columns, and the noise in them.

    Args:
        groups: columns of equal devices, whose noise is at least the median of the group.
    """

    def __init__(self, groups: Groups, columns: int) -> None:
        self._groups, self.columns = groups, columns
        self._ratios = np.ones((2 * LONGEST, columns))
        self._folds = np.ones((2 * LONGEST, columns))  # max(ratio, 1 / ratio)
        self._thresholds: dict[int, Floats] = {}
        self._end = self._known = 0  # rows; steps that they hold
        self.steps = 0  # of the present split
        self.noise = math.inf  # standard deviation of a step's logarithm, of the median column
        # Share of the steps that noise may push beyond the threshold on one side.
        self._tails = {
            window: (FALSE_ALARM / max(1, columns) / math.comb(window, needed)) ** (1 / needed)
            for window, needed in WINDOWS.items()
        }

    def clear(self) -> None:
        """Begin with another split. Earlier steps still show the noise."""
        self.steps = 0

    def add(self, ratios: Floats) -> None:
        """Append a step: the ratio of each column."""
        if self._end == len(self._ratios):
            self._ratios[:LONGEST] = self._ratios[LONGEST:]
            self._folds[:LONGEST] = self._folds[LONGEST:]
            self._end = LONGEST
        self._ratios[self._end] = ratios
        np.maximum(ratios, 1 / ratios, out=self._folds[self._end])
        self._end, self._known, self.steps = self._end + 1, self._known + 1, self.steps + 1
        if self._known % (_FIRST if self._known <= 4 * _FIRST else 4 * _FIRST) == 0:
            self._estimate_noise()

    def explain(self, steps: int, change: Floats) -> None:
        """Take a change for the cause of the last steps before :meth:`clear`, which are no noise.

        Args:
            steps: how many. change: ratio of each column in these steps.
        """
        end = self._end - self.steps
        rows = slice(max(0, end - steps), max(0, end))
        self._ratios[rows] /= change
        self._folds[rows] = np.maximum(self._ratios[rows], 1 / self._ratios[rows])
        self._estimate_noise()

    def is_due(self, window: int) -> bool:
        """Return True if a window of so many steps is looked at now: four times while it passes."""
        pause = max(1, window // 4)
        return self.steps >= window and self.steps % pause == 0 and self._known >= _FIRST

    def last(self, steps: int) -> Floats:
        """Return the ratios of the last steps, [steps, columns]."""
        return self._ratios[self._end - steps : self._end]

    def changes(self, window: int) -> Floats | None:
        """Return the median ratio of each column that has changed, and 1 for all others.

        None if no column has changed in the last ``window`` steps.
        """
        needed = WINDOWS[window]
        beyond = self._folds[self._end - window : self._end] > self._thresholds[window]
        if not (beyond.sum(axis=0) >= needed).any():
            return None
        ratios = self.last(window)
        slower = (beyond & (ratios > 1)).sum(axis=0) >= needed
        faster = (beyond & (ratios < 1)).sum(axis=0) >= needed
        changed = slower | faster
        return np.where(changed, median(ratios), 1.0) if changed.any() else None

    def _estimate_noise(self) -> None:
        """Find the threshold of each window and column.

        Noise passes it in so few steps as the window allows: by a normal distribution of this
        spread, and by count.
        """
        ratios = self.last(min(self._known, LONGEST))
        if len(ratios) < LONGEST // 2:
            # A change may be a large part of few steps, but it is one of their differences.
            ordered = np.sort(ratios[1:] / ratios[:-1], axis=0)
            deviation = _deviation(ordered) / math.sqrt(2) * (1 + 8 / len(ordered))
        else:
            ratios = ratios[:-_BLOCK]  # a change in the last ones is not found yet
            blocks = ratios[len(ratios) % _BLOCK :].reshape(-1, _BLOCK, self.columns)
            of_median = 1.2533 / math.sqrt(_BLOCK)  # a median's noise, if steps are independent
            lasting = _deviation(_centred(median(blocks.swapaxes(0, 1)))) / of_median
            ordered = _centred(ratios)
            deviation = np.maximum(_deviation(ordered), lasting)
        deviation = np.maximum(deviation, LEAST_NOISE)
        self.noise = round(float(median(deviation)), 6)
        for window, tail in self._tails.items():
            beyond = int(tail * (len(ordered) + 2)) - 1  # Laplace's rule of succession
            if beyond >= 0:
                counted = np.maximum(ordered[-1 - beyond], 1 / ordered[beyond])
            elif tail * (len(ordered) + 2) > _TOO_FEW:
                # Too few steps to count: a change must be twice as far as the farthest of them.
                counted = np.maximum(ordered[-1], 1 / ordered[0]) ** 2
            else:
                self._thresholds[window] = np.full(self.columns, np.inf)
                continue
            threshold = np.maximum(np.exp(_quantile(tail) * deviation), counted)
            threshold = np.maximum(threshold, self._groups.median(threshold))
            self._thresholds[window] = np.ceil(threshold * _ROUNDED) / _ROUNDED


@cache
def _quantile(tail: float) -> float:
    """Return the value that a standard normal variable exceeds with this probability."""
    return -NormalDist().inv_cdf(tail)


def _centred(ratios: Floats) -> Floats:
    """Return the ratios to their median, in ascending order."""
    ordered = np.sort(ratios, axis=0)
    found: Floats = ordered / _middle(ordered)
    return found


def _deviation(ordered: Floats) -> Floats:
    """Return the standard deviation of each column's logarithm, without rare long steps."""
    outside = int(0.15 * len(ordered))  # steps on each side; a normal distribution has 1.0364
    found: Floats = np.log(np.maximum(ordered[-1 - outside], 1 / ordered[outside])) / 1.0364
    return found


def median(rows: Floats) -> Floats:
    """Return the median over the first axis, the geometric mean of the middle two rows.

    Of two ranks, one is then as many times slower as the other is faster.
    """
    return _middle(np.sort(rows, axis=0))


def _middle(ordered: Floats) -> Floats:
    middle: Floats = np.sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])
    return middle

"""Statistical tests if a rank's speed differs from the speed that its share assumes.

The module reads no file, clock or hardware.

A share is the number of samples that a rank takes in a step. A column is a series of ratios, one
per step: the time that a rank took, divided by the expected time. A window of k steps shows a
change if at least m of its steps lie beyond a threshold on one side (:data:`WINDOWS`). The
threshold follows from the noise of the column. The thresholds are such that noise alone shows a
change in one of a million checks (see ARITHMETIC.md).
"""

import math
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from motley.plan.plan import Floats

# Steps in a window, and how many of them must lie beyond the threshold.
WINDOWS = {3: 3, 4: 4, 8: 7, 16: 12, 32: 21, 64: 39, 128: 73}
LONGEST = max(WINDOWS)
FALSE_ALARM = 1e-6  # probability per check of all columns
LEAST_NOISE = 0.01  # least relative standard deviation of a step, due to the clock
_FIRST = 8  # steps after which noise is estimated for the first time
_BLOCK = 8  # steps per block; medians of blocks show noise that lasts longer than a step
_TOO_FEW = 0.4  # expected number of steps beyond a threshold, below which it is unknown
_ROUNDED = 1024  # thresholds are multiples of 1/1024, as the last bit of exp differs


class Groups:
    """Groups of columns. The columns of a group belong to devices that count as equal.

    Args:
        keys: one key per column. Columns with equal keys form a group.
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
        """Return, for each column, the median of its group's values.

        With an even number of values, the median is the geometric mean of the middle two.
        """
        if self.are_single:
            return values
        ascending = values[np.lexsort((values, self._group))]
        low, high = self._begin + (self._size - 1) // 2, self._begin + self._size // 2
        middle: Floats = np.sqrt(ascending[low] * ascending[high])[self._group]
        return middle


class Evidence:
    """The ratios of measured to expected time in the last steps, and their noise.

    A column of ratios belongs to a device.

    Args:
        groups: groups of columns whose devices are equal. A column's threshold is at least the
            median threshold of its group.
        columns: number of columns.
    """

    def __init__(self, groups: Groups, columns: int) -> None:
        self._groups, self.columns = groups, columns
        self._ratios = np.ones((2 * LONGEST, columns))
        self._folds = np.ones((2 * LONGEST, columns))  # max(ratio, 1 / ratio)
        self._thresholds: dict[int, Floats] = {}
        self._end = self._known = 0  # rows in use; all steps so far
        self.steps = 0  # steps with the current split
        self.noise = math.inf  # standard deviation of a step's logarithm, of the median column
        # Share of the steps that noise may push beyond the threshold on one side.
        self._tails = {
            window: (FALSE_ALARM / max(1, columns) / math.comb(window, quorum)) ** (1 / quorum)
            for window, quorum in WINDOWS.items()
        }

    def clear(self) -> None:
        """Start again with a new split of the batch among the ranks.

        Steps before the call are still used to estimate the noise.
        """
        self.steps = 0

    def add(self, ratios: Floats) -> None:
        """Append the ratios of one step, an array of shape [columns]."""
        if self._end == len(self._ratios):
            self._ratios[:LONGEST] = self._ratios[LONGEST:]
            self._folds[:LONGEST] = self._folds[LONGEST:]
            self._end = LONGEST
        self._ratios[self._end] = ratios
        np.maximum(ratios, 1 / ratios, out=self._folds[self._end])
        self._end, self._known, self.steps = self._end + 1, self._known + 1, self.steps + 1
        if self._known % (_FIRST if self._known <= 4 * _FIRST else 4 * _FIRST) == 0:
            self._estimate_noise()

    def explain_steps(self, steps: int, change: Floats) -> None:
        """Divide the last ratios by the effect of a known change. Call this before :meth:`clear`.

        Otherwise the change would increase the estimate of the noise.

        Args:
            steps: number of steps that the change affected.
            change: factor by which the change multiplied each column's ratio in these steps.
        """
        end = self._end - self.steps
        rows = slice(max(0, end - steps), max(0, end))
        self._ratios[rows] /= change
        self._folds[rows] = np.maximum(self._ratios[rows], 1 / self._ratios[rows])
        self._estimate_noise()

    def is_due(self, window: int) -> bool:
        """Return True if a window of ``window`` steps is to be checked now.

        A window of k steps is checked every k / 4 steps.
        """
        pause = max(1, window // 4)
        return self.steps >= window and self.steps % pause == 0 and self._known >= _FIRST

    def get_last(self, steps: int) -> Floats:
        """Return the ratios of the last ``steps`` steps, with shape [steps, columns]."""
        return self._ratios[self._end - steps : self._end]

    def find_changes(self, window: int) -> Floats | None:
        """Return the median ratio of each column that has changed, and 1 for all other columns.

        Return None if no column has changed in the last ``window`` steps.
        """
        quorum = WINDOWS[window]
        is_beyond = self._folds[self._end - window : self._end] > self._thresholds[window]
        if not (is_beyond.sum(axis=0) >= quorum).any():
            return None
        ratios = self.get_last(window)
        slower = (is_beyond & (ratios > 1)).sum(axis=0) >= quorum
        faster = (is_beyond & (ratios < 1)).sum(axis=0) >= quorum
        has_changed = slower | faster
        return np.where(has_changed, median(ratios), 1.0) if has_changed.any() else None

    def _estimate_noise(self) -> None:
        """Compute the threshold of each window length and column from the noise.

        Each window length has a probability p with which noise may exceed the threshold. The
        threshold is the larger of two values. One is the quantile 1 - p of a normal distribution
        with the measured deviation. The other is the ratio that only a fraction p of the past steps
        exceeded.
        """
        ratios = self.get_last(min(self._known, LONGEST))
        if len(ratios) < LONGEST // 2:
            # In few steps a change may affect most steps, but only one difference between steps.
            ascending = np.sort(ratios[1:] / ratios[:-1], axis=0)
            deviation = _compute_deviation(ascending) / math.sqrt(2) * (1 + 8 / len(ascending))
        else:
            ratios = ratios[:-_BLOCK]  # the last steps may contain a change that is not found yet
            blocks = ratios[len(ratios) % _BLOCK :].reshape(-1, _BLOCK, self.columns)
            of_median = 1.2533 / math.sqrt(_BLOCK)  # a median's noise, if steps are independent
            lasting = (
                _compute_deviation(_compare_to_median(median(blocks.swapaxes(0, 1)))) / of_median
            )
            ascending = _compare_to_median(ratios)
            deviation = np.maximum(_compute_deviation(ascending), lasting)
        deviation = np.maximum(deviation, LEAST_NOISE)
        self.noise = round(float(median(deviation)), 6)
        for window, tail in self._tails.items():
            passes = int(tail * (len(ascending) + 2)) - 1  # Laplace's rule of succession
            if passes >= 0:
                farthest = np.maximum(ascending[-1 - passes], 1 / ascending[passes])
            elif tail * (len(ascending) + 2) > _TOO_FEW:
                # Too few steps to count: a change must be twice as far as the farthest step.
                farthest = np.maximum(ascending[-1], 1 / ascending[0]) ** 2
            else:
                self._thresholds[window] = np.full(self.columns, np.inf)
                continue
            threshold = np.maximum(np.exp(_quantile(tail) * deviation), farthest)
            threshold = np.maximum(threshold, self._groups.median(threshold))
            self._thresholds[window] = np.ceil(threshold * _ROUNDED) / _ROUNDED


@cache
def _quantile(tail: float) -> float:
    """Return the value that a standard normal variable exceeds with this probability."""
    return -NormalDist().inv_cdf(tail)


def _compare_to_median(ratios: Floats) -> Floats:
    """Divide the ratios by the median of their column, and sort each column in ascending order."""
    ascending = np.sort(ratios, axis=0)
    centred: Floats = ascending / _middle(ascending)
    return centred


def _compute_deviation(ascending: Floats) -> Floats:
    """Return the standard deviation of the logarithms in each column.

    The estimate is robust: rare long steps hardly change the result.
    """
    outside = int(0.15 * len(ascending))  # steps on each side; 1.0364 deviations if normal
    deviations: Floats = (
        np.log(np.maximum(ascending[-1 - outside], 1 / ascending[outside])) / 1.0364
    )
    return deviations


def median(rows: Floats) -> Floats:
    """Return the median over the first axis, as the geometric mean of the middle two rows.

    With two ranks, one is slower than the median by the factor by which the other is faster.
    """
    return _middle(np.sort(rows, axis=0))


def _middle(ascending: Floats) -> Floats:
    middle: Floats = np.sqrt(ascending[(len(ascending) - 1) // 2] * ascending[len(ascending) // 2])
    return middle

"""Evidence that a rank's speed differs from the one its share was made for. Pure.

A column holds the ratio of a rank's time to the expected time, step by step. A window of k steps
shows a change if at least m of them lie beyond a threshold on one side (:data:`WINDOWS`). The
threshold follows from the noise of the column, such that noise alone shows a change in one look out
of 100,000 looks at all columns (see ARITHMETIC.md).
"""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np

from motley.plan.split import Floats

# The steps of a window, and how many of them must agree.
WINDOWS = {4: 4, 8: 7, 16: 12, 32: 21, 64: 39, 128: 73}
LONGEST = max(WINDOWS)
FALSE_ALARM = 1e-5  # chance per look at all columns
LEAST_NOISE = 0.01  # relative standard deviation of a step: a clock is no better
_FIRST = 8  # steps after which noise is estimated for the first time
_BLOCK = 8  # steps whose medians show noise that lasts longer than a step
_OUTLIER = 5.0  # standard deviations
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
        """Return the median of its group for each column."""
        if self.are_single:
            return values
        ordered = values[np.lexsort((values, self._group))]
        low, high = self._begin + (self._size - 1) // 2, self._begin + self._size // 2
        middle: Floats = ((ordered[low] + ordered[high]) / 2)[self._group]
        return middle


class Evidence:
    """The last steps of all columns, and the noise in them.

    Args:
        groups: columns of equal devices, whose noise is at least the median of the group.
    """

    def __init__(self, groups: Groups, columns: int) -> None:
        self._groups, self._columns = groups, columns
        self._ratios = np.ones((2 * LONGEST, columns))
        self._folds = np.ones((2 * LONGEST, columns))  # max(ratio, 1 / ratio)
        self._thresholds: dict[int, Floats] = {}
        self._rests_on = 0  # steps that the noise was estimated from
        # Share of the steps that noise may push beyond the threshold.
        self._tails = {
            window: (FALSE_ALARM / max(1, columns) / math.comb(window, needed)) ** (1 / needed)
            for window, needed in WINDOWS.items()
        }
        self.clear()

    def clear(self) -> None:
        """Drop all steps. Their noise stays known."""
        self._end = self.steps = 0

    def add(self, ratios: Floats) -> None:
        """Append a step: the ratio of each column."""
        if self._end == len(self._ratios):
            self._ratios[:LONGEST] = self._ratios[LONGEST:]
            self._folds[:LONGEST] = self._folds[LONGEST:]
            self._end = LONGEST
        self._ratios[self._end] = ratios
        np.maximum(ratios, 1 / ratios, out=self._folds[self._end])
        self._end, self.steps = self._end + 1, self.steps + 1
        is_early = self.steps in (_FIRST, 2 * _FIRST) and self.steps > self._rests_on
        if is_early or self.steps % 32 == 0:
            self._estimate_noise()

    def is_due(self, window: int) -> bool:
        """Return True if a window of so many steps is looked at now: four times while it passes."""
        return self.steps >= window and self.steps % (window // 4) == 0 and self._rests_on > 0

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

        Differences of successive steps leave out a change of speed and a slow drift. Medians leave
        out rare long steps. These are counted apart.
        """
        steps = min(self.steps, LONGEST)
        ratios = self.last(steps)
        differences = _folds(ratios)
        deviation = _deviation(differences) * (1 + 8 / steps)  # few steps may hide noise
        if steps >= LONGEST // 2:
            blocks = ratios[steps % _BLOCK :].reshape(-1, _BLOCK, self._columns)
            of_median = 1.2533 / math.sqrt(_BLOCK)  # a median's noise, if steps are independent
            slow = _deviation(_folds(median(blocks.swapaxes(0, 1)))) / of_median
            deviation = np.maximum(deviation, slow)
        deviation = np.maximum(deviation, self._groups.median(deviation))
        deviation = np.maximum(deviation, LEAST_NOISE)
        # An outlier makes two differences.
        rare = (differences > np.exp(_OUTLIER * deviation)).mean(axis=0) / 2
        rare = np.maximum(rare, self._groups.median(rare))
        for window, tail in self._tails.items():
            left = tail - rare
            factor = np.interp(left, _TAILS, _QUANTILES, left=np.inf)
            self._thresholds[window] = np.ceil(np.exp(factor * deviation) * _ROUNDED) / _ROUNDED
        self._rests_on = max(self._rests_on, steps)


# The quantile of a normal distribution above which so much of it lies.
_TAILS = np.geomspace(1e-5, 0.5, 100)
_QUANTILES = np.array([-NormalDist().inv_cdf(tail) for tail in _TAILS.tolist()])


def _folds(ratios: Floats) -> Floats:
    """Return how many times each row differs from the one before, always 1 or more."""
    change = ratios[1:] / ratios[:-1]
    return np.maximum(change, 1 / change)


def _deviation(folds: Floats) -> Floats:
    """Return the standard deviation of one step's logarithm, from differences of two."""
    found: Floats = np.log(median(folds)) / (0.6745 * math.sqrt(2))
    return found


def median(rows: Floats) -> Floats:
    """Return the median over the first axis. NumPy's own takes eight times as long."""
    ordered = np.sort(rows, axis=0)
    middle: Floats = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return middle

"""Shares that follow the time which each rank takes for its rows, from the first steps on. Pure.

Nothing is measured before training. The first steps have equal shares, and show the seconds per row
of each rank. The next steps have shares in proportion, and show the seconds that do not depend on
the rows. From then on the same monitor as in ``motley train`` watches every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from motley.plan.plan import split
from motley.plan.replan import Device, ReplanMonitor
from motley.plan.speeds import SpeedTable

_WARM_UP = 2  # steps that are not counted: kernels are built, and caches filled
_MEASURED = 4  # steps whose median counts
_SAVED = 0.04  # least fraction of a step that other shares must save
_UNLIKE = 0.2  # least relative difference of two numbers of rows that shows the fixed seconds


@dataclass(frozen=True)
class RankTime:
    """The time of one rank in one step.

    Attributes:
        rows: rows of the rank.
        own_s: seconds of its own work, without waiting for others.
    """

    rows: int
    own_s: float


class ShareFollower:
    """Chooses the shares of a user's own loop. All ranks pass in the same numbers.

    Args:
        devices: device of each rank.
        micro_batch: most rows in a piece; None: all rows of a rank are one piece.
        tables: speeds that an earlier run of the script has measured; empty: none.
        group: number of consecutive rows that stay together in a piece.

    Attributes:
        tables: speed of each rank; empty before the first steps have shown it.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        micro_batch: int | None = None,
        tables: Sequence[SpeedTable] = (),
        group: int = 1,
    ) -> None:
        self._devices, self._micro_batch, self._group = list(devices), micro_batch, group
        self.tables = tuple(tables)
        self._seen = 0
        self._times: list[list[RankTime]] = []  # of each measured step, by rank
        self._points: list[list[RankTime]] = []  # by rank: the median of each measurement
        self._monitor = ReplanMonitor(self.tables, devices) if tables else None
        self._quiet_until = 0  # step until which old shares are in use

    def keep_ranks(self, ranks: Sequence[int]) -> "ShareFollower":
        """Return the follower of some ranks alone, with their speeds."""
        tables = [self.tables[rank] for rank in ranks] if self.tables else ()
        devices = [self._devices[rank] for rank in ranks]
        return ShareFollower(devices, self._micro_batch, tables, self._group)

    def split(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each rank in a global batch, by the speeds."""
        return split(rows, self.tables)

    def step(
        self, step: int, times: Sequence[RankTime], counts: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Add a step; return the rows of each rank in a full batch if they should change.

        Args:
            step: number of the step.
            times: time of each rank.
            counts: rows of each rank in a full batch, as they are now.
        """
        if step < self._quiet_until or not all(each.own_s > 0 for each in times):
            return None
        rows = [each.rows for each in times]
        if self._monitor is not None:
            proposal = self._monitor.step([each.own_s for each in times], rows, counts)
            return proposal.counts if proposal else None
        if rows != list(counts):
            return None  # a smaller batch
        self._seen += 1
        if self._seen <= _WARM_UP:
            return None
        self._times.append(list(times))
        return self._measure(counts) if len(self._times) == _MEASURED else None

    def change(self, step: int) -> None:
        """Note that the shares of the last proposal are in use from a step on."""
        self._quiet_until = step
        if self._monitor is not None:
            self._monitor.reset()

    def _measure(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return better shares by the measured steps, or None; then let the monitor watch."""
        points = [
            RankTime(each[0].rows, median(time.own_s for time in each))
            for each in zip(*self._times, strict=True)
        ]
        self._points.append(points)
        self._times, self._seen = [], 0
        most = self._micro_batch or sum(counts)
        self.tables = tuple(
            make_table(each, most, self._group) for each in zip(*self._points, strict=True)
        )
        better = self.split(sum(counts))
        now_s, then_s = (
            max(table.compute_seconds(n) for table, n in zip(self.tables, rows, strict=True) if n)
            for rows in (counts, better)
        )
        if len(self._points) > 1 or then_s > (1 - _SAVED) * now_s:
            self._monitor = ReplanMonitor(self.tables, self._devices)
        return better if then_s <= (1 - _SAVED) * now_s else None


def make_table(points: Sequence[RankTime], micro_batch: int, group: int = 1) -> SpeedTable:
    """Return the speeds of one rank.

    The time of a piece is a + b * rows. With one measurement, or two of similar rows, a is 0.

    Args:
        points: times of the rank with one or two numbers of rows.
        micro_batch: most rows in a piece.
        group: number of consecutive rows that stay together in a piece.
    """
    last = points[-1] if points[-1].rows else points[0]
    pieces = -(-max(1, last.rows) // micro_batch)
    fixed_s, row_s = 0.0, last.own_s / max(1, last.rows)
    first = points[0]
    if first.rows and abs(first.rows - last.rows) > _UNLIKE * last.rows and pieces == 1:
        slope = (first.own_s - last.own_s) / (first.rows - last.rows)
        if 0 < slope < row_s:
            fixed_s, row_s = last.own_s - slope * last.rows, slope
    most = max(group, micro_batch // group * group)
    sizes = (group, most) if most > group else (group,)
    seconds = tuple(fixed_s / pieces + row_s * size for size in sizes)
    return SpeedTable(sizes, seconds, step_s=0.0, preferred=sizes[-1], grain=group)

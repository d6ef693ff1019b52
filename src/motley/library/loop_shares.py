"""The shares of all ranks in each global batch of a user's own loop.

Nothing is measured before training. In the first steps all ranks have equal shares, and each rank
measures its seconds per row. In the next steps the shares are proportional to these speeds, and
each rank measures the seconds that do not depend on its number of rows. In all later steps, the
monitor of ``motley train`` proposes new shares if speeds change. Each host stores the speeds of its
ranks for the next run of the script.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from motley.checkpoint.run import versions
from motley.cluster.account import cache_folder
from motley.comm.collectives import all_gather_object
from motley.comm.modes.numbers import EXACT
from motley.errors import MotleyError
from motley.library.sample_order import Batches
from motley.measure.speed_cache import compute_digest, read_speed, write_speed
from motley.plan.plan import Plan, Rank, apportion, split
from motley.plan.replan import Device, ReplanMonitor
from motley.plan.speeds import SpeedTable

_WARM_UP = 2  # steps that are not counted: kernels are built, and caches filled
_MEASURED = 4  # steps whose median counts
_SAVED = 0.04  # least fraction of a step that other shares must save
_UNLIKE = 0.2  # least relative difference of two numbers of rows that shows the fixed seconds


@dataclass(frozen=True)
class Piece:
    """The rows that a rank computes at once: its rows of a global batch, or a part of these rows.

    Attributes:
        step: number of the global batch since the start of training.
        epoch: number of the pass over the data.
        batch: number of the global batch in its epoch.
        rows: number of rows in the piece; 0 if this rank has none in the global batch. The rank
            then reads a row of another rank, for a pass whose gradient does not count.
        global_rows: number of rows in the global batch, over all ranks.
        last: True for the last piece of this rank in the global batch.
        indices: indices of the rows in the data set.
    """

    step: int
    epoch: int
    batch: int
    rows: int
    global_rows: int
    last: bool
    indices: tuple[object, ...]

    def list_rows(self, group: int) -> list[object]:
        """Return the indices of the piece's rows, in their order in the global batch.

        ``indices`` has another order: the first row of each group, then the second row of each
        group, and so on. See motley.data.source.slices.

        Args:
            group: number of consecutive rows of the global batch that form one group.
        """
        groups = max(1, self.rows // group)
        return [self.indices[at] for j in range(groups) for at in range(j, self.rows, groups)]


class ShareSchedule:
    """The relative number of rows of each rank in each step. All ranks hold the same schedule.

    Args:
        shares: relative number of rows of each rank.
        micro_batch: largest number of rows that a rank computes at once, as one piece. None: a rank
            computes all its rows of a global batch at once.
        group: number of consecutive rows that stay together in a piece.
        equal_pieces: True if all ranks have the same number of pieces. Some pieces are then empty.

    Attributes:
        group: number of consecutive rows that stay together in a piece.
    """

    def __init__(
        self,
        shares: Sequence[float],
        micro_batch: int | None = None,
        group: int = 1,
        equal_pieces: bool = False,
    ) -> None:
        self._changes: list[tuple[int, tuple[float, ...]]] = [(0, tuple(shares))]
        self._micro_batch, self.group, self._equal_pieces = micro_batch, group, equal_pieces

    @property
    def most_rows(self) -> int | None:
        """Largest number of rows that this rank may compute at once; None: no limit."""
        return self._micro_batch

    def limit(self, rows: int) -> None:
        """Make this rank compute at most ``rows`` rows at once from now on.

        Other ranks may have other limits, since a limit does not change which rows a rank computes.
        """
        self._micro_batch = min(rows, self._micro_batch or rows)

    @property
    def shares(self) -> tuple[float, ...]:
        """Relative number of rows of each rank, as :meth:`change` has set it last."""
        return self._changes[-1][1]

    def change(self, step: int, shares: Sequence[float]) -> None:
        """Set the shares that apply from a step on."""
        self._changes = [each for each in self._changes if each[0] < step]
        self._changes.append((step, tuple(shares)))

    def keep_ranks(self, ranks: Sequence[int]) -> None:
        """Divide all following batches among the surviving ranks, in the same proportions.

        Args:
            ranks: numbers of the surviving ranks.
        """
        kept = [(step, tuple(shares[rank] for rank in ranks)) for step, shares in self._changes]
        self._changes = [
            (step, shares if any(shares) else (1.0,) * len(ranks)) for step, shares in kept
        ]

    def get_plan(self, step: int, rows: int) -> Plan:
        """Return the split of a global batch of ``rows`` rows at a step."""
        shares = next(shares for first, shares in reversed(self._changes) if first <= step)
        most = self._micro_batch or max(1, rows)
        return Plan(
            rows, shares, (most,) * len(shares), EXACT, equal_micro_steps=self._equal_pieces,
            grain=self.group,
        )  # fmt: skip

    def get_held_out_plan(self, step: int, rows: int) -> Plan:
        """Return the split of a batch of held-out data, whose rows form no groups.

        With ``equal_pieces``, each rank computes its rows at once, and has at least one row.
        """
        plan = replace(self.get_plan(step, rows), grain=1)
        if not self._equal_pieces:
            return plan
        ranks = len(plan.shares)
        counts = (1 + count for count in apportion(rows - ranks, plan.shares))
        return replace(plan, shares=tuple(counts), max_micro_batch=(rows,) * ranks)

    def cut_held_out(self, batches: Batches, step: int) -> Batches:
        """Return the batches of held-out data, cut so that each rank can compute its rows at once.

        Without ``equal_pieces``, the batches stay as they are.

        Args:
            batches: indices of each batch of the user's loader.
            step: the current step, whose shares are used.

        Raises:
            MotleyError: there are fewer rows than ranks.
        """
        if not self._equal_pieces or not batches:
            return batches
        order = [index for batch in batches for index in batch]
        ranks, size = len(self.shares), max(map(len, batches))
        if len(order) < ranks:
            raise MotleyError(
                f"the held-out data has {len(order)} rows for {ranks} ranks, and with "
                'strategy="fsdp" every rank needs at least one: give it more rows, or start fewer '
                "ranks"
            )
        if most := self._micro_batch:
            while size > ranks and max(self.get_held_out_plan(step, size).counts) > most:
                size = max(ranks, size * 3 // 4)
        count = min(-(-len(order) // size), len(order) // ranks)
        ends = [len(order) * number // count for number in range(count + 1)]
        return [order[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True)
class RankTime:
    """The time of one rank in one step.

    Attributes:
        rows: rows of the rank.
        own_s: seconds that the rank worked. Waiting for other ranks does not count.
    """

    rows: int
    own_s: float


class ShareFollower:
    """The choice of shares in a user's own loop, by the measured speed of each rank.

    All ranks pass in the same times, and thus choose the same shares.

    Args:
        devices: device of each rank.
        micro_batch: largest number of rows that a rank computes at once, as one piece. None: a rank
            computes all its rows of a global batch at once.
        tables: speed of each rank, measured in an earlier run of the script; empty without an
            earlier run.
        group: number of consecutive rows that one rank computes at once, because a batch norm takes
            its statistics over them.

    Attributes:
        tables: speed of each rank; empty until the first steps are measured.
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
        self._times: list[list[RankTime]] = []  # times of each measured step, by rank
        self._points: list[list[RankTime]] = []  # medians of each measurement, by rank
        self._monitor = ReplanMonitor(self.tables, devices) if tables else None
        self._quiet_until = 0  # step until which old shares are in use

    def keep_ranks(self, ranks: Sequence[int]) -> "ShareFollower":
        """Return a ShareFollower for the given ranks alone, with the speeds of these ranks."""
        tables = [self.tables[rank] for rank in ranks] if self.tables else ()
        devices = [self._devices[rank] for rank in ranks]
        return ShareFollower(devices, self._micro_batch, tables, self._group)

    def split(self, rows: int) -> tuple[int, ...]:
        """Return each rank's number of rows in a global batch, chosen by the speeds."""
        return split(rows, self.tables)

    def step(
        self, step: int, times: Sequence[RankTime], counts: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Add the times of a step, and return new row counts for a full batch, or None.

        None: the present row counts should stay.

        Args:
            step: number of the step.
            times: time of each rank.
            counts: present number of rows of each rank in a full batch.
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
        """Ignore the times of steps before ``step``, which is the first step with new shares."""
        self._quiet_until = step
        if self._monitor is not None:
            self._monitor.reset()

    def _measure(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return each rank's number of rows for a faster step; None if the gain is too small.

        The numbers follow from the measured steps.

        After the last measurement, this method also starts the monitor, which watches all later
        steps.
        """
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

    The time of ``rows`` rows that are computed at once is modelled as a + b * rows. With one
    measurement, or with two measurements of similar numbers of rows, a is 0.

    Args:
        points: one or two measurements of the rank, with different numbers of rows.
        micro_batch: largest number of rows in a piece.
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


class SpeedMemory:
    """The file that stores this rank's speed for the next run of the script.

    Args:
        worker: description of this rank.
        micro_batch: largest number of rows that a rank computes at once, as one piece. None: a rank
            computes all its rows of a global batch at once.
        group: number of consecutive rows that one rank computes at once, because a batch norm takes
            its statistics over them.
        numbers: number of elements in the parameters and buffers of all models.
    """

    def __init__(self, worker: Rank, micro_batch: int | None, group: int, numbers: int) -> None:
        script = Path(sys.argv[0])
        text = script.read_bytes() if script.is_file() else b""
        self._key = {
            "script": hashlib.sha256(text).hexdigest(), "arguments": sys.argv[1:],
            "device": worker.device, "uuid": worker.uuid, "precision": worker.precision,
            "host": worker.host, "rank": worker.local_rank, "micro_batch": micro_batch,
            "group": group, "numbers": numbers,
            "threads": torch.get_num_threads(), "versions": versions(),
        }  # fmt: skip
        self._path = cache_folder() / f"loop-{compute_digest(self._key)[:20]}.json"

    def recall_all(self, rows: int) -> tuple[SpeedTable, ...]:
        """Return the stored speeds of all ranks. All ranks call it.

        The result is empty if a rank has no stored speed for pieces of up to ``rows`` rows.

        Args:
            rows: largest number of rows in a piece.
        """
        own = read_speed(self._path, self._key)
        known = all_gather_object(own if own and own.sizes[-1] == rows else None)
        return tuple(known) if all(known) else ()

    def keep(self, speed: SpeedTable) -> None:
        """Write this rank's speed to the file."""
        write_speed(self._path, self._key, speed)

"""The shares of all ranks in each global batch of a user's own loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from motley.comm.modes.numbers import EXACT
from motley.errors import MotleyError
from motley.library.sample_order import Batches
from motley.plan.plan import Plan, apportion


@dataclass(frozen=True)
class Piece:
    """This rank's rows of a global batch, or a part of them.

    Attributes:
        step: number of the global batch since the start of training.
        epoch: number of the pass over the data.
        batch: number of the global batch in its epoch.
        rows: number of rows; 0 if this rank has none in the global batch. The rank then reads
            a row of another one, for a pass whose gradient does not count.
        global_rows: number of rows of the global batch.
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
        """Return the indices in the order of the global batch.

        The rows of a piece are those of its groups in turn; see motley.data.source.slices.

        Args:
            group: number of consecutive rows that stay together.
        """
        groups = max(1, self.rows // group)
        return [self.indices[at] for j in range(groups) for at in range(j, self.rows, groups)]


class ShareSchedule:
    """The shares of all ranks, which may change at a step that all ranks know.

    Args:
        shares: one number per rank, in proportion to its rows.
        micro_batch: most rows in a piece; None: all rows of a rank are one piece.
        group: number of consecutive rows that stay together in a piece.
        equal_pieces: True if all ranks have the same number of pieces, of which some are empty.

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
        """Most rows in a piece of this rank; None: no limit."""
        return self._micro_batch

    def limit(self, rows: int) -> None:
        """Read pieces of at most so many rows from now on. Each rank may have a limit of its own.

        Pieces decide how a rank computes its rows, and not which rows these are.
        """
        self._micro_batch = min(rows, self._micro_batch or rows)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares that were set last."""
        return self._changes[-1][1]

    def change(self, step: int, shares: Sequence[float]) -> None:
        """Set the shares from a step on."""
        self._changes = [each for each in self._changes if each[0] < step]
        self._changes.append((step, tuple(shares)))

    def keep_ranks(self, ranks: Sequence[int]) -> None:
        """Divide all coming batches among some ranks alone, in the same proportions.

        Args:
            ranks: numbers of the surviving ranks.
        """
        kept = [(step, tuple(shares[rank] for rank in ranks)) for step, shares in self._changes]
        self._changes = [
            (step, shares if any(shares) else (1.0,) * len(ranks)) for step, shares in kept
        ]

    def get_plan(self, step: int, rows: int) -> Plan:
        """Return the plan of a global batch with this number of rows."""
        shares = next(shares for first, shares in reversed(self._changes) if first <= step)
        most = self._micro_batch or max(1, rows)
        return Plan(
            rows, shares, (most,) * len(shares), EXACT, equal_micro_steps=self._equal_pieces,
            grain=self.group,
        )  # fmt: skip

    def get_held_out_plan(self, step: int, rows: int) -> Plan:
        """Return the plan of a batch of held-out data, whose rows are in no groups.

        If all ranks have the same number of pieces, each has one piece, with a row at least.
        """
        plan = replace(self.get_plan(step, rows), grain=1)
        if not self._equal_pieces:
            return plan
        ranks = len(plan.shares)
        counts = (1 + count for count in apportion(rows - ranks, plan.shares))
        return replace(plan, shares=tuple(counts), max_micro_batch=(rows,) * ranks)

    def cut_held_out(self, batches: Batches, step: int) -> Batches:
        """Return the batches of held-out data, in sizes of which all ranks can have one piece.

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
                'strategy="fsdp" every rank computes one at least: give it more rows, or start '
                "fewer ranks"
            )
        if most := self._micro_batch:
            while size > ranks and max(self.get_held_out_plan(step, size).counts) > most:
                size = max(ranks, size * 3 // 4)
        count = min(-(-len(order) // size), len(order) // ranks)
        ends = [len(order) * number // count for number in range(count + 1)]
        return [order[start:end] for start, end in pairwise(ends)]

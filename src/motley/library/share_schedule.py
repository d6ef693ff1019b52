"""The shares of all ranks in each global batch of a user's own loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.comm.modes.numbers import EXACT
from motley.plan.plan import Plan


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

    Attributes:
        group: number of consecutive rows that stay together in a piece.
    """

    def __init__(
        self, shares: Sequence[float], micro_batch: int | None = None, group: int = 1
    ) -> None:
        self._changes: list[tuple[int, tuple[float, ...]]] = [(0, tuple(shares))]
        self._micro_batch, self.group = micro_batch, group

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
        return Plan(rows, shares, (most,) * len(shares), EXACT, grain=self.group)

    def get_held_out_plan(self, step: int, rows: int) -> Plan:
        """Return the plan of a batch of held-out data, whose rows are in no groups."""
        return replace(self.get_plan(step, rows), grain=1)

"""Whose stop a signal is: the user's, whose launcher sends it to all ranks at once, or one rank's.
Pure, but for the environment."""

import os
import signal
from collections.abc import Sequence

from motley.faults import Fault, FaultKind
from motley.launch.job_faults import stopped
from motley.launch.watchdog import RankStatus, whereabouts


class StopSignals:
    """The ranks that one came to."""

    def __init__(self) -> None:
        self._ranks = set[int]()

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def came(
        self,
        status: RankStatus,
        number: int,
        statuses: Sequence[RankStatus],
        step: int | None,
        how_to_continue: str,
    ) -> Fault:
        """One came to a rank; the fault that it is, as far as is known by now.

        Args:
            number: of the signal. statuses: of all ranks. step: that training is at.
        """
        self._ranks.add(status.rank)
        name = signal.Signals(number).name
        _, where = whereabouts(statuses)
        if 0 in self._ranks or len(self._ranks) > 1:
            slurm = " or by Slurm" if "SLURM_JOB_ID" in os.environ else ""
            by = f"you{slurm} ({name} from the launcher, while {where})"
            return stopped(step, number, by, how_to_continue)
        return Fault(
            status.number, status.host, step,
            f"stopped by {name}, which came to this rank alone, when {where}",
            "continue with --resume auto", echo=True, kind=FaultKind.KILLED, signal=number,
        )  # fmt: skip

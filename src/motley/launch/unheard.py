"""Which ranks are not heard now, for those who watch the run: told long before it is a fault."""

from collections.abc import Sequence
from typing import Any

from motley.launch.watchdog import AwakeClock, RankStatus

TOLD_AFTER_S = 2.5  # without a heartbeat: gaps of 1.5 s are usual on a busy machine


class Unheard:
    """Remembers who was silent.

    Args:
        awake: rank 0's waking time.
    """

    def __init__(self, awake: AwakeClock) -> None:
        self._awake = awake
        self._silent = set[int]()

    def changes(self, statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
        """Events to record: who is silent now, and who is heard again, and was neither before.

        Args:
            statuses: all ranks but 0; one that is lost is none of them.
        """
        late = self._awake.seconds - TOLD_AFTER_S
        if not self._silent and min((each.heard for each in statuses), default=late) >= late:
            return []
        silent = {each.rank: each for each in statuses if each.heard < late}
        again = [each for each in statuses if each.rank in self._silent - silent.keys()]
        new = [each for rank, each in silent.items() if rank not in self._silent]
        self._silent = {*silent}
        return [
            *({"kind": "silent", "rank": each.rank, "host": each.host, "step": each.heartbeat.step,
               "seconds": round(self._awake.seconds - each.heard, 1)} for each in new),
            *({"kind": "heard_again", "rank": each.rank, "host": each.host} for each in again),
        ]  # fmt: skip

"""Which ranks are not heard now, for those who watch the run: told long before it is a fault."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from motley.launch.dead_links import dead_peers
from motley.launch.watchdog import AwakeClock, RankStatus

TOLD_AFTER_S = 2.5  # without a heartbeat: gaps of 1.5 s are usual on a busy machine
# The same where its machine acknowledges nothing that was sent twice again: a busy one does.
CUT_OFF_AFTER_S, _TRIES = 1.0, 2


def cut_off() -> Collection[str]:
    """Addresses of machines that acknowledge nothing."""
    return dead_peers(CUT_OFF_AFTER_S, _TRIES)


class Unheard:
    """Remembers who was silent.

    Args:
        awake: rank 0's waking time. cut_off: see :func:`cut_off`.
    """

    def __init__(self, awake: AwakeClock, cut_off: Callable[[], Collection[str]] = cut_off) -> None:
        self._awake, self._cut_off = awake, cut_off
        self._silent = set[int]()

    def changes(self, statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
        """Events to record: who is silent now, and who is heard again, and was neither before.

        Args:
            statuses: all ranks but 0; one that is lost is none of them.
        """
        now = self._awake.seconds
        late, soon = now - TOLD_AFTER_S, now - CUT_OFF_AFTER_S
        first = min((each.heard for each in statuses), default=now)
        if not self._silent and first >= soon:
            return []
        cut_off = self._cut_off() if first < soon else ()
        silent = {
            each.number: each for each in statuses
            if each.heard < late or (each.heard < soon and each.address in cut_off)
        }  # fmt: skip
        again = [each for each in statuses if each.number in self._silent - silent.keys()]
        new = [each for number, each in silent.items() if number not in self._silent]
        self._silent = {*silent}
        return [
            *({"kind": "silent", "rank": each.number, "host": each.host,
               "step": each.heartbeat.step, "seconds": round(now - each.heard, 1)}
              for each in new),
            *({"kind": "heard_again", "rank": each.number, "host": each.host} for each in again),
        ]  # fmt: skip

"""Which machine keeps all others from the next step, for those who watch the run: told while they
wait, for no record of a step comes before it has been taken."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from motley.faults import Phase
from motley.launch.watchdog import AwakeClock, RankStatus

_TOLD_AFTER_S, _TOLD_AFTER_STEPS = 1.0, 3.0  # without a step, whichever is longer
_LOOKS_BACK = 8  # at times when a step had been taken, whose median is usual
_LATELY_S = 1.5  # heartbeats come once a second or more often
_OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)  # that keep the others waiting


class WaitedFor:
    """Remembers when steps were taken.

    Args:
        awake: rank 0's waking time.
    """

    def __init__(self, awake: AwakeClock) -> None:
        self._awake = awake
        self._step: int | None = None
        self._since, self._told = 0.0, False
        self._took = deque[float](maxlen=_LOOKS_BACK)

    def changes(self, statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
        """Events to record: who is waited for in this step, once, if it is clear.

        Args:
            statuses: all ranks.
        """
        now = self._awake.seconds
        training = [each for each in statuses if each.heartbeat.step is not None and not each.done]
        step = max((each.heartbeat.step or 0 for each in training), default=None)
        if step != self._step:
            if step is not None and self._step is not None and step > self._step:
                self._took.append((now - self._since) / (step - self._step))
            self._step, self._since, self._told = step, now, False
        quiet = now - self._since
        if self._told or not self._took:
            return []
        if quiet <= max(_TOLD_AFTER_S, _TOLD_AFTER_STEPS * median(self._took)):
            return []
        behind = [each for each in training if not each.heartbeat.waits]
        clear = len(behind) < len(training) and len({each.host for each in behind}) == 1
        if not clear or not all(self._is_at_work(each) for each in behind):
            return []
        self._told = True
        first = min(behind, key=lambda each: each.number)
        return [
            {"kind": "waited_for", "rank": first.number, "host": first.host, "step": step,
             "seconds": round(quiet, 1), "doing": first.heartbeat.doing}
        ]  # fmt: skip

    def _is_at_work(self, status: RankStatus) -> bool:
        """As far as it has said lately: whose host froze is silent."""
        heard = status.rank == 0 or self._awake.seconds - status.heard < _LATELY_S
        return heard and status.heartbeat.phase in _OWN

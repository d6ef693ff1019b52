"""How fast a run was, from its step records: the mean, which a median of steps hides. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from motley.records.lines import JsonDict


def mean_rate(
    steps: Sequence[JsonDict], of: str = "n_global", starts: Sequence[float] = ()
) -> float | None:
    """What was done a second, from the end of the first of some steps to the end of the last.

    All that lies between them counts: evaluations, checkpoints, stalls, the small last batch of an
    epoch. So it is what a user waits for, where the median is what the hardware does.

    Args:
        steps: of one rank, in order. of: the field that is added up.
        starts: when a job began, seconds since the epoch; the pause that one of them ended, in
            which nothing ran, is left out.

    Returns:
        None of fewer than two steps.
    """
    amount = seconds = 0.0
    for before, step in pairwise(steps):
        if not any(before["time"] < at < step["time"] for at in starts):
            amount += step[of]
            seconds += step["time"] - before["time"]
    return amount / seconds if seconds > 0 else None


def pauses(steps: Sequence[JsonDict], starts: Sequence[float]) -> list[tuple[float, float]]:
    """When a job went on from a checkpoint, seconds since the epoch, and for how many seconds
    nothing had run before; ascending.

    Args:
        steps: of one rank, in order. starts: when a job went on.
    """
    found = []
    for before, step in pairwise(steps):
        if began := [at for at in starts if before["time"] < at < step["time"]]:
            own = step["n_global"] / step["samples_per_s"] if step["samples_per_s"] else 0.0
            found.append((max(began), max(0.0, step["time"] - before["time"] - own)))
    return found


def without_pauses(moment: float, paused: Sequence[tuple[float, float]]) -> float:
    """A moment on a clock that stood still in pauses; see :func:`pauses`."""
    return moment - sum(seconds for at, seconds in paused if at <= moment)


def lead(steps: Mapping[int, Sequence[JsonDict]]) -> Sequence[JsonDict]:
    """Step records of the rank that has the most; none if there are none."""
    return max(steps.values(), key=len, default=())

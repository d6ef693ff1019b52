"""What a step waits for: a rank, the wire, input; from the last steps of all ranks. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from motley.live.track import Step, Track, mean_parts

_MOST, _LEAST, _FRESH_S = 20, 3, 3.0  # steps that are looked at: those of so many seconds
_WORTH = 0.05  # of a step, that is worth a word
_NO_WAIT = 0.02  # of a step: whoever waits less is who was ready last
_FOR_INPUT = 0.5  # of the time until a rank is ready


class Held(StrEnum):
    """What holds the steps up."""

    RANK = "rank"
    WIRE = "wire"
    INPUT = "input"
    OPTIMIZER = "optimizer"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Waits:
    """What the last steps waited for most.

    Attributes:
        share: part of each step. rank: that is waited for; None with Held.RANK: one that writes no
            records here.
        own_s, others_s: until that rank was ready, and the others on average; None: unknown.
        for_input: most of ``own_s`` was for its samples.
        steps: that were looked at.
        by_rank: part of each step in which a rank was waited for.
    """

    held: Held
    share: float
    steps: int
    by_rank: Mapping[int | None, float]
    rank: int | None = None
    own_s: float | None = None
    others_s: float | None = None
    for_input: bool = False


def last_steps(track: Track) -> list[Step]:
    """Those that say what happens now: of the last seconds, some at least and not too many."""
    recent = list(track.recent)[-_MOST:]
    fresh = [step for step in recent if 0 <= recent[-1].time - step.time <= _FRESH_S]
    return fresh if len(fresh) >= _LEAST else recent[-_LEAST:]


def find_waits(tracks: Mapping[int, Track], lead: Track, ranks: Collection[int]) -> Waits:
    """What the last steps waited for.

    Args:
        tracks: of the ranks that write their steps here. lead: whose steps reach furthest.
        ranks: all that train.
    """
    numbers = [step.step for step in last_steps(lead)]
    lines = {
        rank: found for rank, track in tracks.items()
        if (found := {step.step: step for step in list(track.recent)[-2 * _MOST:]
                      if step.step in numbers})
    }  # fmt: skip
    lost: dict[int | None, float] = defaultdict(float)
    whole = 0.0
    for number in numbers:
        of_step = {rank: steps[number] for rank, steps in lines.items() if number in steps}
        whole += max(step.seconds for step in of_step.values())
        who, seconds = waited_for(of_step, ranks)
        lost[who] += seconds
    if not whole:
        return Waits(Held.UNKNOWN, 0.0, len(numbers), {})
    by_rank = {rank: seconds / whole for rank, seconds in lost.items() if seconds}
    parts = mean_parts([step for steps in lines.values() for step in steps.values()])
    usual = whole / len(numbers)
    shares = {
        Held.WIRE: (parts[3] or 0.0) / usual, Held.INPUT: (parts[0] or 0.0) / usual,
        Held.OPTIMIZER: (parts[4] or 0.0) / usual,
    }  # fmt: skip
    rank = max(by_rank, key=lambda each: by_rank[each], default=None)
    held = max(shares, key=lambda each: shares[each])
    if by_rank and by_rank[rank] >= max(_WORTH, shares[held]):
        return _for_rank(rank, by_rank, lines, len(numbers))
    if shares[held] >= _WORTH:
        return Waits(held, shares[held], len(numbers), by_rank)
    told = parts[2] is not None or len(ranks) < 2
    return Waits(
        Held.NOTHING if told else Held.UNKNOWN, (parts[1] or 0.0) / usual, len(numbers), by_rank
    )


def waited_for(lines: Mapping[int, Step], ranks: Collection[int]) -> tuple[int | None, float]:
    """Who was ready last in one step, and how long the others waited for that on average, seconds.

    Args:
        lines: of the ranks that tell of the step.

    Returns:
        None and a time where it was a rank that does not tell; 0.0 seconds where nobody knows.
    """
    told = {rank: step.parts[2] for rank, step in lines.items() if step.parts[2] is not None}
    if not told:
        return None, 0.0
    first = min(told, key=lambda rank: told[rank] or 0.0)
    own = lines[first]
    who: int | None = first
    if own.others and own.ready_s is not None:
        middle, other, last = own.others
        return other if last > own.ready_s else first, max(0.0, last, own.ready_s) - middle
    if (told[first] or 0.0) > _NO_WAIT * own.seconds:
        absent = [rank for rank in ranks if rank not in lines]
        who = absent[0] if len(absent) == 1 else None
    waits = [seconds or 0.0 for rank, seconds in told.items() if rank != who]
    return who, sum(waits) / len(waits) if waits else 0.0


def _for_rank(
    rank: int | None, by_rank: Mapping[int | None, float], lines: Mapping[int, Mapping[int, Step]],
    steps: int,
) -> Waits:  # fmt: skip
    own = list(lines[rank].values()) if rank is not None and rank in lines else []
    own_s = _mean([step.ready_s for step in own])
    input_s = _mean([step.parts[0] for step in own])
    if own_s is None:  # of many ranks, the first tells
        told = [step.others for found in lines.values() for step in found.values() if step.others]
        own_s = _mean([last for _, who, last in told if who == rank])
        others_s = _mean([middle for middle, _, _ in told])
    else:
        others_s = _mean(
            [step.ready_s for other, found in lines.items() if other != rank
             for step in found.values()]
        )  # fmt: skip
    for_input = bool(own_s and input_s and input_s > _FOR_INPUT * own_s)
    return Waits(Held.RANK, by_rank[rank], steps, by_rank, rank, own_s, others_s, for_input)


def _mean(values: Collection[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

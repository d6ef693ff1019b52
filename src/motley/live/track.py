"""The recorded steps of each rank, and the causes of waiting in a step.

The module reads no file, clock or hardware.

The module keeps the last steps in full, and all steps as means over groups of steps. The cause of
waiting is another rank, communication, or input.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from statistics import median
from typing import Any

from motley.records.json_files import JsonDict

PARTS = ("t_data", "t_compute", "t_wait", "t_comm", "t_opt", "t_host")
RECENT = 64  # last steps that are kept in full
_POINTS = 240  # most points of a history


@dataclass(frozen=True)
class Step:
    """The displayed fields of one line of steps.rank<k>.jsonl.

    Attributes:
        parts: seconds of each part of the step that PARTS names; None where unknown.
        others: times of the other ranks, in a group of many ranks in which only the first rank
            writes records. The first value is the seconds until half of the other ranks were ready.
            The second value is the number of the last rank to be ready. The third value is the
            seconds until the last rank was ready. None: not recorded.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    loss_scale: float | None
    n_local: int | None
    n_global: int
    weight: float | None
    memory_mib: float | None
    time: float
    parts: tuple[float | None, ...]
    others: tuple[float, int, float] | None = None

    @cached_property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(part or 0.0 for part in self.parts)

    @property
    def ready_s(self) -> float | None:
        """Seconds until this rank's own gradient was ready; None: unknown."""
        data, compute, *_, host = self.parts
        return None if data is None or compute is None else data + compute + (host or 0.0)


def read_step(line: JsonDict) -> Step | None:
    """Return the step in a line; None if the line is damaged or of an unknown version."""
    step, time = _number(line.get("step")), _number(line.get("time"))
    if step is None or time is None or not 0 <= step < 2**53:
        return None
    return Step(
        int(step), int(_number(line.get("epoch")) or 0), _number(line.get("loss")),
        _number(line.get("lr")), _number(line.get("loss_scale")),
        None if (n_local := _number(line.get("n_local"))) is None else int(n_local),
        int(_number(line.get("n_global")) or 0), _number(line.get("weight")),
        _number(line.get("mem_peak_mib")), time,
        tuple(_number(line.get(part)) for part in PARTS),
        _read_others(line.get("others_ready")),
    )  # fmt: skip


def _read_others(told: Any) -> tuple[float, int, float] | None:
    try:
        last = told["largest"]
        return float(told["middle"]["ready_s"]), int(last["rank"]), float(last["ready_s"])
    except (KeyError, TypeError, ValueError):
        return None


def _number(value: object) -> float | None:
    """Return the value if it is a finite number, else None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    return value if type(value) is int else None  # a bool is not a number


@dataclass(frozen=True)
class Point:
    """The mean over a group of steps. ``parts`` is as in :class:`Step`."""

    step: int
    loss: float | None
    parts: tuple[float | None, ...]


class History:
    """Means over groups of consecutive steps.

    The groups become larger as steps are added, so that a history has at most 240 means.
    """

    def __init__(self) -> None:
        self._width = 1
        self._steps: dict[int, _Sum] = {}

    def add(self, step: Step) -> None:
        """Add the newest step."""
        self._steps.setdefault(step.step // self._width, _Sum()).add(step.loss, *step.parts)
        while len(self._steps) > _POINTS:
            self._width *= 2
            wider: dict[int, _Sum] = {}
            for place, total in self._steps.items():
                wider.setdefault(place // 2, _Sum()).merge(total)
            self._steps = wider

    def drop_from(self, step: int) -> None:
        """Drop a step, all later steps, and each earlier mean that includes the step."""
        self._steps = {
            place: total for place, total in self._steps.items()
            if place < step // self._width
        }  # fmt: skip

    def points(self) -> list[Point]:
        """Return the means, in order of their steps."""
        result = []
        for place, total in self._steps.items():
            loss, *parts = total.means()
            result.append(Point(place * self._width, loss, tuple(parts)))
        return result


class _Sum:
    """Sums of the loss and the parts of steps, each with its number of known values."""

    def __init__(self) -> None:
        self._sums, self._counts = [0.0] * (1 + len(PARTS)), [0] * (1 + len(PARTS))

    def add(self, *values: float | None) -> None:
        for index, value in enumerate(values):
            if value is not None:
                self._sums[index] += value
                self._counts[index] += 1

    def merge(self, other: "_Sum") -> None:
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]

    def means(self) -> list[float | None]:
        pairs = zip(self._sums, self._counts, strict=True)
        return [total / count if count else None for total, count in pairs]


class Track:
    """The steps of one rank, as they are recorded.

    Attributes:
        recent: the last steps, in order.
        history: means over all steps.
    """

    def __init__(self) -> None:
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.history = History()

    def add(self, step: Step) -> None:
        """Add a step. Drop earlier records of this step and of later steps.

        A run that continues from a checkpoint repeats steps.
        """
        if self.recent and step.step <= self.recent[-1].step:
            while self.recent and self.recent[-1].step >= step.step:
                self.recent.pop()
            self.history.drop_from(step.step)
        self.recent.append(step)
        self.history.add(step)

    @property
    def last(self) -> Step | None:
        """The last recorded step; None without a step."""
        return self.recent[-1] if self.recent else None


def mean_parts(steps: Sequence[Step]) -> tuple[float | None, ...]:
    """Return the mean seconds of each part of a step, over the steps that have the part."""
    total = _Sum()
    for step in steps:
        total.add(None, *step.parts)
    return tuple(total.means()[1:])


_MOST, _LEAST, _FRESH_S = 20, 3, 3.0  # most and least steps, and seconds, of a window
_WORTH = 0.05  # fraction of a step from which a cause is reported
_NO_WAIT = 0.02  # fraction of a step: a rank that waits less was ready last
_FOR_INPUT = 0.5  # fraction of the time until a rank is ready, above which input is the cause
# A rank has become slower if the last rank is ready after three times the usual time, in two steps
# or for half a second, while the others are ready after less than half of that. The monitor names
# this rank immediately, and in preference to the wire: a rank that computes slowly also sends
# slowly, which looks like a slow wire.
_SLOWER, _SLOWER_STEPS, _SLOWER_S, _OTHERS = 3.0, 2, 0.5, 0.5
_USUAL = 8  # least number of steps whose median is the usual time
_SLOWER_WORTH = 0.1  # fraction of a step from which a slower rank is reported


class Held(StrEnum):
    """The cause for which ranks wait in a step."""

    RANK = "rank"
    WIRE = "wire"
    INPUT = "input"
    OPTIMIZER = "optimizer"
    HOST = "host"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Waits:
    """The main cause of waiting in the last steps.

    Attributes:
        held: the cause.
        share: fraction of each step that was spent waiting for this cause.
        steps: number of steps that were examined.
        by_rank: for each rank, the fraction of each step in which all other ranks waited for that
            rank.
        rank: rank for which all other ranks wait. None: ``held`` is not Held.RANK, or the rank
            writes no records on this host.
        own_s: seconds until ``rank`` was ready; None: unknown.
        others_s: mean seconds until all other ranks were ready; None: unknown.
        usual_s: usual seconds until the last rank was ready, before ``rank`` became slower; None:
            ``rank`` did not become slower.
        for_input: True if ``rank`` waited for its samples during most of ``own_s``.
    """

    held: Held
    share: float
    steps: int
    by_rank: Mapping[int | None, float]
    rank: int | None = None
    own_s: float | None = None
    others_s: float | None = None
    usual_s: float | None = None
    for_input: bool = False


@dataclass(frozen=True)
class _Window:
    """The records of some steps.

    Attributes:
        steps: number of steps.
        lines: records of these steps, by rank and number of the step.
        seconds: duration of all steps together.
        by_rank: for each rank, the fraction of ``seconds`` in which all other ranks waited for that
            rank.
    """

    steps: int
    lines: Mapping[int, Mapping[int, Step]]
    seconds: float
    by_rank: Mapping[int | None, float]

    @property
    def waited_for_most(self) -> int | None:
        return max(self.by_rank, key=lambda rank: self.by_rank[rank], default=None)


def last_steps(track: Track) -> list[Step]:
    """Return the steps of the last three seconds, but at least 3 and at most 20 steps."""
    recent = list(track.recent)[-_MOST:]
    fresh = [step for step in recent if 0 <= recent[-1].time - step.time <= _FRESH_S]
    return fresh if len(fresh) >= _LEAST else recent[-_LEAST:]


def find_waits(tracks: Mapping[int, Track], lead: Track, ranks: Collection[int]) -> Waits:
    """Return the main cause of waiting in the last steps.

    Args:
        tracks: steps of each rank whose records are on this host.
        lead: steps of the rank with the latest step.
        ranks: all ranks that train.
    """
    since, usual_s = since_slower(lead)
    result = _window(since, tracks, ranks)
    if (rank := result.waited_for_most) is not None and result.by_rank[rank] > _SLOWER_WORTH:
        waits = _for_rank(rank, result)
        if waits.own_s and (waits.others_s or 0.0) < _OTHERS * waits.own_s:
            return replace(waits, usual_s=usual_s)
    return _most(_window(last_steps(lead), tracks, ranks), len(ranks))


def since_slower(lead: Track) -> tuple[list[Step], float | None]:
    """Return the last steps, if some rank has become slower in these steps, and a usual time.

    The usual time is the median of the seconds until the last rank was ready. If no rank has become
    slower, the result is an empty list and None.
    """
    ready = [_last_ready(step) for step in lead.recent]
    known = [seconds for seconds in ready if seconds is not None]
    if len(known) < _USUAL:
        return [], None
    usual = median(known)
    slower = len([*takewhile(lambda seconds: (seconds or 0.0) > _SLOWER * usual, reversed(ready))])
    since = list(lead.recent)[-min(slower, _MOST) :] if slower else []
    lasts = len(since) >= _SLOWER_STEPS or sum(step.seconds for step in since) > _SLOWER_S
    return (since, usual) if lasts else ([], None)


def _last_ready(step: Step) -> float | None:
    """Return the seconds until the slowest rank's gradient was ready, from one rank's record.

    The seconds count from the start of the step. None: the record does not contain this time.
    """
    if step.ready_s is None:
        return None
    if step.others:
        return max(step.others[2], step.ready_s)
    return None if step.parts[2] is None else step.ready_s + step.parts[2]


def _window(steps: Sequence[Step], tracks: Mapping[int, Track], ranks: Collection[int]) -> _Window:
    """Return the records of all ranks for some steps.

    Args:
        steps: steps of one rank. The records of all ranks with these step numbers are returned.
        tracks: steps of each rank.
        ranks: all ranks that train.
    """
    numbers = [step.step for step in steps]
    lines = {
        rank: result for rank, track in tracks.items()
        if (result := {step.step: step for step in list(track.recent)[-2 * _MOST:]
                      if step.step in numbers})
    }  # fmt: skip
    lost: dict[int | None, float] = defaultdict(float)
    whole = 0.0
    for number in numbers:
        of_step = {rank: steps[number] for rank, steps in lines.items() if number in steps}
        whole += max(step.seconds for step in of_step.values())
        who, seconds = waited_for(of_step, ranks)
        lost[who] += seconds
    by_rank = {rank: seconds / whole for rank, seconds in lost.items() if seconds and whole}
    return _Window(len(numbers), lines, whole, by_rank)


def _most(found: _Window, ranks: int) -> Waits:
    """Return the main cause of waiting in some steps.

    Args:
        found: the records of the steps.
        ranks: number of ranks that train.
    """
    if not found.seconds:
        return Waits(Held.UNKNOWN, 0.0, found.steps, {})
    by_rank, usual = found.by_rank, found.seconds / found.steps
    parts = mean_parts([step for steps in found.lines.values() for step in steps.values()])
    shares = {
        Held.WIRE: (parts[3] or 0.0) / usual, Held.INPUT: (parts[0] or 0.0) / usual,
        Held.OPTIMIZER: (parts[4] or 0.0) / usual, Held.HOST: (parts[5] or 0.0) / usual,
    }  # fmt: skip
    rank, held = found.waited_for_most, max(shares, key=lambda each: shares[each])
    if by_rank and by_rank[rank] >= max(_WORTH, shares[held]):
        return _for_rank(rank, found)
    if shares[held] >= _WORTH:
        return Waits(held, shares[held], found.steps, by_rank)
    is_known = parts[2] is not None or ranks < 2
    return Waits(
        Held.NOTHING if is_known else Held.UNKNOWN, (parts[1] or 0.0) / usual, found.steps, by_rank
    )


def waited_for(lines: Mapping[int, Step], ranks: Collection[int]) -> tuple[int | None, float]:
    """Return the last rank to be ready in a step, and the seconds for which others waited.

    The seconds are a mean over the other ranks.

    Args:
        lines: records of the step, by rank.
        ranks: all ranks that train.

    Returns:
        The rank, or None if the rank writes no records. The seconds, or 0.0 if they are unknown.
    """
    waited = {rank: step.parts[2] for rank, step in lines.items() if step.parts[2] is not None}
    if not waited:
        return None, 0.0
    first = min(waited, key=lambda rank: waited[rank] or 0.0)
    own = lines[first]
    who: int | None = first
    if own.others and own.ready_s is not None:
        middle, other, last = own.others
        return other if last > own.ready_s else first, max(0.0, last, own.ready_s) - middle
    if (waited[first] or 0.0) > _NO_WAIT * own.seconds:
        absent = [rank for rank in ranks if rank not in lines]
        who = absent[0] if len(absent) == 1 else None
    waits = [seconds or 0.0 for rank, seconds in waited.items() if rank != who]
    return who, sum(waits) / len(waits) if waits else 0.0


def _for_rank(rank: int | None, found: _Window) -> Waits:
    lines = found.lines
    own = list(lines[rank].values()) if rank is not None and rank in lines else []
    own_s = _mean([step.ready_s for step in own])
    input_s = _mean([step.parts[0] for step in own])
    rest = [step for other, steps in lines.items() if other != rank for step in steps.values()]
    others_s = _mean([step.ready_s for step in rest])
    # Among many ranks, only the first writes records.
    if own_s is None and any(step.others for step in rest):
        others = [step.others for step in rest if step.others]
        own_s = _mean([last for _, who, last in others if who == rank])
        others_s = _mean([middle for middle, _, _ in others])
    elif own_s is None and rank is not None:  # the last rank also writes its record last
        own_s = _mean([_last_ready(step) for step in rest])
    for_input = bool(own_s and input_s and input_s > _FOR_INPUT * own_s)
    return Waits(
        Held.RANK, found.by_rank[rank], found.steps, found.by_rank, rank, own_s, others_s,
        for_input=for_input,
    )  # fmt: skip


def _mean(values: Collection[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

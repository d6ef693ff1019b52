"""The re-planner, which proposes another split while training runs. Pure.

A split is proposed once the noise of the steps cannot explain a gain. The re-planner waits longer
after a move that brought nothing. Every rank passes in the numbers that all ranks have exchanged,
and all ranks therefore propose one split.

Pure. Every rank feeds it the same numbers, which have travelled to all, so all propose the same.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from motley.plan.evidence import LONGEST, WINDOWS, Evidence, Groups, median
from motley.plan.plan import Floats, Speeds, split
from motley.plan.speeds import SpeedTable

_FIRST = 64  # steps before a failed move is tried again
_MOST = 4096  # steps
_CALM = 16  # waits without a failure after which a wait is the first again
_PATIENCE = 8  # steps that must show a change of another rank after a failure
_FORGIVEN = 256  # steps without a failure after which half as many must


class BackOff:
    """Waiting times of all ranks, apart for a rank that seems slower and one that seems faster.

    A rank whose move has failed waits twice as long each time, and then needs a window of as many
    steps, or the longest. All other ranks need longer windows too, but wait for no time: noise that
    has misled once may do so again, and a machine that halves its speed must be followed.
    """

    def __init__(self, size: int) -> None:
        self._until = np.zeros((2, size))  # step
        self._wait = np.zeros((2, size))  # steps
        self._patience = np.zeros((2, 1), dtype=int)  # least window of any rank, in steps
        self._failed = 0  # last step of a failure

    def add_failure(self, change: Floats, step: int) -> None:
        """Add a failed move.

        Args:
            change: measured ratio of each rank's slowdown; above 1 is slower.
            step: the current step.
        """
        ranks = np.array([change > 1, change < 1])
        is_calm = step > self._until + _CALM * self._wait
        longer = np.where(is_calm, _FIRST, np.minimum(2 * self._wait, _MOST))
        self._wait = np.where(ranks, longer, self._wait)
        self._until = np.where(ranks, step + self._wait, self._until)
        more = np.clip(2 * self._patience, _PATIENCE, LONGEST)
        self._patience = np.where(ranks.any(axis=1, keepdims=True), more, self._patience)
        self._failed = step

    def allow(self, change: Floats, window: int, step: int) -> Floats:
        """Return the change, with 1 for ranks that wait or need a longer window."""
        if step > self._failed + _FORGIVEN:
            self._patience, self._failed = self._patience // 2, step
        has_failed = step <= self._until + _CALM * self._wait
        needs_more = has_failed & (np.minimum(self._wait, LONGEST) > window)
        slower, faster = (step < self._until) | needs_more | (self._patience > window)
        return np.where((slower & (change > 1)) | (faster & (change < 1)), 1.0, change)


DEAD_BAND = 0.08  # part of a step that another split must save, seen for 8 steps
_LEAST_BAND = 0.04  # the same, seen for 32 steps or more
_SETTLING = 2  # steps after a move that are not counted: caches and compiled sizes are new
_LEAST_ACHIEVED = 1 / 3  # part of the expected gain that must come
_TRIAL_STEPS = (8, 16, 32, 64)  # steps after which a move is judged: more where there is noise
_LOSSES = (7, 8)  # steps out of as many as must be worse for a move to be taken back
_PAUSE = 4  # after a change that was worth no move, every so many steps are looked at
_REMEMBERED = 8  # splits whose computing time is kept; a growing batch has many


class Device(NamedTuple):
    """A device that ranks compute on.

    Attributes:
        name: ranks on one device always count as one.
        model: devices of one model count as equal until their steps show otherwise.
    """

    name: Hashable
    model: Hashable


@dataclass(frozen=True)
class Proposal:
    """Another split.

    Attributes:
        counts: samples of each rank.
        slowdown: of each rank, against its measured speed; 2.0 takes twice as long.
        gain: part of the step's compute time that it should save.
        taken_back: expected and measured gain of the move that this one reverses; None for any
            other move.
    """

    counts: tuple[int, ...]
    slowdown: tuple[float, ...]
    gain: float
    taken_back: tuple[float, float] | None = None


@dataclass
class _Move:
    """A move to another split.

    Attributes:
        before, reference: the split before, and the slowdowns that it was made for.
        change: ratio by which each rank's slowdown was found to differ from these.
        columns: the same of each column of the evidence. window: steps that showed it.
        gain: expected part of the step's time. sample_s: of a step before, per sample.
        trial: steps after which the gain is compared; 0 if there is nothing to compare.
        sample_times: seconds per sample of each step since.
        saved: seconds saved since then, as each step's own slowdowns say; less than 0 if the split
            before would have been better.
        saves: of these, the last step's. losses: for the last steps, True if the split before would
            have saved a part of them that is worth a move.
    """

    before: tuple[int, ...]
    reference: Floats
    change: Floats
    columns: Floats
    window: int
    gain: float
    sample_s: float
    trial: int
    sample_times: list[float] = field(default_factory=list)
    saved: float = 0.0
    saves: float = 0.0
    losses: deque[bool] = field(default_factory=lambda: deque(maxlen=_LOSSES[1]))


class ReplanMonitor:
    """The last steps of all ranks.

    Args:
        speeds: as measured before training; empty for a plan made by hand, which stays.
        kinds: device of each rank. Any other value names a device whose model is its own.
    """

    def __init__(self, speeds: Sequence[SpeedTable], kinds: Sequence[Hashable]) -> None:
        ranks = len(speeds)
        devices = [kind if isinstance(kind, Device) else Device(kind, kind) for kind in kinds]
        self._devices = Groups([device.name for device in devices])
        self._models = Groups([device.model for device in devices])
        # A model's common change and each device's own are looked at apart.
        self._has_models = len(dict.fromkeys(devices)) > len({device.model for device in devices})
        noise = self._models
        if self._has_models:
            models = [device.model for device in devices]
            noise = Groups([*((model, "all") for model in models), *models])
        self._evidence = Evidence(noise, (1 + self._has_models) * ranks)
        self._slowdown = np.ones(ranks)  # of each rank, when it last had something to do
        self._reference = np.ones(ranks)  # slowdowns that the split was made for
        self._back_off = BackOff(ranks)
        self._steps = 0
        self._is_limited = False  # the split was made for larger micro-batches
        self._offered: tuple[Proposal, _Move] | None = None
        self._move: _Move | None = None
        self._expect(speeds)

    def reset(self) -> None:
        """Start to watch another split: the one that was proposed last, if one was."""
        last, self._move, self._is_limited = self._move, None, False
        if self._offered:
            proposal, move = self._offered
            # The steps until another split holds are like the last one.
            if last and (proposal.taken_back or last.saved + _SETTLING * last.saves < 0):
                self._back_off.add_failure(last.change, self._steps)
            self._reference = move.reference * move.change
            self._move = None if proposal.taken_back else move
        self._restart()

    def limit(self, micro_batches: Sequence[int]) -> None:
        """Expect no larger micro-batches than these, one size a rank, from now on."""
        pairs = zip(self._tables, micro_batches, strict=False)  # no speeds: a plan made by hand
        self._expect([table.at_most(size) for table, size in pairs])
        self._is_limited = True

    def step(
        self, ready_s: Sequence[float], counts: Sequence[int], full: Sequence[int] | None = None
    ) -> Proposal | None:
        """Add a step.

        Args:
            ready_s: each rank's seconds until its gradient was ready.
            counts: samples of each rank in it.
            full: of each rank in a full batch, which a growing one is not yet; None: ``counts``.

        Returns:
            Another split; None if the present one fits. A split that is not used is proposed again
            a few steps later.
        """
        if self._speeds is None:
            return None
        self._steps += 1
        usual, took = self._load(self._speeds, counts).ready_s, np.array(ready_s)
        works = usual > 0  # an idle rank shows nothing
        self._slowdown[works] = np.maximum(took[works] / usual[works], 1e-6)
        self._settling -= 1
        if self._settling >= 0:
            return None
        load = self._load(self._speeds, full or counts)
        slowdown = self._devices.median(self._slowdown)
        relative = slowdown / self._reference
        centre = float(median(relative))
        relative /= centre
        if self._has_models:
            of_model = self._models.median(relative)
            relative = np.concatenate((of_model, relative / of_model))
        self._evidence.add(relative)
        self._centres.append(centre)
        self._sample_s.append(float((self._speeds.step_s + took).max()) / sum(counts))
        self._offered = self._take_back(self._speeds, load, slowdown) or self._find_split(load)
        return self._offered[0] if self._offered else None

    def _expect(self, tables: Sequence[SpeedTable]) -> None:
        """Expect these speeds from now on."""
        self._tables = tuple(tables)
        self._speeds = Speeds(self._tables) if len(self._tables) > 1 else None
        self._loads: dict[tuple[int, ...], _Load] = {}
        self._move = None
        self._restart()

    def _restart(self) -> None:
        """Start with no steps."""
        self._evidence.clear()
        self._centres: deque[float] = deque(maxlen=LONGEST)
        self._sample_s: deque[float] = deque(maxlen=LONGEST)
        self._settling, self._offered = _SETTLING, None
        self._next_look = 0

    def _load(self, speeds: Speeds, counts: Sequence[int]) -> "_Load":
        """Return the computing times of a split, which most steps share."""
        key = tuple(counts)
        if key not in self._loads:
            if len(self._loads) >= _REMEMBERED:
                self._loads.clear()
            self._loads[key] = _Load.from_counts(speeds, key, self._tables[0].grain)
        return self._loads[key]

    def _take_back(
        self, speeds: Speeds, load: "_Load", slowdown: Floats
    ) -> tuple[Proposal, _Move] | None:
        """Keep account of the last move, and reverse it if its gain has not come."""
        move = self._move
        if move is None:
            return None
        before = self._load(speeds, move.before)
        now_s = float((speeds.step_s + slowdown * load.ready_s).max())
        move.saves = float((speeds.step_s + slowdown * before.ready_s).max()) - now_s
        move.saved += move.saves
        move.losses.append(move.saves < -DEAD_BAND * now_s)
        achieved = move.saves / (move.saves + now_s)
        if move.saved >= 0 or sum(move.losses) < _LOSSES[0]:
            if not move.trial:
                return None
            move.sample_times.append(self._sample_s[-1])
            if len(move.sample_times) < move.trial:
                return None
            achieved = 1 - float(np.median(move.sample_times)) / move.sample_s
            if (
                achieved + self._compute_error(move.window, move.trial)
                >= _LEAST_ACHIEVED * move.gain
            ):
                self._evidence.explain_steps(move.window, move.columns)
                move.trial = 0
                return None
        proposal = Proposal(
            move.before, tuple(slowdown.tolist()), max(0.0, -achieved), (move.gain, achieved)
        )
        return proposal, _Move(
            load.counts, move.reference, np.ones(len(slowdown)), move.columns, 0, 0.0, 0.0, 0
        )

    def _find_split(self, load: "_Load") -> tuple[Proposal, _Move] | None:
        """Find another split that the steps of some window ask for."""
        if self._evidence.steps < self._next_look:
            return None
        for window in WINDOWS:
            if not self._evidence.is_due(window):
                continue
            columns = self._evidence.find_changes(window)
            if columns is None:
                if not self._is_limited or self._evidence.steps > LONGEST:
                    continue
                columns = np.ones(self._evidence.columns)
            change = self._allow(self._combine_columns(columns), window)
            proposal = self._propose(load, change, window)
            if proposal:
                sample_s = float(np.median(list(self._sample_s)[-window:]))
                trial = next(
                    (
                        steps
                        for steps in _TRIAL_STEPS
                        if self._compute_error(window, steps) < proposal.gain / 4
                    ),
                    _TRIAL_STEPS[-1],
                )
                return proposal, _Move(
                    load.counts, self._reference, change, columns, window, proposal.gain, sample_s,
                    trial,
                )  # fmt: skip
            self._next_look = (self._evidence.steps // _PAUSE + 1) * _PAUSE
        return None

    def _combine_columns(self, columns: Floats) -> Floats:
        """Return the ratios of the ranks, by the evidence's columns on the last axis."""
        if not self._has_models:
            return columns
        of_model, own = np.split(columns, 2, axis=-1)
        ratios: Floats = of_model * own
        return ratios

    def _compute_error(self, before: int, after: int) -> float:
        """Return the standard error of a gain, as the medians of so many steps show it."""
        return 1.2533 * self._evidence.noise * math.sqrt(1 / before + 1 / after)

    def _allow(self, change: Floats, window: int) -> Floats:
        """Return the change without that of ranks which wait, or whose last move is looked at."""
        change = self._back_off.allow(change, window, self._steps)
        if self._move is None or not self._move.trial:
            return change
        continues = (self._move.change > 1) & (change > 1) | (self._move.change < 1) & (change < 1)
        return np.where(continues, 1.0, change)

    def _propose(self, load: "_Load", change: Floats, window: int) -> Proposal | None:
        """Return another split, if it saves enough of a step.

        Args:
            load: of the present split.
            change: of each rank, against the slowdown that the split was made for.
            window: steps that show the change.
        """
        speeds = self._speeds
        assert speeds is not None
        band = max(_LEAST_BAND, DEAD_BAND * min(1.0, math.sqrt(8 / window)))
        centres = np.array(self._centres)[-window:]
        slowdown = self._reference * change * float(median(centres))
        old = (speeds.step_s + speeds.ready_s(load.samples, slowdown, load.computed_s)).max()
        # Cheap bounds come first: all ranks together, and what each rank must keep.
        enough = (1 - band) * old
        soonest = speeds.step_s + speeds.ready_s(load.least, slowdown, load.least_s)
        if soonest[load.least > 0].max() > enough:
            return None
        if speeds.count_whole_samples(enough, slowdown).sum() < sum(load.counts):
            return None
        pairs = zip(self._tables, slowdown.tolist(), strict=True)
        tables = [table.slower(factor) for table, factor in pairs]
        counts, grain = load.counts, self._tables[0].grain
        better = _keep_all_seen(split(sum(counts), tables), counts, grain)
        # Both splits are compared on the same steps, so noise does not count as a gain.
        steps = (
            self._combine_columns(self._evidence.get_last(window))
            * self._reference
            * centres[:, None]
        )
        new = self._load(speeds, better)
        now_s = (speeds.step_s + speeds.ready_s(load.samples, steps, load.computed_s)).max(axis=1)
        then_s = (speeds.step_s + speeds.ready_s(new.samples, steps, new.computed_s)).max(axis=1)
        gain = 1 - float(np.median(then_s) / np.median(now_s))
        return Proposal(better, tuple(slowdown.tolist()), gain) if gain > band else None


@dataclass(frozen=True)
class _Load:
    """A split, and the time that computing it takes at the measured speeds.

    Attributes:
        samples: ``counts``. computed_s, ready_s: see Speeds. least, least_s: samples that each
            working rank would keep, and ``computed_s`` of these.
    """

    counts: tuple[int, ...]
    samples: Floats
    computed_s: Floats
    ready_s: Floats
    least: Floats
    least_s: Floats

    @classmethod
    def from_counts(cls, speeds: Speeds, counts: tuple[int, ...], grain: int) -> "_Load":
        """Compute the times of these samples."""
        samples = np.array(counts, dtype=float)
        least = np.minimum(samples, grain)
        computed_s = speeds.computed_s(samples)
        ready_s = speeds.ready_s(samples, computed_s=computed_s)
        return cls(counts, samples, computed_s, ready_s, least, speeds.computed_s(least))


def _keep_all_seen(better: Sequence[int], counts: Sequence[int], grain: int) -> tuple[int, ...]:
    """Leave each working rank a sample, or a grain: without one, its recovery would not show."""
    saved = [max(new, min(grain, old)) for new, old in zip(better, counts, strict=True)]
    for _ in range((sum(saved) - sum(counts)) // grain):
        saved[saved.index(max(saved))] -= grain
    return tuple(saved)

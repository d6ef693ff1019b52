"""The re-planner, which proposes another split of the batch while training runs.

The module reads no file, clock or hardware.

A split is the number of samples of each rank in a step. A *move* is the change to another split.
The re-planner proposes a move once the noise of the steps cannot explain the expected gain. After a
move without a gain, the re-planner waits longer. All ranks exchange their times, pass in the same
numbers, and therefore propose the same split.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from motley.plan.evidence import LONGEST, WINDOWS, Evidence, Groups, median
from motley.plan.plan import Floats, Rank, Speeds, split
from motley.plan.speeds import SpeedTable

_FIRST = 64  # steps before a failed move is tried again
_MOST = 4096  # longest wait, in steps
_CALM = 16  # waits without a failure after which the wait is reset to the first
_PATIENCE = 8  # steps that must show a change of any other rank after a failure
_FORGIVEN = 256  # steps without a failure after which half as many steps must show it


class BackOff:
    """The waiting times of ranks after moves that gained nothing.

    A rank has one waiting time for becoming slower, and one for becoming faster.

    A move is proposed because the speed of a rank has changed. If the move fails, the waiting time
    of that rank doubles, and no move is proposed because of that rank in this time. Afterwards, a
    change of that rank must last for as many steps as the waiting time, or for the longest window.
    All other ranks need longer windows too, but do not wait. Noise that has caused one wrong move
    may cause another one. However, if a host halves its speed, the split must change soon.
    """

    def __init__(self, size: int) -> None:
        self._until = np.zeros((2, size))  # step at which the wait ends
        self._wait = np.zeros((2, size))  # length of the wait in steps
        self._patience = np.zeros((2, 1), dtype=int)  # least window of any rank, in steps
        self._failed = 0  # last step of a failure

    def add_failure(self, change: Floats, step: int) -> None:
        """Record that a move to another split gained nothing.

        Args:
            change: measured time of each rank, divided by the time that the split assumed. Above 1:
                slower.
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
        """Return ``change``, with 1 (no change) for ranks that must wait or need a longer window.

        Args:
            change: measured time of each rank, divided by the time that the split assumed.
            window: number of steps in which the change was measured.
            step: the current step.
        """
        if step > self._failed + _FORGIVEN:
            self._patience, self._failed = self._patience // 2, step
        has_failed = step <= self._until + _CALM * self._wait
        needs_more = has_failed & (np.minimum(self._wait, LONGEST) > window)
        slower, faster = (step < self._until) | needs_more | (self._patience > window)
        return np.where((slower & (change > 1)) | (faster & (change < 1)), 1.0, change)


DEAD_BAND = 0.08  # fraction of a step that another split must save, over 8 steps
_LEAST_BAND = 0.04  # fraction that it must save over 32 steps or more
_SETTLING = 2  # steps after a move that are not counted: caches and compiled sizes are new
_LEAST_ACHIEVED = 1 / 3  # fraction of the expected gain that must be measured
_TRIAL_STEPS = (8, 16, 32, 64)  # steps after which a move is evaluated: more with more noise
_LOSSES = (7, 8)  # a move is reversed if 7 of the last 8 steps were slower
_PAUSE = 4  # steps between two checks after a change that was too small for a move
_REMEMBERED = 8  # splits whose compute time is cached; a growing batch has many


class Device(NamedTuple):
    """A device on which ranks compute.

    Attributes:
        name: name of the device. All ranks on one device have the same slowdown.
        model: model of the device. Devices of one model count as equally fast until their steps
            differ.
    """

    name: Hashable
    model: Hashable


def list_devices(workers: Sequence[Rank], micro_batches: Sequence[int]) -> list[Device]:
    """Return the device of each rank.

    Args:
        workers: the ranks that train.
        micro_batches: most samples of each rank in a micro-batch.
    """
    return [
        Device(
            worker.uuid or worker.host,
            # The device's name without its number: cuda:1 NVIDIA H200.
            (worker.host, worker.device.partition(" ")[2], worker.precision, size),
        )
        for worker, size in zip(workers, micro_batches, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Proposal:
    """A proposal of another split.

    Attributes:
        counts: samples of each rank.
        slowdown: time of each rank, relative to the time measured before training. 2.0: the rank
            takes twice as long.
        gain: fraction of a step's compute time that the split is expected to save.
        taken_back: expected and measured gain of the move that this proposal reverses; None if this
            proposal does not reverse a move.
    """

    counts: tuple[int, ...]
    slowdown: tuple[float, ...]
    gain: float
    taken_back: tuple[float, float] | None = None


@dataclass
class _Move:
    """A move to another split.

    Attributes:
        before: the split before the move.
        reference: slowdown of each rank that the split before the move assumed.
        change: each rank's slowdown divided by ``reference``. This change led to the move.
        columns: the same change with one ratio per column of
            :class:`~motley.plan.evidence.Evidence`.
        window: number of steps that showed the change.
        gain: expected gain, as a fraction of the step's time.
        sample_s: seconds per sample of a step before the move.
        trial: number of steps after which the gain is evaluated; 0: no evaluation is due.
        sample_times: seconds per sample of each step since the move.
        saved: seconds saved since the move, computed from the slowdowns in each step. Less than 0
            if the previous split would have been faster.
        saves: seconds that the move saved in the last step.
        losses: for each of the last steps, True if the previous split would have saved a relevant
            fraction of the step's time.
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
    """A monitor of all ranks' steps, which proposes another split if it would be faster.

    Args:
        speeds: tables measured before training. Empty if the user has set the split, which then
            stays.
        kinds: device of each rank. A value that is not a :class:`Device` is the name of a device
            with a model of its own.
    """

    def __init__(self, speeds: Sequence[SpeedTable], kinds: Sequence[Hashable]) -> None:
        ranks = len(speeds)
        devices = [kind if isinstance(kind, Device) else Device(kind, kind) for kind in kinds]
        self._devices = Groups([device.name for device in devices])
        self._models = Groups([device.model for device in devices])
        # The common change of a model's devices and each device's own change are separate columns.
        self._has_models = len(dict.fromkeys(devices)) > len({device.model for device in devices})
        noise = self._models
        if self._has_models:
            models = [device.model for device in devices]
            noise = Groups([*((model, "all") for model in models), *models])
        self._evidence = Evidence(noise, (1 + self._has_models) * ranks)
        self._slowdown = np.ones(ranks)  # of each rank in its last step with samples
        self._reference = np.ones(ranks)  # slowdowns for which the split was made
        self._back_off = BackOff(ranks)
        self._steps = 0
        self._is_limited = False  # the split was made for larger micro-batches
        self._offered: tuple[Proposal, _Move] | None = None
        self._move: _Move | None = None
        self._expect(speeds)

    def reset(self) -> None:
        """Start to monitor a new split, which is the last proposal if one was made."""
        last, self._move, self._is_limited = self._move, None, False
        if self._offered:
            proposal, move = self._offered
            # The steps until the new split applies are assumed to be like the last one.
            if last and (proposal.taken_back or last.saved + _SETTLING * last.saves < 0):
                self._back_off.add_failure(last.change, self._steps)
            self._reference = move.reference * move.change
            self._move = None if proposal.taken_back else move
        self._restart()

    def limit(self, micro_batches: Sequence[int]) -> None:
        """Limit the micro-batches of each rank to these sizes from now on."""
        # Without speeds, the user has set the split.
        pairs = zip(self._tables, micro_batches, strict=False)
        self._expect([table.at_most(size) for table, size in pairs])
        self._is_limited = True

    def step(
        self, ready_s: Sequence[float], counts: Sequence[int], full: Sequence[int] | None = None
    ) -> Proposal | None:
        """Add the times of a step, and return another split if it would be faster.

        Args:
            ready_s: seconds until each rank's gradient was ready.
            counts: samples of each rank in this step.
            full: samples of each rank in a batch of full size, while the batch is still growing.
                None: equal to ``counts``.

        Returns:
            A proposal, or None if the current split fits. If the caller does not use the proposal,
            it is repeated a few steps later.
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
        """Set the speed tables from which the expected times are computed."""
        self._tables = tuple(tables)
        self._speeds = Speeds(self._tables) if len(self._tables) > 1 else None
        self._loads: dict[tuple[int, ...], _Load] = {}
        self._move = None
        self._restart()

    def _restart(self) -> None:
        """Discard the times of all steps so far."""
        self._evidence.clear()
        self._centres: deque[float] = deque(maxlen=LONGEST)
        self._sample_s: deque[float] = deque(maxlen=LONGEST)
        self._settling, self._offered = _SETTLING, None
        self._next_look = 0

    def _load(self, speeds: Speeds, counts: Sequence[int]) -> "_Load":
        """Return the expected compute times of a split, from a cache if possible."""
        key = tuple(counts)
        if key not in self._loads:
            if len(self._loads) >= _REMEMBERED:
                self._loads.clear()
            self._loads[key] = _Load.from_counts(speeds, key, self._tables[0].grain)
        return self._loads[key]

    def _take_back(
        self, speeds: Speeds, load: "_Load", slowdown: Floats
    ) -> tuple[Proposal, _Move] | None:
        """Update the time that the last move has saved. Propose to reverse a move without a gain.

        Returns:
            The proposal to reverse the move, and the reverse move; None if the move stays.
        """
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
        """Return a split that the measured steps show to be faster, or None."""
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
        """Compute one ratio per rank from the ratios of all columns, on the last axis."""
        if not self._has_models:
            return columns
        of_model, own = np.split(columns, 2, axis=-1)
        ratios: Floats = of_model * own
        return ratios

    def _compute_error(self, before: int, after: int) -> float:
        """Return the standard error of a gain that compares two medians of step times.

        Args:
            before: number of steps in the median before the move.
            after: number of steps in the median after the move.
        """
        return 1.2533 * self._evidence.noise * math.sqrt(1 / before + 1 / after)

    def _allow(self, change: Floats, window: int) -> Floats:
        """Return ``change``, with 1 (no change) for ranks that must wait after a move."""
        change = self._back_off.allow(change, window, self._steps)
        if self._move is None or not self._move.trial:
            return change
        continues = (self._move.change > 1) & (change > 1) | (self._move.change < 1) & (change < 1)
        return np.where(continues, 1.0, change)

    def _propose(self, load: "_Load", change: Floats, window: int) -> Proposal | None:
        """Return another split if it saves enough of a step, or None.

        Args:
            load: compute times of the current split.
            change: each rank's slowdown, divided by the slowdown that the present split assumes.
            window: number of steps that show the change.
        """
        speeds = self._speeds
        assert speeds is not None
        band = max(_LEAST_BAND, DEAD_BAND * min(1.0, math.sqrt(8 / window)))
        centres = np.array(self._centres)[-window:]
        slowdown = self._reference * change * float(median(centres))
        old = (speeds.step_s + speeds.ready_s(load.samples, slowdown, load.computed_s)).max()
        # Cheap bounds come first: the least share of each rank, and all ranks together.
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
    """A split, and each rank's time for it at the speeds that were measured before training.

    Attributes:
        counts: samples of each rank.
        samples: ``counts`` as an array.
        computed_s: see :meth:`Speeds.computed_s`.
        ready_s: see :meth:`Speeds.ready_s`.
        least: samples that each rank with samples must keep, which is one group of ``grain``.
        least_s: ``computed_s`` of ``least``.
    """

    counts: tuple[int, ...]
    samples: Floats
    computed_s: Floats
    ready_s: Floats
    least: Floats
    least_s: Floats

    @classmethod
    def from_counts(cls, speeds: Speeds, counts: tuple[int, ...], grain: int) -> "_Load":
        """Return the split ``counts`` with its compute times."""
        samples = np.array(counts, dtype=float)
        least = np.minimum(samples, grain)
        computed_s = speeds.computed_s(samples)
        ready_s = speeds.ready_s(samples, computed_s=computed_s)
        return cls(counts, samples, computed_s, ready_s, least, speeds.computed_s(least))


def _keep_all_seen(better: Sequence[int], counts: Sequence[int], grain: int) -> tuple[int, ...]:
    """Return the new split with at least ``grain`` samples for each rank that has samples now.

    A rank without samples could not show that it has become faster again.
    """
    least = [max(new, min(grain, old)) for new, old in zip(better, counts, strict=True)]
    for _ in range((sum(least) - sum(counts)) // grain):
        least[least.index(max(least))] -= grain
    return tuple(least)

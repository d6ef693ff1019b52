"""A simulator of training steps whose times have noise, and what a re-plan monitor makes of them.

Fixed shares and a monitor's shares meet the same noise: it is drawn once per scenario and seed. As
in the training loop, a step's times are known during the next step, and another split holds from
the step after that.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from motley.plan.plan import Speeds, split, whole_share_pieces
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import SpeedTable

Floats = NDArray[np.float64]
Draw = Callable[[Generator, int, int], Floats]  # of steps and ranks: [steps, ranks]

SIZES = (1, 2, 4, 8, 16, 32)


def speed(sample_s: float) -> SpeedTable:
    """Return the speeds of a rank: 2 ms per micro-batch, and 1 ms per step."""
    return SpeedTable(SIZES, tuple(0.002 + sample_s * size for size in SIZES), 0.001)


def steady(_: Generator, steps: int, ranks: int) -> Floats:
    """Return a factor of 1 for each step and rank."""
    return np.ones((steps, ranks))


def lognormal(sigma: float) -> Draw:
    """Return independent noise of so many standard deviations, for each rank and step."""
    return lambda dice, steps, ranks: np.exp(sigma * dice.standard_normal((steps, ranks)))


def heavy_tails(sigma: float, share: float = 0.05, of_all: bool = False) -> Draw:
    """Return noise in which a share of the steps takes 3 to 10 times as long.

    Args:
        of_all: such a step is long for all ranks at once, else for each rank by itself.
    """

    def draw(dice: Generator, steps: int, ranks: int) -> Floats:
        columns = 1 if of_all else ranks
        is_long = dice.random((steps, columns)) < share
        factor = np.where(is_long, dice.uniform(3, 10, (steps, columns)), 1.0)
        return lognormal(sigma)(dice, steps, ranks) * factor

    return draw


def bursts(sigma: float, mean: float) -> Draw:
    """Return noise that stays for some steps: it forgets a tenth of itself with each step.

    Args:
        sigma: of the lasting part. mean: of an exponential part that does not last.
    """

    def draw(dice: Generator, steps: int, ranks: int) -> Floats:
        found, level = np.empty((steps, ranks)), sigma * dice.standard_normal(ranks)
        for step in range(steps):
            level = 0.9 * level + sigma * (1 - 0.81) ** 0.5 * dice.standard_normal(ranks)
            found[step] = np.exp(level)
        return found + dice.exponential(mean, (steps, ranks))

    return draw


def drifting(noise: Draw, part: float = 0.2, period: int = 500) -> Draw:
    """Return such noise, around a speed of all ranks that drifts by a part of itself."""

    def draw(dice: Generator, steps: int, ranks: int) -> Floats:
        wave = 1 + part * np.sin(2 * np.pi * np.arange(steps) / period)
        return noise(dice, steps, ranks) * wave[:, None]

    return draw


def slower(rank: int, factor: float, begin: int, end: int | None = None) -> Draw:
    """Return the factor of one rank that is slower in the steps from ``begin`` to ``end``."""

    def draw(_: Generator, steps: int, ranks: int) -> Floats:
        found = np.ones((steps, ranks))
        found[begin:end, rank] = factor
        return found

    return draw


def alternating(rank: int, factor: float, period: int) -> Draw:
    """Return the factor of one rank that is slower in every second period."""

    def draw(_: Generator, steps: int, ranks: int) -> Floats:
        found = np.ones((steps, ranks))
        found[np.arange(steps) // period % 2 == 1, rank] = factor
        return found

    return draw


def no_stall(_: Generator, steps: int, ranks: int) -> Floats:
    """Return no stall."""
    return np.zeros((steps, ranks))


def stalls(mean_s: float) -> Draw:
    """Return exponential waits for input, which do not depend on the samples."""
    return lambda dice, steps, ranks: dice.exponential(mean_s, (steps, ranks))


@dataclass(frozen=True)
class Scenario:
    """Ranks, and what happens to them.

    Attributes:
        samples_s: seconds per sample of each rank, as measured.
        noise, change: factors on the computing time. stall: seconds besides.
        floor_s: least seconds of a rank's step, whatever its samples: {rank: seconds}.
        batch: samples of a step. batches: of each step, if it grows.
        kinds: of the ranks; empty: each is of its own.
        counts: samples of each rank at first; empty: as the speeds say.
    """

    samples_s: Sequence[float]
    noise: Draw = steady
    change: Draw = steady
    stall: Draw = no_stall
    floor_s: dict[int, float] = field(default_factory=dict)
    batch: int = 180
    batches: Sequence[int] = ()
    kinds: Sequence[Hashable] = ()
    grain: int = 1
    counts: Sequence[int] = ()


@dataclass
class Run:
    """Simulated steps.

    Attributes:
        seconds: computing time of each step, the slowest rank's.
        moves: step from which another split holds, and the split. counts: the last one.
        taken_back: how many moves reversed another.
    """

    seconds: Floats
    moves: list[tuple[int, tuple[int, ...]]]
    counts: tuple[int, ...]
    taken_back: int


def simulate(
    scenario: Scenario,
    steps: int,
    seed: int,
    monitor: Callable[..., Any] | None = ReplanMonitor,
) -> Run:
    """Take some steps.

    Args:
        monitor: a class as ReplanMonitor; None keeps the first split.
    """
    ranks = len(scenario.samples_s)
    tables = [speed(each) for each in scenario.samples_s]
    if scenario.grain > 1:
        sizes = tuple(scenario.grain * size for size in SIZES)
        tables = [
            SpeedTable(sizes, tuple(0.002 + each * size for size in sizes), 0.001,
                       grain=scenario.grain)
            for each in scenario.samples_s
        ]  # fmt: skip
    speeds = Speeds(tables)
    counts = tuple(scenario.counts) or split(scenario.batch, tables)
    dice = np.random.default_rng(seed)
    factors = scenario.noise(dice, steps, ranks) * scenario.change(dice, steps, ranks)
    stall = scenario.stall(dice, steps, ranks)
    floor = np.array([scenario.floor_s.get(rank, 0.0) for rank in range(ranks)])
    watch = monitor(tables, scenario.kinds or range(ranks)) if monitor else None
    found = Run(np.empty(steps), [], counts, 0)
    before: tuple[list[float], tuple[int, ...]] | None = None
    known: dict[tuple[int, ...], Floats] = {}
    for step in range(steps):
        part = found.counts
        if scenario.batches:
            part = whole_share_pieces(scenario.batches[step], found.counts)
        if part not in known:
            known[part] = speeds.ready_s(np.array(part, dtype=float))
        works = np.array(part) > 0
        ready = np.where(works, np.maximum(known[part] * factors[step] + stall[step], floor), 1e-6)
        found.seconds[step] = (ready + speeds.step_s)[works].max()
        proposal = watch.step(*before, found.counts) if watch and before else None
        before = ready.tolist(), part
        if watch and proposal:
            assert sum(proposal.counts) == sum(found.counts)
            found.counts = proposal.counts
            found.moves.append((step + 1, proposal.counts))
            found.taken_back += bool(getattr(proposal, "taken_back", None))
            watch.reset()
    return found

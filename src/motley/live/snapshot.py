"""What is known of a run now, for a terminal and for a page. Pure, but for the follower's clock."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from motley.live.follow import RunFollower, hosts_elsewhere, workers
from motley.live.headline import Mood, Silence, headline, silences
from motley.live.rows import Row, choose, device_of, left_out, make_rows, weight_of
from motley.live.track import Step, Track
from motley.live.waiting import find_waits, last_steps
from motley.live.words import Event, evaluation, event, mapping, plain
from motley.records.lines import JsonDict, finite

MOST_ROWS = 64  # ranks that are shown of more
_EVENTS = 30
_PAUSE = 20  # usual steps; a longer one between two is an evaluation, or a clock that jumped
_LONGEST_S = 600.0


@dataclass(frozen=True)
class RankHistory:
    """What one rank has done.

    Attributes:
        steps: of each mean. parts: of each, as of :class:`Row`.
        load, memory_mib, temperature_c, power_w: of its device's last samples.
    """

    rank: int
    steps: tuple[int, ...]
    parts: tuple[tuple[float | None, ...], ...]
    load: tuple[float | None, ...]
    memory_mib: tuple[float | None, ...]
    temperature_c: tuple[float | None, ...]
    power_w: tuple[float | None, ...]


@dataclass(frozen=True)
class Snapshot:
    """One run now. None and empty: unknown.

    Attributes:
        mood, headline: what it waits for, a sentence.
        step: steps that are taken, of ``last_step``. left_s: seconds until its end.
        rate: of all ranks, in ``unit`` a second. fraction: of the limit.
        losses: step and loss, means over some steps each.
        evaluation: the last one's metrics.
        link: on the slowest link. waits: see :class:`Waits`.
        rows: of ranks, ascending; ``hidden``: how many more there are.
        elsewhere: on each host of which no file is here, or none can be read, a sentence.
        history: of the rank that was asked for.
    """

    name: str
    title: str
    status: str
    mood: Mood
    headline: str
    unit: str = "samples"
    step: int = 0
    last_step: int | None = None
    epoch: int | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    rate: float | None = None
    fraction: float | None = None
    loss: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    lr: float | None = None
    loss_scale: float | None = None
    evaluation: str = ""
    link: str = ""
    rows: tuple[Row, ...] = ()
    hidden: int = 0
    events: tuple[Event, ...] = ()
    elsewhere: tuple[str, ...] = ()
    problem: str = ""
    history: RankHistory | None = None

    def as_json(self) -> JsonDict:
        """For a page."""
        found: JsonDict = finite(asdict(self))
        return found


def take_snapshot(
    followed: RunFollower, wall: float, most: int = MOST_ROWS, rank: int | None = None
) -> Snapshot:
    """What is known as of the follower's last look.

    Args:
        wall: seconds since the epoch. most: rows. rank: whose history is told too.
    """
    about, lead = followed.about, followed.lead()
    task = mapping(about, "task")
    ranks = [worker["rank"] for worker in workers(about)] or sorted(followed.tracks)
    waits = find_waits(followed.tracks, lead, ranks) if lead else None
    status = str(about.get("status") or "being made")
    silence = silences(followed, ranks) if status == "running" else Silence()
    mood, said = headline(followed, waits, silence, wall)
    rows = [*make_rows(followed, waits, silence), *left_out(about)]
    shown = choose(rows, most)
    steps = last_steps(lead) if lead else []
    rate = rate_of(steps)
    last, last_step = lead.last if lead else None, whole(about.get("last_step"))
    points = lead.history.points() if lead else []
    losses = [(each.step, float(f"{each.loss:.5g}")) for each in points if each.loss is not None]
    done = last.step + 1 if last else 0
    moves = status == "running" and silence.stalled_s is None
    return Snapshot(
        plain(followed.run.path.resolve().name), plain(task.get("title")), plain(status), mood,
        said, plain(task.get("unit") or "samples"), done, last_step, last.epoch if last else None,
        elapsed(about, wall),
        left_s(lead, last_step - done) if lead and last_step and moves else None,
        rate and rate * weight_of(steps), fraction_of_limit(about, rate),
        next((loss for _, loss in reversed(losses)), None), tuple(losses),
        last.lr if last else None, last.loss_scale if last else None,
        evaluation(followed.evaluation), plain(followed.slow_link), tuple(shown),
        len(rows) - len(shown), tuple(map(event, list(followed.events)[-_EVENTS:])),
        elsewhere(followed), plain(followed.problem), history_of(followed, rank),
    )  # fmt: skip


def history_of(followed: RunFollower, rank: int | None) -> RankHistory | None:
    """Of one rank; None for one that does not train."""
    worker = next((each for each in workers(followed.about) if each["rank"] == rank), None)
    if worker is None or rank is None:
        return None
    track, host = followed.tracks.get(rank), str(worker.get("host"))
    points = track.history.points() if track else []
    last = device_of(followed.devices.get(host, {}), rank, worker)
    samples = list(followed.devices[host][last.gpu or ""]) if last else []
    return RankHistory(
        rank, tuple(point.step for point in points), tuple(point.parts for point in points),
        tuple(sample.load for sample in samples),
        tuple(sample.memory_used_mib for sample in samples),
        tuple(sample.temperature_c for sample in samples),
        tuple(sample.power_w for sample in samples),
    )  # fmt: skip


def whole(value: Any) -> int | None:
    """A positive whole number; None for anything else."""
    return value if isinstance(value, int) and value > 0 else None


def rate_of(steps: Sequence[Step]) -> float | None:
    """Samples a second of all ranks, over some steps."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.n_global for step in steps) / seconds if seconds else None


def fraction_of_limit(about: Mapping[str, Any], rate: float | None) -> float | None:
    """Of what the machines would do together if nobody waited and nothing was sent."""
    forecast = mapping(mapping(about, "plan"), "forecast")
    batch, limit_s = forecast.get("global_batch"), forecast.get("limit_s")
    return rate * limit_s / batch if rate and limit_s and batch else None


def elapsed(about: Mapping[str, Any], wall: float) -> float | None:
    """Seconds since the run was started, or until it ended; never less than 0."""
    started, ended = about.get("started"), about.get("ended")
    if not isinstance(started, int | float):
        return None
    end = ended if isinstance(ended, int | float) and ended >= started else wall
    return float(max(0.0, end - started))


def left_s(lead: Track, steps: int) -> float | None:
    """Seconds that so many steps should take, with the evaluations and saves that the last ones
    had between them."""
    recent = list(lead.recent)
    took, taken = 0.0, 0
    for before, step in pairwise(recent):
        number, gap = step.step - before.step, step.time - before.time
        usual = number * step.seconds
        took += gap if 0 < gap < _LONGEST_S + _PAUSE * usual else usual  # else a clock jumped
        taken += number
    if not taken:
        took, taken = sum(step.seconds for step in recent), len(recent)
    return max(0, steps) * took / taken if taken else None


def elsewhere(followed: RunFollower) -> tuple[str, ...]:
    """Return a sentence on each host of which no file is here, or none that can be read."""
    usual = "python plots/watch.py --collect reads them by ssh"
    absent = (
        f"{host}: its own records are not here; {followed.troubles.get(host, usual)}"
        for host in hosts_elsewhere(followed)
    )
    return tuple(map(plain, (*absent, *followed.unread.values())))

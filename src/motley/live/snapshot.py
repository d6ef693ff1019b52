"""A snapshot of a run, which a terminal and a web page show. Pure, except for the clock.

The snapshot has one row per rank, with its device, load and step times, and the state of the run as
a whole.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from motley.live.follow import RunFollower, hosts_elsewhere, workers
from motley.live.track import Step, Track, Waits, find_waits, last_steps, mean_parts
from motley.live.words import (
    Event,
    Mood,
    Silence,
    evaluation,
    event,
    headline,
    mapping,
    metric_curves,
    plain,
    silences,
)
from motley.records.gpu_csv import GpuSample, device_name
from motley.records.json_files import JsonDict, finite
from motley.text import typed_command


@dataclass(frozen=True)
class Row:
    """The row of one rank in a snapshot. None and empty values are unknown.

    Attributes:
        share: fraction of the global batch that the rank computes.
        samples: number of the rank's samples in the last step.
        rate: images, tokens or other units of the task that the rank computes per second.
        parts: mean seconds of each part of the rank's last steps: input, compute, waiting for other
            ranks, communication, optimizer, host.
        waited: fraction of each step in which all other ranks wait for this rank.
        step: last step in the rank's records on this host.
        load: load of the rank's device, 0 to 1.
        memory_mib: used memory of the device, in MiB.
        memory_total_mib: total memory of the device, in MiB.
        temperature_c: temperature of the device, in degrees Celsius.
        power_w: power of the device, in watts.
        others: other users of the GPU, and their memory (GiB).
        silent_s: seconds since the rank, or the GPU logger of its host, last wrote a record. None:
            no record is overdue.
        here: True if the rank's step records, or copies of them, are on this host.
        note: reason why the rank does not train; empty if it trains.
    """

    rank: int
    host: str
    device: str
    precision: str
    share: float | None = None
    samples: float | None = None
    rate: float | None = None
    parts: tuple[float | None, ...] = ()
    waited: float = 0.0
    step: int | None = None
    load: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    others: str = ""
    silent_s: float | None = None
    here: bool = False
    note: str = ""

    @property
    def urgency(self) -> tuple[float, float, float]:
        """Sort key of the row; rows with larger keys are shown first.

        Silent ranks come first, then stragglers, then slow ranks.
        """
        return self.silent_s or 0.0, self.waited, sum(part or 0.0 for part in self.parts[:2])


def make_rows(followed: RunFollower, waits: Waits | None, silence: Silence) -> list[Row]:
    """Return one row per rank that trains, ascending."""
    known = {worker["rank"]: worker for worker in workers(followed.about)}
    result = mapping(followed.about, "plan").get("counts")
    counts = [n for n in result if isinstance(n, int)] if isinstance(result, list) else []
    rows = []
    for rank in known or sorted(followed.tracks):
        worker = known.get(rank, {})
        host, track = str(worker.get("host") or ""), followed.tracks.get(rank)
        steps = last_steps(track) if track and track.last else []
        sample = find_device_sample(followed.devices.get(host, {}), rank, worker)
        counted = [step for step in steps if step.n_local is not None and step.n_global]
        samples = counted[-1].n_local if counted else planned(counts, worker)
        whole, part = (
            sum(step.n_global for step in counted),
            sum(step.n_local or 0 for step in counted),
        )
        if not counted:
            whole, part = sum(counts), samples or 0
        seconds = sum(step.seconds for step in counted)
        own = part / seconds if seconds else None
        rows.append(Row(
            rank, plain(host), device_name(plain(worker.get("device"))),
            plain(worker.get("precision")),
            part / whole if whole and samples is not None else None, samples,
            own and own * compute_sample_weight(counted),
            mean_parts(steps) if steps else get_straggler_times(rank, waits),
            waits.by_rank.get(rank, 0.0) if waits else 0.0,
            track.last.step if track and track.last else None,
            silent_s=silence.for_rank(rank, host), here=rank in followed.tracks,
            **describe_device(sample),
        ))  # fmt: skip
    return rows


def get_straggler_times(rank: int, waits: Waits | None) -> tuple[float | None, ...]:
    """Return the times of the straggler, if the straggler writes no records.

    The result is empty for any other rank.

    In a group of many ranks, only the first rank writes records, which include the straggler's
    times.
    """
    if waits is None or waits.rank != rank or waits.own_s is None:
        return ()
    return None, waits.own_s, 0.0, None, None


def planned(counts: Sequence[int], worker: Mapping[str, Any]) -> int | None:
    """Return the number of samples per step that the plan gives a rank; None: unknown."""
    place = worker.get("group_rank")
    return counts[place] if isinstance(place, int) and 0 <= place < len(counts) else None


def find_device_sample(
    devices: Mapping[str, deque[GpuSample]], rank: int, worker: Mapping[str, Any]
) -> GpuSample | None:
    """Return the GPU logger's last sample of a rank's device; None if it has no sample."""
    last = [samples[-1] for samples in devices.values()]
    uuid = worker.get("uuid")
    if uuid:
        return next((sample for sample in last if sample.uuid == uuid), None)
    mine = [sample for sample in last if sample.rank == rank]
    return next(iter([*mine, *(sample for sample in last if sample.gpu is None)]), None)


def describe_device(sample: GpuSample | None) -> dict[str, Any]:
    """Return the fields of a row that describe its device."""
    if sample is None:
        return {}
    memory = sample.others_memory_mib
    others = plain(sample.others) or ("others" if memory else "")
    return {
        "load": sample.load, "memory_mib": sample.memory_used_mib,
        "memory_total_mib": sample.memory_total_mib, "temperature_c": sample.temperature_c,
        "power_w": sample.power_w,
        "others": f"{others} {memory / 1024:.1f}G" if memory else others,
    }  # fmt: skip


def left_out(about: Mapping[str, Any]) -> list[Row]:
    """Return one row per rank that was launched but does not train."""
    result = about.get("left_out")
    return [
        Row(int(each["rank"]), plain(each.get("host")), "", "",
            note=f"left out: {plain(each.get('reason'))}")
        for each in (result if isinstance(result, list) else [])
        if isinstance(each, dict) and isinstance(each.get("rank"), int)
    ]  # fmt: skip


def choose(rows: Sequence[Row], most: int) -> list[Row]:
    """Return the ``most`` most important rows, in the order of ranks.

    Silent ranks come first in importance, then the straggler, then the slowest ranks.
    """
    if len(rows) <= most:
        return sorted(rows, key=lambda row: row.rank)

    def weight(row: Row) -> tuple[float, ...]:
        return *row.urgency, row.here, -row.rank

    return sorted(sorted(rows, key=weight, reverse=True)[:most], key=lambda row: row.rank)


def compute_sample_weight(steps: Sequence[Step]) -> float:
    """Return the mean weight of a sample, in the task's unit; 1 if no weight is recorded."""
    known = [step for step in steps if step.weight is not None and step.n_global]
    samples = sum(step.n_global for step in known)
    return sum(step.weight or 0.0 for step in known) / samples if samples else 1.0


MOST_ROWS = 64  # largest number of ranks that are shown
_EVENTS = 30
_PAUSE = 20  # usual steps; if a gap exceeds these by _LONGEST_S, a clock has jumped
_LONGEST_S = 600.0


@dataclass(frozen=True)
class RankHistory:
    """The history of one rank.

    Attributes:
        rank: number of the rank.
        steps: number of the first step of each group of steps. ``parts`` has a mean for each group.
        parts: for each group of steps, the mean seconds of each part of a step, as in :class:`Row`.
        load: load of the rank's device, 0 to 1, in each of the last samples.
        memory_mib: used memory in the same samples, in MiB.
        temperature_c: temperature in the same samples, in degrees Celsius.
        power_w: power in the same samples, in watts.
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
    """The state of one run now. None and empty values are unknown.

    Attributes:
        mood: condition of the run.
        headline: sentence on the condition.
        step: number of steps taken, out of ``last_step``.
        left_s: expected seconds until the run ends.
        rate: units per second of all ranks, in ``unit``.
        fraction: ``rate`` divided by the ideal rate, at which no rank waits and no data is sent.
        losses: pairs of a step and a loss. Each loss is a mean over some steps.
        evaluation: metrics of the last evaluation, in words.
        metrics: pairs of step and value in the last evaluations, by the metric's name.
        link: sentence on the slowest network link.
        rows: rows of ranks, ascending.
        hidden: number of further ranks that have no row.
        elsewhere: one sentence for each host whose files are not on this host or cannot be read.
        history: history of the selected rank.
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
    metrics: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    link: str = ""
    rows: tuple[Row, ...] = ()
    hidden: int = 0
    events: tuple[Event, ...] = ()
    elsewhere: tuple[str, ...] = ()
    problem: str = ""
    history: RankHistory | None = None

    def as_json(self) -> JsonDict:
        """Return the snapshot as JSON for a web page, with None in place of NaN and infinities."""
        result: JsonDict = finite(asdict(self))
        return result


def take_snapshot(
    followed: RunFollower, wall: float, most: int = MOST_ROWS, rank: int | None = None
) -> Snapshot:
    """Return a snapshot of a run as of the follower's last read of the records.

    Args:
        followed: follower of the run.
        wall: seconds since 1970.
        most: largest number of rows.
        rank: the rank whose history is included; None: no rank.
    """
    about, lead = followed.about, followed.lead()
    task = mapping(about, "task")
    ranks = [worker["rank"] for worker in workers(about)] or sorted(followed.tracks)
    waits = find_waits(followed.tracks, lead, ranks) if lead else None
    status = str(about.get("status") or "being made")
    silence = silences(followed, ranks) if status == "running" else Silence()
    mood, text = headline(followed, waits, silence, wall)
    rows = [*make_rows(followed, waits, silence), *left_out(about)]
    shown = choose(rows, most)
    steps = last_steps(lead) if lead else []
    rate = compute_rate(steps)
    last, last_step = lead.last if lead else None, parse_count(about.get("last_step"))
    points = lead.history.points() if lead else []
    losses = [(each.step, float(f"{each.loss:.5g}")) for each in points if each.loss is not None]
    done = last.step + 1 if last else 0
    moves = status == "running" and silence.stalled_s is None
    return Snapshot(
        plain(followed.run.path.resolve().name), plain(task.get("title")), plain(status), mood,
        text, plain(task.get("unit") or "samples"), done, last_step, last.epoch if last else None,
        elapsed(about, wall),
        left_s(lead, last_step - done) if lead and last_step and moves else None,
        rate and rate * compute_sample_weight(steps), fraction_of_limit(about, rate),
        next((loss for _, loss in reversed(losses)), None), tuple(losses),
        last.lr if last else None, last.loss_scale if last else None,
        evaluation(followed.evaluations), metric_curves(followed.evaluations),
        plain(followed.slow_link), tuple(shown), len(rows) - len(shown),
        tuple(map(event, list(followed.events)[-_EVENTS:])),
        elsewhere(followed), plain(followed.problem), get_history(followed, rank),
    )  # fmt: skip


def get_history(followed: RunFollower, rank: int | None) -> RankHistory | None:
    """Return the history of one rank; None for a rank that does not train."""
    worker = next((each for each in workers(followed.about) if each["rank"] == rank), None)
    if worker is None or rank is None:
        return None
    track, host = followed.tracks.get(rank), str(worker.get("host"))
    points = track.history.points() if track else []
    last = find_device_sample(followed.devices.get(host, {}), rank, worker)
    samples = list(followed.devices[host][last.gpu or ""]) if last else []
    return RankHistory(
        rank, tuple(point.step for point in points), tuple(point.parts for point in points),
        tuple(sample.load for sample in samples),
        tuple(sample.memory_used_mib for sample in samples),
        tuple(sample.temperature_c for sample in samples),
        tuple(sample.power_w for sample in samples),
    )  # fmt: skip


def parse_count(value: Any) -> int | None:
    """Return the value if it is a positive whole number, else None."""
    return value if isinstance(value, int) and value > 0 else None


def compute_rate(steps: Sequence[Step]) -> float | None:
    """Return the samples per second of all ranks together, over some steps; None if unknown."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.n_global for step in steps) / seconds if seconds else None


def fraction_of_limit(about: Mapping[str, Any], rate: float | None) -> float | None:
    """Return a rate as a fraction of the ideal rate, at which no rank waits and no data is sent."""
    forecast = mapping(mapping(about, "plan"), "forecast")
    batch, limit_s = forecast.get("global_batch"), forecast.get("limit_s")
    return rate * limit_s / batch if rate and limit_s and batch else None


def elapsed(about: Mapping[str, Any], wall: float) -> float | None:
    """Return the seconds from the start of a run until now, or until the end of an ended run.

    The result is never below 0.
    """
    started, ended = about.get("started"), about.get("ended")
    if not isinstance(started, int | float):
        return None
    end = ended if isinstance(ended, int | float) and ended >= started else wall
    return float(max(0.0, end - started))


def left_s(lead: Track, steps: int) -> float | None:
    """Return the expected seconds of the next ``steps`` steps; None if unknown.

    The estimate includes evaluations and checkpoints, as often as they came between the last steps.
    """
    recent = list(lead.recent)
    took, taken = 0.0, 0
    for before, step in pairwise(recent):
        number, gap = step.step - before.step, step.time - before.time
        usual = number * step.seconds
        # If the gap is out of these bounds, a clock has jumped.
        took += gap if 0 < gap < _LONGEST_S + _PAUSE * usual else usual
        taken += number
    if not taken:
        took, taken = sum(step.seconds for step in recent), len(recent)
    return max(0, steps) * took / taken if taken else None


def elsewhere(followed: RunFollower) -> tuple[str, ...]:
    """Return one sentence for each host whose files are not on this host or cannot be read."""
    usual = f"{typed_command('python plots/watch.py')} --collect reads them by ssh"
    absent = (
        f"{host}: its records are not on this machine; {followed.troubles.get(host, usual)}"
        for host in hosts_elsewhere(followed)
    )
    return tuple(map(plain, (*absent, *followed.unread.values())))

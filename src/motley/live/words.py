"""Texts for the user on the state of a run: a headline, events and evaluations, a line each.

The texts contain no control characters.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from motley.live.follow import RunFollower, workers
from motley.live.track import Held, Waits, last_steps, mean_parts
from motley.records.json_files import JsonDict
from motley.records.training import EMA, EpochRecord
from motley.text import format_step

_LONGEST = 2000  # most characters of a text


def plain(text: object) -> str:
    """Return a text on one line, without control characters and Unicode marks of writing direction.

    None becomes an empty text.
    """
    message = "" if text is None else " ".join(str(text)[:_LONGEST].split())
    return "".join(each if each.isprintable() else "?" for each in message)


def part(share: float) -> str:
    """Return a fraction as a percentage, as in ``34 %``."""
    return f"{100 * share:.0f} %"


def mapping(about: Mapping[str, Any], name: str) -> JsonDict:
    """Return the object ``name`` in run.json; an empty object if it is missing."""
    result = about.get(name)
    return result if isinstance(result, dict) else {}


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl.

    Attributes:
        time: seconds since 1970; None: unknown.
        kind: kind of the event.
        text: description of the event for the user.
    """

    time: float | None
    kind: str
    text: str


def evaluation(lines: Sequence[JsonDict]) -> str:
    """Return a text on the last evaluation, such as ``top1 0.9722, loss 0.1021 (epoch 9)``."""
    if not lines:
        return ""
    parts = [f"{name} {value:.4g}" for name, value in _metrics(lines[-1]).items()]
    return plain(f"{', '.join(parts)} (epoch {lines[-1].get('epoch')})") if parts else ""


def metric_curves(lines: Sequence[JsonDict]) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return, for each metric by name, its pairs of step and value in some evaluations."""
    curves: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        step = line.get("step")
        if isinstance(step, int):
            for name, value in _metrics(line).items():
                curves[plain(name)].append((step, float(f"{value:.5g}")))
    return {name: tuple(points) for name, points in curves.items()}


def _metrics(line: JsonDict) -> dict[str, float]:
    """Return the metrics of an evaluation, except metrics of averaged parameters."""
    return {
        name: value for name, value in EpochRecord.read_metrics(line).items()
        if isinstance(value, int | float) and not name.startswith(EMA)
    }  # fmt: skip


_SAID = {
    "overflow": (
        "step {step} was skipped: its gradient is not finite at the loss scale {loss_scale}"
    ),
    "loss_scale": "the loss scale is {value} from step {step} on",
    "left_out": "rank {rank} on {host} is left out: {reason}",
    "fault": "rank {rank} on {host}, step {step}: {error}",
    "lost": "rank {rank} on {host} was lost in step {step}; the other ranks continue",
    "silent": "rank {rank} on {host} sends no heartbeats",
    "heard_again": "rank {rank} on {host} sends heartbeats again",
    "waited_for": "all other ranks wait for rank {rank} on {host}, which is {doing}",
    "unreadable": "{sample} cannot be read",
    "finished": "after {steps} steps",
}


def event(line: JsonDict) -> Event:
    """Return the event in a line of events.jsonl, with its description."""
    kind, when = str(line["event"]), line.get("time")
    text = line.get("text")
    if not isinstance(text, str):
        known = {name: "?" if value is None else value for name, value in line.items()}
        if isinstance(step := line.get("step"), int):
            known["step"] = step + 1  # counted from 1 for the user
        text = _SAID.get(kind, "").format_map(_EventFields(known))
    return Event(when if isinstance(when, int | float) else None, plain(kind), plain(text))


class _EventFields(dict[str, Any]):
    """The fields of an event. A missing field reads as a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"


_STALL_S, _STALL_STEPS = 2.0, 5.0  # time without a step that is a stall: the longer of the two
_LATE_S, _LATE_SAMPLES = 1.0, 2.5  # delay of the GPU logger, also in its sampling intervals
_INTERVAL_S = 2.0  # interval of that logger if run.json has none
_FEW = 4  # silent parts that are named
_ALSO = 0.1  # fraction of a step from which a straggler is named as a further cause


class Mood(StrEnum):
    """The condition of a run."""

    STARTING = "starting"
    WELL = "well"
    WAITS = "waits"
    SILENT = "silent"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class Silence:
    """The ranks and hosts of a run whose records are overdue.

    Attributes:
        stalled_s: seconds since any rank wrote a step; None: this time is not unusually long for
            the run.
        hosts: for each silent host, the seconds since its GPU logger wrote.
        ranks: for each rank that lacks steps that other ranks have written, the seconds since the
            rank's last step.
        unreported: for each rank whose heartbeats are missing, the seconds since rank 0 last
            received a message from that rank.
    """

    stalled_s: float | None = None
    hosts: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, float] = field(default_factory=dict)
    unreported: Mapping[int, float] = field(default_factory=dict)

    def for_rank(self, rank: int, host: str) -> float | None:
        """Return the seconds for which a rank on a host has been silent, or None."""
        return self.unreported.get(rank) or self.hosts.get(host) or self.ranks.get(rank)


def silences(followed: RunFollower, ranks: Collection[int]) -> Silence:
    """Return the silent ranks and hosts of a run that has the status ``running``."""
    interval = mapping(followed.about, "config").get("gpu_log_interval")
    interval = interval if isinstance(interval, int | float) and interval > 0 else _INTERVAL_S
    late = _LATE_SAMPLES * interval + _LATE_S
    hosts = {
        host: silent for worker in workers(followed.about)
        if (silent := followed.host_silent_s(host := str(worker.get("host")))) and silent > late
    }  # fmt: skip
    lead, unreported = followed.lead(), followed.silence_s()
    if lead is None or lead.last is None:
        return Silence(None, hosts, unreported=unreported)
    usual = median(step.seconds for step in lead.recent)  # robust against single long steps
    stall, since = max(_STALL_S, _STALL_STEPS * usual), followed.silent_s()
    stalled = since > stall
    behind = {}
    for rank in ranks:
        track, silent = followed.tracks.get(rank), followed.rank_silent_s(rank)
        if track is None or track.last is None or silent is None:
            continue
        if silent - since > stall or (stalled and track.last.step < lead.last.step):
            behind[rank] = silent
    if 2 * len(behind) > len(followed.tracks):
        behind = {}  # if most ranks are behind, the leading rank is the exception
    return Silence(since if stalled else None, hosts, behind, unreported)


def headline(
    followed: RunFollower, waits: Waits | None, silence: Silence, wall: float
) -> tuple[Mood, str]:
    """Return the condition of a run, and a sentence about it."""
    status = followed.about.get("status")
    if not followed.about:
        return Mood.STARTING, "starting: there is no run.json yet"
    if status == "finished":
        result = mapping(followed.about, "result")
        steps = f" after {result['steps']} steps" if "steps" in result else ""
        text = evaluation(followed.evaluations)
        return Mood.DONE, plain(f"finished{steps}{': ' if text else ''}{text}")
    if status != "running":
        return Mood.FAILED, _ended(followed)
    if silence.hosts or silence.ranks or silence.unreported:
        return Mood.SILENT, _silent(followed, silence)
    if waits is None:
        return Mood.STARTING, "starting: no step is recorded yet"
    lasts = followed.silent_s()
    if waited := followed.waited_for():
        who, doing = name_rank(followed, waited["rank"]), plain(waited.get("doing"))
        return Mood.WAITS, f"waits for {who}, which is {doing}: no step for {lasts:.0f} s"
    if silence.stalled_s is not None:
        return Mood.WAITS, (
            f"no step for {lasts:.0f} s: an evaluation or a checkpoint is running, or all ranks "
            "wait for something that is not recorded"
        )
    return _waits(followed, waits)


def name_rank(followed: RunFollower, rank: int) -> str:
    """Return a rank's name for the user, such as ``ecetesla3 (rank 3)``."""
    for worker in workers(followed.about):
        if worker["rank"] == rank:
            return f"{plain(worker.get('host'))} (rank {rank})"
    return f"rank {rank}"


def _ended(followed: RunFollower) -> str:
    failure, status = mapping(followed.about, "failure"), plain(followed.about.get("status"))
    if not failure:
        return f"{status}: the run's process has ended; continue with --resume auto"
    rank, host, step = failure.get("rank"), failure.get("host"), failure.get("step")
    at = format_step(step if isinstance(step, int) else None)
    where = f"rank {rank} on {host}, {at}: " if host else ""
    return plain(f"{status}: {where}{failure.get('error')}")


def _silent(followed: RunFollower, silence: Silence) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for worker in workers(followed.about):
        ranks[str(worker.get("host"))].append(worker["rank"])
    parts = [
        f"{name_rank(followed, rank)} has been silent for {seconds:.0f} s"
        for rank, seconds in silence.unreported.items()
    ]
    named_hosts = {host for host, own in ranks.items() if silence.unreported.keys() & own}
    for host, seconds in silence.hosts.items():
        if host in named_hosts:
            continue
        first, last = ranks[host][0], ranks[host][-1]
        named = f"rank {first}" if first == last else f"ranks {first} to {last}"
        parts.append(f"{plain(host)} ({named}) has been silent for {seconds:.0f} s")
    if len(silence.hosts) == len(ranks) > 1:
        parts = [f"all hosts have been silent for {min(silence.hosts.values()):.0f} s"]
    hosts = {*silence.hosts} | named_hosts
    known = {rank for host in hosts for rank in ranks[host]}
    parts += [
        f"{name_rank(followed, rank)} has written no step for {seconds:.0f} s"
        for rank, seconds in silence.ranks.items() if rank not in known
    ]  # fmt: skip
    more = f", and {len(parts) - _FEW} more" if len(parts) > _FEW else ""
    stalled = silence.stalled_s
    waits = f"; no step for {stalled:.0f} s" if stalled is not None and hosts else ""
    return f"{', '.join(parts[:_FEW])}{more}{waits}"


def _waits(followed: RunFollower, waits: Waits) -> tuple[Mood, str]:
    share = f"{part(waits.share)} of each step"
    if waits.held is Held.RANK:
        if waits.rank is None:
            return Mood.WAITS, f"waits for a rank whose records are not on this machine: {share}"
        text = f"waits for {name_rank(followed, waits.rank)}: {share}"
        if waits.own_s is not None and waits.others_s is not None:
            why = ", most of it for its input" if waits.for_input else ""
            text += (
                f"; it is ready after {waits.own_s:.3g} s{why}, the others after "
                f"{waits.others_s:.3g} s"
            )
            if waits.usual_s is not None:
                text += f"; earlier, all ranks were ready after {waits.usual_s:.3g} s"
        return Mood.WAITS, text
    if waits.held is Held.WIRE:
        link = f"; {plain(followed.slow_link)}" if followed.slow_link else ""
        return Mood.WAITS, f"waits for the wire: {share}{_and_for(followed, waits)}{link}"
    if waits.held is Held.INPUT:
        also = _and_for(followed, waits)
        return Mood.WAITS, f"waits for its input: {share}{_where_input(followed)}{also}"
    if waits.held is Held.OPTIMIZER:
        return Mood.WELL, f"no rank waits, and the optimizer takes {share}"
    if waits.held is Held.HOST:
        return Mood.WAITS, f"waits for the host: Python takes {share}"
    if waits.held is Held.NOTHING:
        return Mood.WELL, f"no rank waits: compute is {share}"
    return Mood.WELL, "this engine cannot tell compute from waiting"


def _and_for(followed: RunFollower, waits: Waits) -> str:
    """Return a phrase that names the straggler as a second cause of waiting; may be empty.

    A slow host also makes communication slow.
    """
    ranks = {rank: share for rank, share in waits.by_rank.items() if rank is not None}
    most = max(ranks, key=lambda rank: ranks[rank], default=None)
    if most is None or ranks[most] < _ALSO:
        return ""
    return f", and for {name_rank(followed, most)}: {part(ranks[most])}"


def _where_input(followed: RunFollower) -> str:
    """Return a phrase that names the rank that waits longest for its samples; may be empty."""
    trains = {worker["rank"] for worker in workers(followed.about)}
    input_s = {
        rank: mean_parts(last_steps(track))[0] or 0.0
        for rank, track in followed.tracks.items()
        # Other tracks are of lost ranks, or of an earlier job.
        if track.last and (rank in trains or not trains)
    }
    if len(input_s) < 2:
        return ""
    most = max(input_s, key=lambda rank: input_s[rank])
    return f"; {name_rank(followed, most)} waits longest, {input_s[most]:.3g} s"

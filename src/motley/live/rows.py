"""One row a rank: what it computes, on what, and how its steps go. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.live.follow import RunFollower, workers
from motley.live.headline import Silence
from motley.live.track import Step, mean_parts
from motley.live.waiting import Waits, last_steps
from motley.live.words import mapping, plain
from motley.records.gpu_csv import GpuSample, device_name


@dataclass(frozen=True)
class Row:
    """One rank. None and empty: unknown.

    Attributes:
        share: of the global batch. samples: that it takes of the last one.
        rate: what it computes, in the task's unit a second.
        parts: of its last steps, mean seconds: input, compute, waiting, wire, optimizer, host.
        waited: part of each step in which the others wait for it.
        step: the last one that it has recorded here.
        load: 0 to 1; memory in MiB, temperature in degrees Celsius, power in watts.
        others: who else computes on its GPU, and with how much memory (GiB).
        silent_s: since it, or the logger of its host, should have written and has not.
        here: its own step records are here. note: why it is left out.
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
        """The larger the sooner it is to be seen: who is silent, then who is waited for, then who
        is slow."""
        return self.silent_s or 0.0, self.waited, sum(part or 0.0 for part in self.parts[:2])


def make_rows(followed: RunFollower, waits: Waits | None, silence: Silence) -> list[Row]:
    """One a rank that trains, ascending."""
    known = {worker["rank"]: worker for worker in workers(followed.about)}
    found = mapping(followed.about, "plan").get("counts")
    counts = [n for n in found if isinstance(n, int)] if isinstance(found, list) else []
    rows = []
    for rank in known or sorted(followed.tracks):
        worker = known.get(rank, {})
        host, track = str(worker.get("host") or ""), followed.tracks.get(rank)
        steps = last_steps(track) if track and track.last else []
        sample = device_of(followed.devices.get(host, {}), rank, worker)
        told = [step for step in steps if step.n_local is not None and step.n_global]
        samples = told[-1].n_local if told else planned(counts, worker)
        whole, part = sum(step.n_global for step in told), sum(step.n_local or 0 for step in told)
        if not told:
            whole, part = sum(counts), samples or 0
        seconds = sum(step.seconds for step in told)
        own = part / seconds if seconds else None
        rows.append(Row(
            rank, plain(host), device_name(plain(worker.get("device"))),
            plain(worker.get("precision")),
            part / whole if whole and samples is not None else None, samples,
            own and own * weight_of(told),
            mean_parts(steps) if steps else told_of(rank, waits),
            waits.by_rank.get(rank, 0.0) if waits else 0.0,
            track.last.step if track and track.last else None,
            silent_s=silence.of(rank, host), here=rank in followed.tracks, **of_device(sample),
        ))  # fmt: skip
    return rows


def told_of(rank: int, waits: Waits | None) -> tuple[float | None, ...]:
    """What the first of many ranks tells of the one that is waited for."""
    if waits is None or waits.rank != rank or waits.own_s is None:
        return ()
    return None, waits.own_s, 0.0, None, None


def planned(counts: Sequence[int], worker: Mapping[str, Any]) -> int | None:
    """Samples of a rank by the plan."""
    place = worker.get("group_rank")
    return counts[place] if isinstance(place, int) and 0 <= place < len(counts) else None


def device_of(
    devices: Mapping[str, deque[GpuSample]], rank: int, worker: Mapping[str, Any]
) -> GpuSample | None:
    """The last sample of the device that a rank computes on."""
    last = [samples[-1] for samples in devices.values()]
    uuid = worker.get("uuid")
    if uuid:
        return next((sample for sample in last if sample.uuid == uuid), None)
    mine = [sample for sample in last if sample.rank == rank]
    return next(iter([*mine, *(sample for sample in last if sample.gpu is None)]), None)


def of_device(sample: GpuSample | None) -> dict[str, Any]:
    """What a row has of its device."""
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
    """Ranks that were launched and do not train."""
    found = about.get("left_out")
    return [
        Row(int(each["rank"]), plain(each.get("host")), "", "",
            note=f"left out: {plain(each.get('reason'))}")
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict) and isinstance(each.get("rank"), int)
    ]  # fmt: skip


def choose(rows: Sequence[Row], most: int) -> list[Row]:
    """Those that matter most, in order of rank: silent ones, who is waited for, the slowest."""
    if len(rows) <= most:
        return sorted(rows, key=lambda row: row.rank)

    def weight(row: Row) -> tuple[float, ...]:
        return *row.urgency, row.here, -row.rank

    return sorted(sorted(rows, key=weight, reverse=True)[:most], key=lambda row: row.rank)


def weight_of(steps: Sequence[Step]) -> float:
    """Of a sample, in the task's unit; 1 where it is not told."""
    told = [step for step in steps if step.weight is not None and step.n_global]
    samples = sum(step.n_global for step in told)
    return sum(step.weight or 0.0 for step in told) / samples if samples else 1.0

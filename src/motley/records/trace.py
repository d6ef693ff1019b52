"""The trace of a rank's profiled steps: ``trace.rank<k>.json.gz``, for Perfetto and Chrome.

    {"baseTimeNanoseconds": 1763693554000000000, "displayTimeUnit": "ms",
     "motley": {"rank": 1, "host": "b", "clock_offset_s": -0.0012, "clock_error_s": 0.0001},
     "traceEvents": [{"ph": "X", "name": "step 20", "pid": 2000, "tid": 2999, "ts": 812.4,
                      "dur": 9310.5, "cat": "user_annotation", "args": {"thread": 4711}}, ...]}

``ts`` and ``dur`` are in microseconds. ``ts`` counts from ``baseTimeNanoseconds``, which all traces
of a profile share. The times are corrected for differences between the ranks' clocks, so that
traces can be shown together. An event is a step, a phase of a step (``forward``, ``all-reduce``,
...), or an event of torch's profiler.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.faults import Phase

Event = dict[str, Any]
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of events on a GPU
_WIRE = ("gloo:", "nccl", "rccl")  # prefixes of names of communication events
_STEP = "step "  # prefix of a step's name, before its number
_PHASES = {phase.key for phase in Phase}
_PIDS = 1000  # size of each rank's range of process and device numbers
_FLOWS = 10**9  # size of each rank's range of flow numbers
_THREAD = "thread"  # argument with the thread of a step or phase


@dataclass(frozen=True)
class TraceClock:
    """The correction of a rank's clock to the clock of the first rank.

    Attributes:
        offset_s: the rank's clock minus that of the first rank, seconds.
        error_s: largest error of the offset, seconds.
    """

    offset_s: float
    error_s: float


@dataclass(frozen=True)
class TraceSummary:
    """The time of one rank's profiled steps by activity.

    Attributes:
        steps: number of steps.
        seconds: time from the start of the first step to the end of the last.
        on_gpu: True if the rank computes on a GPU.
        busiest: name, seconds and number of calls of each of the GPU's kernels, the longest time
            first. Without a GPU: the same values of operators. The time of an operator excludes
            operators that it calls.
        wire: fraction of the time in which data was sent.
        waited: fraction of the time in which the rank only waited for communication. With a GPU,
            this is communication while the GPU ran no other kernel. Without a GPU, this is the
            phase of the all-reduce.
        idle: fraction of the time in which the GPU was idle. Without a GPU: fraction of the time in
            which no operator ran.
    """

    rank: int
    host: str
    steps: int
    seconds: float
    on_gpu: bool
    busiest: tuple[tuple[str, float, int], ...]
    wire: float
    waited: float
    idle: float


def step_span_name(step: int) -> str:
    """Return the name of a step's event in a trace. The name counts steps from 1."""
    return f"{_STEP}{step + 1}"


def write_trace(
    path: Path, profiled: Mapping[str, Any], rank: int, host: str, clock: TraceClock, base_ns: int
) -> None:
    """Write the export of torch's profiler as the trace of one rank, on the first rank's clock.

    Args:
        path: path of the trace.
        profiled: the profiler's export.
        rank: number of the rank.
        host: host of the rank.
        clock: offset and error of this rank's clock.
        base_ns: origin of the written times, in nanoseconds of the first rank's clock.
    """
    shift_us = (profiled.get("baseTimeNanoseconds", 0) - base_ns) / 1000 - clock.offset_s * 1e6
    pids: dict[Any, int] = {}
    flows: dict[Any, int] = {}
    lane = _PIDS * (rank + 2) - 1
    events: list[Event] = []
    for event in profiled["traceEvents"]:
        if _is_of_profiler(event):
            continue
        pid = pids.setdefault(event.get("pid"), _PIDS * (rank + 1) + len(pids))
        changes: Event = {"pid": pid}
        if "ts" in event:
            changes["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:  # unique over ranks, and a number, as Perfetto accepts no text
            changes["id"] = flows.setdefault(event["id"], _FLOWS * (rank + 1) + len(flows))
        if event.get("name") == "process_name":
            changes["args"] = {"name": f"rank {rank} on {host}"}
        elif event.get("name") == "process_sort_index":
            changes["args"] = {"sort_index": pid}
        elif _is_ours(event):
            changes |= {"tid": lane, "args": {_THREAD: event["tid"]}}
        events.append({**event, **changes})
    for pid in {event["pid"] for event in events if event.get("tid") == lane}:
        events += _named_lane(pid, lane)
    about = {
        "rank": rank, "host": host,
        "clock_offset_s": clock.offset_s, "clock_error_s": clock.error_s,
    }  # fmt: skip
    _write(path, [about], base_ns, events)


def _named_lane(pid: int, lane: int) -> list[Event]:
    """Return the trace events that name a lane of the display and place it above other lanes."""
    about = {"thread_name": {"name": "steps and phases"}, "thread_sort_index": {"sort_index": -1}}
    return [
        {"ph": "M", "pid": pid, "tid": lane, "name": name, "args": value}
        for name, value in about.items()
    ]


def _is_of_profiler(event: Event) -> bool:
    """Return True for an event of the profiler itself."""
    return (
        event.get("cat") == "Trace"
        or event.get("pid") in ("Spans", "Traces")
        or (event.get("ph") == "i" and event.get("s") == "g")
    )


def _is_ours(event: Event) -> bool:
    """Return True if an event is a step, or a phase of a step.

    Phases have a separate lane of the display. A phase may start or end within an operator: DDP
    runs the all-reduce within the last operator of the backward pass. On one lane, Perfetto would
    leave out a phase that overlaps an operator in part.
    """
    name = event.get("name", "")
    return event.get("cat") == "user_annotation" and (name.startswith(_STEP) or name in _PHASES)


def merge_traces(traces: Sequence[Mapping[str, Any]], into: Path) -> None:
    """Write all traces of one profile into one file.

    Raises:
        MotleyError: the traces belong to several profiles.
    """
    bases = {trace["baseTimeNanoseconds"] for trace in traces}
    if len(bases) > 1:
        raise MotleyError(
            f"the traces in {into.parent} are from several profiles; remove those of older "
            "profiles, and try again"
        )
    events = [event for trace in traces for event in trace["traceEvents"]]
    _write(into, [each for trace in traces for each in trace["motley"]], bases.pop(), events)


def read_trace(path: Path) -> dict[str, Any]:
    """Return the content of a trace that Motley has written.

    Raises:
        MotleyError: the file is damaged, or Motley has not written it.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        if not content["traceEvents"] or not content["motley"]:
            raise ValueError("nothing in it")
        if not isinstance(content["baseTimeNanoseconds"], int):
            raise ValueError("no time")
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MotleyError(
            f"{path} is damaged, or is not a trace that Motley wrote: {error}"
        ) from None
    result: dict[str, Any] = content
    return result


def _write(path: Path, about: list[Event], base_ns: int, events: list[Event]) -> None:
    content = {
        "baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms", "motley": about,
        "traceEvents": events,
    }  # fmt: skip
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(content, file)


# -- summary

Span = tuple[float, float]  # start and end, microseconds


def summarise(trace: Mapping[str, Any], most: int = 5) -> TraceSummary:
    """Return a summary of the time in the trace of one rank.

    Args:
        trace: the trace.
        most: largest number of kernels or operators in the summary.

    Raises:
        MotleyError: the trace has no complete step.
    """
    about, *_ = trace["motley"]
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    notes = [event for event in spans if event.get("cat") == "user_annotation"]
    steps = [event for event in notes if event["name"].startswith(_STEP)]
    if not steps:
        raise MotleyError(f"the trace of rank {about['rank']} has no complete step")
    whole = (min(_span(each)[0] for each in steps), max(_span(each)[1] for each in steps))
    device = [event for event in spans if event.get("cat") in _DEVICE]
    wire = [event for event in device or notes if event["name"].startswith(_WIRE)]
    threads = {event["args"][_THREAD] for event in steps}
    own = [e for e in spans if e.get("cat") == "cpu_op" and e["tid"] in threads]
    total = whole[1] - whole[0]
    return TraceSummary(
        about["rank"], about["host"], len(steps), total / 1e6, bool(device),
        _busiest(device, most) if device else _busiest(own, most),
        _covered(wire, whole) / total,
        _waited(device, notes, whole) / total,
        1 - _covered(device or own, whole) / total,
    )  # fmt: skip


def _waited(device: Sequence[Event], notes: Sequence[Event], whole: Span) -> float:
    """Return the microseconds in which a rank only waited for communication.

    With a GPU, the phase of the all-reduce does not count, because the GPU may still compute in it.
    """
    if not device:
        waits = [event for event in notes if event["name"] == Phase.ALL_REDUCE.key]
        return _covered(waits, whole)
    computes = [event for event in device if not event["name"].startswith(_WIRE)]
    return _covered(device, whole) - _covered(computes, whole)


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0.0)


def _covered(events: Iterable[Event], whole: Span) -> float:
    """Return the microseconds of ``whole`` that at least one of the events covers."""
    covered, reached = 0.0, whole[0]
    for begin, end in sorted(map(_span, events)):
        begin, end = max(begin, reached), min(end, whole[1])
        covered += max(0.0, end - begin)
        reached = max(reached, end)
    return covered


def _busiest(events: Iterable[Event], most: int) -> tuple[tuple[str, float, int], ...]:
    """Return the name, time and number of calls of the events with the longest total time.

    The time of an event within another event on the same thread or stream counts for the inner
    event alone.
    """
    took: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, seconds in _own_times(events):
        took[name] += seconds
        calls[name] += 1
    first = sorted(took, key=lambda name: -took[name])[:most]
    return tuple((name, took[name], calls[name]) for name in first)


def _own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yield each event's name, and its time without the time of the events inside it."""
    lanes: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        lanes[event.get("pid"), event.get("tid")].append(event)
    for lane in lanes.values():
        open_spans: list[tuple[float, str, list[float]]] = []  # end, name, own time
        for event in sorted(lane, key=lambda each: (each["ts"], -each.get("dur", 0.0))):
            begin, end = _span(event)
            while open_spans and open_spans[-1][0] <= begin:
                _, name, own = open_spans.pop()
                yield name, own[0] / 1e6
            if open_spans:
                open_spans[-1][2][0] -= end - begin
            open_spans.append((end, event["name"], [end - begin]))
        yield from ((name, own[0] / 1e6) for _, name, own in open_spans)

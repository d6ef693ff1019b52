"""Traces: times of the first rank's clock, one file of several ranks, and where the time went."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from motley.errors import MotleyError
from motley.records.trace import (
    TraceClock,
    merge_traces,
    read_trace,
    step_span_name,
    summarise,
    write_trace,
)

BASE_NS = 1_763_693_554 * 10**9


def span(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 7) -> dict[str, Any]:
    """Microseconds."""
    return {"ph": "X", "name": name, "cat": cat, "pid": 99, "tid": tid, "ts": begin,
            "dur": end - begin}  # fmt: skip


def note(name: str, begin: float, end: float, tid: int = 7) -> dict[str, Any]:
    return span(name, begin, end, "user_annotation", tid)


CPU = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 99, "tid": 0, "args": {"name": "python"}},
    note(step_span_name(20), 0, 600),
    note(step_span_name(21), 600, 1000),
    note("all-reduce", 300, 400),
    note("gloo:all_reduce", 250, 400, tid=8),
    span("aten::linear", 0, 250), span("aten::mm", 50, 200), span("aten::mm", 600, 800),
    span("on another thread", 0, 900, tid=9),
    {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "id": 3, "pid": 99, "tid": 7, "ts": 60},
    {"ph": "X", "name": "PyTorch Profiler", "cat": "Trace", "pid": "Spans", "tid": 1, "ts": 0},
]  # fmt: skip
GPU = [
    note(step_span_name(20), 0, 1000), note("all-reduce", 500, 900),
    span("gemm", 0, 400, "kernel", 3), span("ncclDevKernel_AllReduce", 300, 700, "kernel", 4),
    span("gemm", 800, 900, "kernel", 3), span("Memcpy HtoD", 900, 950, "gpu_memcpy", 3),
]  # fmt: skip


def written(path: Path, events: list[dict[str, Any]], rank: int = 1, **clock: float) -> Path:
    known = TraceClock(**{"offset_s": 0.0, "error_s": 0.0, **clock})
    exported = {"baseTimeNanoseconds": BASE_NS - 2 * 10**9, "traceEvents": events}
    write_trace(path, exported, rank, "b", known, BASE_NS)
    return path


def test_times_are_those_of_the_first_ranks_clock(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.json.gz", CPU, offset_s=-2.5, error_s=0.1))
    first = next(e for e in trace["traceEvents"] if e["name"] == step_span_name(20))
    assert first["ts"] == 500_000  # 2 s before the base, by a clock that is 2.5 s late
    assert trace["motley"] == [
        {"rank": 1, "host": "b", "clock_offset_s": -2.5, "clock_error_s": 0.1}
    ]
    assert all(event["name"] != "PyTorch Profiler" for event in trace["traceEvents"])


def test_ranks_lie_in_one_file_and_are_told_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{rank}.json.gz", CPU, rank) for rank in (0, 3)]
    merge_traces(list(map(read_trace, paths)), tmp_path / "all.json.gz")
    trace = read_trace(tmp_path / "all.json.gz")
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0 on b", "rank 3 on b"]
    ids = [e["id"] for e in events if "id" in e]
    assert len(set(ids)) == 2 and all(type(each) is int for each in ids), "Perfetto takes no words"
    assert len(events) == 2 * (len(CPU) - 1 + 2)


def test_steps_and_phases_have_a_line_of_their_own(tmp_path: Path) -> None:
    """A viewer leaves out a span that begins in another one of the same thread and ends after it:
    DDP adds up within the last operator of the backward pass."""
    late = [*CPU, span("AccumulateGrad", 200, 350), note("backward", 100, 300)]
    events = read_trace(written(tmp_path / "t.json.gz", late))["traceEvents"]
    lanes = {e["tid"] for e in events if e["ph"] == "X" and e["name"] in ("all-reduce", "backward")}
    (lane,) = lanes | {e["tid"] for e in events if e["name"].startswith("step ")}
    assert {e["tid"] for e in events if e.get("cat") == "cpu_op"} == {7, 9}
    (name,) = [e for e in events if e["name"] == "thread_name"]
    assert (name["tid"], name["args"]["name"]) == (lane, "steps and phases")


def test_traces_of_two_profiles_are_not_put_together(tmp_path: Path) -> None:
    one, other = written(tmp_path / "0.json.gz", CPU), tmp_path / "1.json.gz"
    write_trace(other, {"traceEvents": CPU}, 1, "b", TraceClock(0, 0), BASE_NS + 10**9)
    with pytest.raises(MotleyError, match="several profiles"):
        merge_traces([read_trace(one), read_trace(other)], tmp_path / "all.json.gz")


def test_where_the_time_of_a_processor_went(tmp_path: Path) -> None:
    found = summarise(read_trace(written(tmp_path / "t.json.gz", CPU)))
    assert (found.rank, found.host, found.steps, found.on_gpu) == (1, "b", 2, False)
    assert found.seconds == pytest.approx(1e-3)
    assert [(name, calls) for name, _, calls in found.busiest] == [
        ("aten::mm", 2), ("aten::linear", 1)
    ]  # fmt: skip
    assert [seconds for _, seconds, _ in found.busiest] == pytest.approx([350e-6, 100e-6])
    assert (found.wire, found.waited) == pytest.approx((0.15, 0.1))
    assert found.idle == pytest.approx(0.55)


def test_where_the_time_of_a_gpu_went(tmp_path: Path) -> None:
    found = summarise(read_trace(written(tmp_path / "t.json.gz", GPU)))
    assert found.on_gpu and found.busiest[0][0] == "gemm" and found.busiest[0][2] == 2
    assert (found.wire, found.waited) == pytest.approx((0.4, 0.3))
    assert found.idle == pytest.approx(0.15)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": []}', b"\xff" * 9])
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.rank0.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(MotleyError, match="damaged"):
        read_trace(path)
    path.write_bytes(content)
    with pytest.raises(MotleyError, match="damaged"):
        read_trace(path)
    with pytest.raises(MotleyError, match="no complete step"):
        summarise(read_trace(written(path, CPU[:1])))

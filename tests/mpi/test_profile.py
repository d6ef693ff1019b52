"""``--profile``: traces of chosen ranks, in one picture, of a run that is the same without it."""

import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
from jobs import Jobs
from project import DDP, ROOT

from motley.records.run_folder import RunFolder
from motley.records.trace import read_trace, summarise

pytestmark = pytest.mark.mpi

WORDS = ("--batch-size", 60, "--max-steps", 10, "--precision", "fp32", "--eval-samples", 20)
UNEQUAL = ("--shares", "1,4,1")


def crossing(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Spans of one thread of which the second begins within the first and ends after it."""
    found, threads = [], defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        within: list[tuple[float, str]] = []
        for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
            end = each["ts"] + each["dur"]
            while within and within[-1][0] <= each["ts"]:
                within.pop()
            if within and end > within[-1][0] + 0.01:  # microseconds: they are rounded
                found.append((within[-1][1], each["name"]))
            within.append((end, each["name"]))
    return found


def test_all_ranks_lie_in_one_picture_and_nothing_else_changes(jobs: Jobs) -> None:
    plain = jobs.train(3, DDP, "plain", *WORDS, *UNEQUAL)
    run = jobs.train(
        3, DDP, "profiled", *WORDS, *UNEQUAL, "--profile", "4:7", "--profile-ranks", "all"
    )
    assert run.losses == plain.losses
    assert "profiled steps 5 to 7 of ranks 0, 1, 2" in run.done.output
    assert "profiler_start" not in run.done.output
    said = subprocess.run(
        [sys.executable, "plots/traces.py", run.folder], cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "rank 1 on" in said.stdout and "aten::" in said.stdout
    folder = RunFolder(run.folder)
    for rank, path in enumerate(folder.traces()):
        found = summarise(read_trace(path))
        assert (found.rank, found.steps) == (rank, 3)
        assert 0 < found.wire < 1 and 0 < found.idle < 1
    events = read_trace(folder.trace_of_all())["traceEvents"]
    assert not crossing(events), "a viewer leaves out the second"
    waits = defaultdict(list)  # by rank, in which each waits for the others
    for event in events:
        if event["ph"] == "X" and event["name"] == "all-reduce":
            waits[event["pid"] // 1000].append((event["ts"], event["ts"] + event["dur"]))
    # The gradient's and that of each rank's numbers, in each of three steps.
    assert [len(each) for each in waits.values()] == [6, 6, 6]
    for together in zip(*map(sorted, waits.values()), strict=True):
        assert max(begin for begin, _ in together) < min(end for _, end in together)


def test_the_slowest_is_profiled_and_its_steps_move_no_shares(jobs: Jobs) -> None:
    words = ("--batch-size", 12, *WORDS[2:], *UNEQUAL, "--profile", "6:40")
    run = jobs.train(3, "tests/support/drivers/paced.py", "slowest", *words)
    assert [path.name for path in RunFolder(run.folder).traces()] == ["trace.rank1.json.gz"]
    assert "of rank 1, the slowest" in run.done.output
    (event,) = [event for event in run.events if event["event"] == "profile"]
    assert event["ranks"] == [1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--profile", "10:12"), "the run ends with step 10"),
        (
            ("--profile", "2:4", "--profile-ranks", "0,7"),
            "--profile-ranks 7: these ranks do not train; the ranks that train are",
        ),
    ],
)
def test_what_there_is_not_is_said_before_training(
    jobs: Jobs, words: tuple[str, ...], says: str
) -> None:
    done = jobs.fork(2, DDP, "--logs", jobs.logs, "--run", "no", *WORDS, *words)
    assert done.code != 0 and says in done.output, done.output
    assert "step 1/" not in done.output and "Traceback" not in done.output


def test_a_run_without_a_trace_is_said(jobs: Jobs) -> None:
    run = jobs.train(1, DDP, "none", *WORDS[:3], 2, *WORDS[4:])
    said = subprocess.run(
        [sys.executable, "plots/traces.py", run.folder], cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == 2 and "--profile" in said.stderr

"""A real run is followed while it goes on, as plots/watch.py does, and is not changed by that."""

import threading
import time

import pytest
from jobs import Jobs

from motley.live.runs import Runs
from motley.live.snapshot import Snapshot
from motley.live.words import Mood

pytestmark = pytest.mark.mpi


def test_a_run_is_seen_as_it_goes_on_and_who_it_waits_for(jobs: Jobs) -> None:
    # Nine times 20 ms, and 20 ms: whatever the machine is.
    options = ("tests/support/drivers/paced.py", "--logs", jobs.logs, "--run", "seen",
               "--shares", "9,1", "--batch-size", 10, "--max-steps", 40, "--precision", "fp32",
               "--gpu-log-interval", 0.5)  # fmt: skip
    jobs.logs.mkdir()
    ended = []
    job = threading.Thread(target=lambda: ended.append(jobs.fork(2, *options)))
    job.start()
    runs, seen = Runs(jobs.logs), list[Snapshot]()
    while job.is_alive():
        runs.look(time.monotonic(), time.time())
        if now := runs.snapshot("seen", time.time()):
            seen.append(now)
        time.sleep(0.25)
    runs.look(time.monotonic(), time.time())
    assert ended[0].code == 0, ended[0].output
    assert [now.step for now in seen] == sorted(now.step for now in seen)
    # Each step once: a slow machine evaluates for longer than it trains, and waits for that then.
    steps = {now.step: now for now in reversed(seen) if now.status == "running" and now.step > 10}
    running = [*reversed(steps.values())]
    assert len(running) > 3
    waits = [now for now in running if "(rank 0): " in now.headline and now.mood is Mood.WAITS]
    assert len(waits) > len(running) / 2, [now.headline for now in running]
    now = waits[-1]
    assert now.last_step == 40 and now.left_s is not None and now.rate and now.loss
    slow, other = now.rows
    assert now.headline.startswith(f"waits for {slow.host} (rank 0): "), now.headline
    assert slow.waited > 0.3 and other.waited < 0.1 and slow.share == pytest.approx(0.9, abs=0.01)
    assert all(row.load is not None and row.memory_mib and row.step for row in now.rows)
    last = runs.snapshot("seen", time.time())
    assert last is not None and last.mood is Mood.DONE and last.step == 40
    assert last.headline.startswith("finished after 40 steps: top1 0.")

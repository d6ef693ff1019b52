"""Who a run waits for, as its records say it."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_runs import LAB, LiveRun

from motley.live.follow import RunFollower
from motley.live.snapshot import Snapshot, take_snapshot
from motley.live.track import Step, waited_for
from motley.live.words import Mood

LINK = {
    "flows": [
        {"from": a, "to": b, "bytes_per_s": 118e6 if "tesla3" in (a, b) else 1.18e9,
         "latency_s": 1e-4, "error": ""}
        for a in LAB for b in LAB if a != b
    ],
    "ports": [],
}  # fmt: skip


def watched(live: LiveRun, silent_s: float = 0.0) -> Snapshot:
    """As it is seen so many seconds after its last record."""
    followed = RunFollower(live.run)
    followed.look(0.0, 0.0)
    followed.clock = silent_s
    return take_snapshot(followed, live.now + silent_s)


def test_a_host_that_becomes_slow_is_named_after_three_seconds_of_records(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(60):
        live.take_step()
    live.take_samples(others="alice")
    now = watched(live)
    assert now.mood is Mood.WELL and now.headline.startswith("no rank waits: compute is 9")
    assert now.rate == pytest.approx(100 / 0.108, rel=0.01)
    assert now.fraction == pytest.approx(0.1 / 0.108, rel=0.01)
    assert now.left_s == pytest.approx(140 * 0.108, rel=0.02)
    row = now.rows[3]
    assert (row.host, row.device, row.precision, row.share) == ("tesla3", "RTX 3070", "bf16", 0.2)
    assert (row.load, row.temperature_c, row.others) == (0.93, 64, "alice 0.6G")
    changed = live.now
    while live.now < changed + 2.5:
        live.take_step(slow={3: 2.0})
    now = watched(live)
    assert now.mood is Mood.WAITS
    assert now.headline.startswith("waits for tesla3 (rank 3): 4")
    assert now.headline.endswith("s, the others after 0.101 s")
    assert now.rows[3].waited > 0.4 and now.rows[0].waited == 0
    live.close()


def test_the_wire_is_waited_for_and_its_slow_link_is_named(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", links=LINK)
    for _ in range(10):
        live.take_step(comm_s=0.1)
    now = watched(live)
    assert now.headline.startswith(
        "waits for the wire: 49 % of each step; tesla3's link carries 118 MB/s, the others' 1.18"
    )
    live.close()


def test_a_rank_that_the_first_does_not_hear_is_named_until_it_is_heard(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    live.take_step()
    followed = RunFollower(live.run)

    def look() -> Snapshot:
        followed.look(0.0, time.time())
        return take_snapshot(followed, time.time())

    for rank in (3, 1):
        live.run.event("silent", rank=rank, host=f"tesla{rank}", step=2, seconds=1002.5)
    now = look()
    assert now.mood == Mood.SILENT and now.rows[3].silent_s == pytest.approx(1002.5, abs=1)
    said = r"(tesla(3|1) \(rank \2\) has been silent for 100[23] s(, )?){2}$"
    assert re.match(said, now.headline), now.headline
    assert now.events[-1].text == "rank 1 on tesla1 sends no heartbeats"
    live.run.event("heard_again", rank=1, host="tesla1")
    live.run.event("lost", rank=3, host="tesla3", step=3)
    assert look().mood != Mood.SILENT


def test_who_keeps_all_others_from_a_step_is_named_before_it_is_taken(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(3):
        live.take_step()
    followed = RunFollower(live.run)
    followed.look(0.0, live.now)
    live.run.event("waited_for", rank=2, host="tesla2", step=3, seconds=1.2, doing="computing")
    followed.look(1.2, live.now)
    now = take_snapshot(followed, live.now)
    said = r"waits for tesla2 \(rank 2\), which is computing: no step for [12] s"
    assert now.mood is Mood.WAITS and re.fullmatch(said, now.headline), now.headline
    assert now.events[-1].text == "all other ranks wait for rank 2 on tesla2, which is computing"
    live.run.event("resume", step=1)  # of another job, which has not taken that step yet
    followed.look(1.4, live.now)
    assert "computing: no step" not in take_snapshot(followed, live.now).headline
    live.run.event("waited_for", rank=2, host="tesla2", step=3, seconds=1.2, doing="computing")
    live.take_step()
    followed.look(1.6, live.now)
    assert "no step" not in take_snapshot(followed, live.now).headline
    live.close()


def test_hosts_that_fall_silent_are_named(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(10):
        live.take_step()
    live.take_samples()
    followed = RunFollower(live.run)
    followed.look(0.0, 0.0)
    live.take_step(silent=(3,))
    for second in range(1, 12):  # tesla3 is cut off; the others' loggers go on
        live.now += 1
        if second % 2 == 0:
            live.take_samples(silent=("tesla3",))
        followed.look(float(second), 0.0)
        now = take_snapshot(followed, live.now)
        if second == 4:  # a step should have come, and rank 3 alone has not ended its part
            assert now.headline == "tesla3 (rank 3) has written no step for 4 s"
    assert now.mood is Mood.SILENT
    assert now.headline == "tesla3 (rank 3) has been silent for 11 s; no step for 10 s"
    assert now.rows[3].silent_s == 11 and now.rows[2].silent_s is None
    live.close()


def test_last_words_of_one_rank_blame_none_of_the_others(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:3], samples_s=30.0)
    for _ in range(10):
        live.take_step()
    live.take_samples()
    live.take_step(silent=(1, 2))
    now = watched(live, 4.0)
    assert now.headline.startswith("no step for 4 s") and now.rows[1].silent_s is None
    live.close()


def test_a_slow_host_is_named_besides_a_slower_wire(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(10):
        live.take_step(slow={3: 2.0}, comm_s=0.3)
    assert watched(live).headline.startswith(
        "waits for the wire: 60 % of each step, and for tesla3 (rank 3): 20 %"
    )
    live.take_step(n_global=7, n_local=1)  # the last batch of an epoch
    for rank in (3, 4):  # and the share of one whose records are not here is the plan's
        live.run.step_file(rank).unlink()
    assert watched(live).rows[4].share == 0.2
    live.close()


@pytest.mark.parametrize(("seconds", "steps"), [(0.15, 2), (0.3, 1)])
@pytest.mark.parametrize("writes", [True, False])
def test_a_host_that_has_become_slower_is_named_at_once_and_before_the_wire(
    tmp_path: Path, seconds: float, steps: int, writes: bool
) -> None:
    live = LiveRun(tmp_path / "run", compute_s=0.01)
    for _ in range(20):
        live.take_step(comm_s=0.02)
    live.take_step(slow=dict.fromkeys(range(5), 50.0), comm_s=1.0)  # no rank alone
    assert watched(live).headline.startswith("waits for the wire: ")
    live.take_step(slow={1: 8.0})  # once is nothing, if it is short
    live.take_step(comm_s=0.02)
    assert watched(live).headline.startswith("waits for the wire: ")
    for _ in range(steps):  # it sends slowly too
        live.take_step(slow={3: seconds / 0.01}, comm_s=2 * seconds, silent=[] if writes else [3])
    assert watched(live).headline == (
        f"waits for tesla3 (rank 3): {31 if seconds < 0.2 else 32} % of each step; it is ready "
        f"after {seconds + 0.001:.3g} s, the others after 0.011 s; earlier, all ranks "
        "were ready after 0.011 s"
    )
    live.close()


def test_a_pause_of_all_is_said_and_blamed_on_nobody(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", config={"gpu_log_interval": 60})
    assert watched(live).headline == "starting: no step is recorded yet"
    for _ in range(10):
        live.take_step()
    live.take_step(slow={0: 60})  # one that takes long makes nobody wait longer for the next
    for _ in range(3):
        live.take_step()
    live.take_samples()
    assert not watched(live, 2.0).headline.startswith("no step")
    now = watched(live, 8.0)
    assert now.headline.startswith("no step for 8 s: an evaluation or a checkpoint is running, or")
    live.close()


def test_of_a_thousand_ranks_those_that_matter_are_shown(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", [f"node{rank // 8}" for rank in range(1000)])
    for _ in range(30):
        live.take_step(slow={700: 1.6})
    live.take_samples()
    begin = time.process_time()
    now = watched(live)
    assert time.process_time() - begin < 5
    assert now.headline.startswith("waits for node87 (rank 700): 36 % of each step; it is ready")
    assert len(now.rows) == 64 and now.hidden == 936
    assert 700 in [row.rank for row in now.rows] and now.rows[0].rank == 0
    live.close()


def test_how_it_ended_is_said(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    live.take_step()
    with live.run.epochs() as lines:
        lines.write({"step": 1, "epoch": 0, "samples": 360, "seconds": 1.0, "time": 1.0,
                     "top1": 0.9722, "loss": 0.1})  # fmt: skip
    failure = {"rank": 3, "host": "tesla3", "step": 17, "error": "out of memory"}
    for changes, mood, said in (
        ({"status": "failed", "failure": failure}, Mood.FAILED,
         "failed: rank 3 on tesla3, step 18: out of memory"),
        ({"status": "finished", "result": {"steps": 200}}, Mood.DONE,
         "finished after 200 steps: top1 0.9722, loss 0.1 (epoch 0)"),
    ):  # fmt: skip
        live.run.update_run(**changes)
        now = watched(live)
        assert (now.mood, now.headline, now.left_s) == (mood, said, None)
    live.run.update_run(status="running", failure=None)
    live.close()  # and so nobody holds its lock
    assert watched(live).headline.startswith("stopped: the run's process has ended")


def test_a_clock_that_jumps_changes_neither_rates_nor_the_end(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for step in range(40):
        live.now += {20: -7200.0, 30: 90_000.0}.get(step, 0.0)
        live.take_step(slow={3: 2.0})
    now = watched(live)
    assert now.left_s == pytest.approx(160 * 0.208, rel=0.05)
    assert now.rate == pytest.approx(100 / 0.208, rel=0.01) and "tesla3" in now.headline
    assert now.elapsed_s is not None and now.elapsed_s >= 0
    live.close()


def test_hosts_whose_files_are_elsewhere_are_said_with_what_reads_them(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(10):
        live.take_step(slow={4: 2.0})
    for rank in (3, 4):
        live.run.step_file(rank).unlink()
        live.run.gpu_file(LAB[rank]).unlink()
    now = watched(live)
    assert [said.partition(":")[0] for said in now.elsewhere] == ["tesla3", "tesla4"]
    assert "--collect" in now.elsewhere[0] and not now.rows[4].here
    assert (
        now.headline == "waits for a rank whose records are not on this machine: 48 % of each step"
    )
    live.close()


HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J\n\u202egnp"


def test_names_from_records_move_no_cursor(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:2], task={"title": HOSTILE, "unit": HOSTILE})
    ranks: list[dict[str, Any]] = [{"rank": rank, "host": HOSTILE} for rank in (0, 1)]
    live.run.update_run(ranks=ranks, left_out=[{"rank": 2, "host": HOSTILE, "reason": HOSTILE}])
    live.take_step(slow={1: 3.0})
    live.run.event("replan", text=HOSTILE)
    now = watched(live)
    said = [now.title, now.unit, now.headline, now.rows[0].host, now.rows[2].note,
            now.events[-1].text]  # fmt: skip
    assert all(text.isprintable() and "<img" in text for text in said)
    live.close()


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=9))
def test_who_was_ready_last_is_waited_for(compute: list[float]) -> None:
    last = max(compute)
    lines = {
        rank: Step(0, 0, None, None, None, 1, 1, None, None, 0.0,
                   (0.0, seconds, last - seconds, 0.0, 0.0))
        for rank, seconds in enumerate(compute)
    }  # fmt: skip
    who, seconds = waited_for(lines, range(len(compute)))
    assert who is not None and compute[who] == last
    others = [last - each for rank, each in enumerate(compute) if rank != who]
    assert seconds == pytest.approx(sum(others) / len(others))
    # And where it writes no records here, it is known from the others' waiting.
    if who is not None and min(others) > 0.1 * last and len(compute) > 2:
        del lines[who]
        assert waited_for(lines, range(len(compute)))[0] == who

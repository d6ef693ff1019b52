"""A run's records followed while they are written: only what is new, whatever is torn."""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_runs import LAB, LiveRun

from motley.live.follow import MOST, RunFollower, Tail
from motley.live.runs import Runs
from motley.live.snapshot import Snapshot, take_snapshot
from motley.records.run_folder import RunFolder

NOW = 1763693554.0


def seen(followed: RunFollower, rank: int | None = 0) -> Snapshot:
    return take_snapshot(followed, NOW, rank=rank)


def looked(folder: Path, clock: float = 0.0) -> RunFollower:
    followed = RunFollower(RunFolder(folder))
    followed.look(clock, 0.0)  # so early that nothing is silent
    return followed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All that a run of 3 ranks wrote, with what a crash leaves in the middle."""
    live = LiveRun(tmp_path_factory.mktemp("live") / "run", LAB[:3], now=NOW)
    for step in range(30):
        if step == 11:
            with (live.run.path / "steps.rank1.jsonl").open("a") as file:
                file.write('{"step": 11, "lo\n')
            with (live.run.path / "gpu.tesla1.csv").open("a") as file:
                file.write('2026-11-21 03:12:44.120,"0,2\n')
        live.take_step(slow={2: 1.5})
        live.take_samples(others="alice")
        live.run.event("overflow", step=step, loss_scale=2.0)
    live.take_step(loss=float("nan"))
    live.close()
    return {path.name: path.read_bytes() for path in live.run.path.iterdir() if path.is_file()}


@settings(max_examples=30)
@given(st.data())
def test_what_is_appended_in_any_pieces_is_seen_as_the_whole(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "run.json").write_bytes(files["run.json"])
    growing = sorted(set(files) - {"run.json", ".lock"})
    cuts = {
        name: [0, *sorted(data.draw(st.lists(st.integers(0, len(files[name])), max_size=4))),
               len(files[name])]
        for name in growing
    }  # fmt: skip
    followed = looked(folder)
    pieces = [(index, name, a, b) for name in growing for index, (a, b) in enumerate(pairwise(cuts[name]))]  # fmt: skip # noqa: E501
    for _, name, begin, end in sorted(pieces):
        with (folder / name).open("ab") as file:
            file.write(files[name][begin:end])
        followed.look(0.0, 0.0)
    assert seen(followed) == seen(looked(folder))
    assert seen(followed).step == 31 and seen(followed).rows[1].step == 30
    assert followed.devices["tesla1"]["1"][-1].others == "alice"


def bytes_read() -> int:
    """By this process, from files and pipes."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_a_look_reads_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    for _ in range(200):
        live.take_step()
    live.take_samples()
    followed = looked(live.run.path)
    asking = bytes_read()
    asking = bytes_read() - asking  # of the question itself
    paths = [path for path in live.run.path.iterdir() if path.is_file()]
    before, size = bytes_read(), sum(path.stat().st_size for path in paths)
    live.take_step()
    wrote = sum(path.stat().st_size for path in paths) - size
    own = bytes_read() - before - asking  # of the writers
    before = bytes_read()
    followed.look(1.0, NOW)
    assert bytes_read() - before - asking == wrote > 1000, own
    assert seen(followed).step == 201
    live.close()


def test_steps_that_a_resumed_run_takes_again_are_forgotten(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:2])
    for _ in range(40):
        live.take_step()
    followed = looked(live.run.path)
    assert seen(followed).step == 40
    for rank in (0, 1):
        live.run.drop_after(25, rank, [0, 1])
    followed.look(1.0, NOW)
    assert seen(followed).step == 25 and len(seen(followed).losses) == 25
    live.close()
    again = LiveRun(tmp_path / "run", LAB[1:3])
    again.step = 25
    again.take_step()
    followed.look(2.0, NOW)
    now = seen(followed)
    assert now.step == 26 and [row.host for row in now.rows] == ["tesla1", "tesla2"]
    assert {(event.kind, event.text) for event in now.events} == {
        ("back", "tesla2 trains"), ("left", "tesla0 has left")
    }  # fmt: skip
    again.close()


def test_of_a_long_run_the_end_is_read_and_samples_of_what_was_before(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:1])
    live.take_step()
    line = live.run.step_file(0).read_text()
    with live.run.step_file(0).open("a") as file:
        for step in range(1, 40_000):
            file.write(line.replace('"step": 0', f'"step": {step}'))
    assert live.run.step_file(0).stat().st_size > 50 * MOST
    tail = Tail(live.run.step_file(0))
    lines = [json.loads(each) for each in tail.look(0.0, NOW).lines]
    assert len(lines) < 2000
    now = seen(looked(live.run.path))
    assert now.step == 40_000 and now.losses[0][0] == 0 and len(now.losses) > 90
    live.close()


def test_a_run_of_an_older_version_and_one_without_its_run_json(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:2])
    for _ in range(5):
        live.take_step(weight=None, images_per_s=300.0)
    content = json.loads(live.run.run_file.read_text())
    for name in ("task", "last_step", "left_out", "links"):
        content.pop(name, None)
    live.run.run_file.write_text(json.dumps({**content, "plan": None}))
    now = seen(looked(live.run.path))
    assert now.title == "vit_digits on images" and now.unit == "images" and now.rate
    live.run.run_file.unlink()
    now = seen(looked(live.run.path))
    assert "no run.json yet" in now.headline and [row.rank for row in now.rows] == [0, 1]
    live.run.run_file.write_text('{"status": "runn')
    assert "run.json is damaged" in seen(looked(live.run.path)).problem
    live.close()


@pytest.mark.parametrize(
    "lines",
    [
        ['[1, 2]', '"text"', "17", "null", '{"step": "x"}', '{"step": 1e400, "time": 1}'],
        ['{"step": true, "time": 1}', '{"step": 3, "time": 1, "others_ready": "no"}'],
        ['{"event": 3}', '{"event": "replan", "time": "late"}', '{"event": "fault"}', "[" * 5000],
    ],
)  # fmt: skip
def test_lines_that_nobody_expects_end_nothing(tmp_path: Path, lines: Sequence[str]) -> None:
    live = LiveRun(tmp_path / "run", LAB[:1])
    live.take_step()
    for path in (live.run.step_file(0), live.run.events_file, live.run.epochs_file):
        with path.open("a") as file:
            file.write("\n".join(lines) + "\n")
    with live.run.gpu_file("tesla0").open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert seen(looked(live.run.path)).rows[0].host == "tesla0"
    shutil.copy(live.run.events_file, live.run.gpu_file("other"))  # no GPU log at all
    assert seen(looked(live.run.path)).step >= 1
    live.close()


def test_last_words_come_after_the_end(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:2])
    live.take_step()
    runs = Runs(tmp_path)
    runs.look(0.0, NOW)
    failure = {"rank": 1, "host": "tesla1", "step": 1, "error": "out of memory"}
    live.run.update_run(status="failed", failure=failure)
    runs.look(1.0, NOW)
    live.run.event("fault", **failure)
    for clock in (2.0, 100.0):
        runs.look(clock, NOW)
        now = runs.snapshot("run", NOW)
        assert now is not None
        assert [event.text for event in now.events] == ["rank 1 on tesla1, step 2: out of memory"]
    assert runs.running() == [] and runs.names == ["run"]
    follower = runs.follower("run")
    assert follower is not None and follower.looks == 3  # nothing is read of what has ended
    live.close()

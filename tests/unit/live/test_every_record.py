"""Every record of a run is read once: in whatever pieces it comes, whoever reads on."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_runs import LAB, LiveRun

from motley.live.follow import MOST
from motley.publish.series import NewRecords, Position, RunReader
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord

STEPS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All that a run of 2 ranks wrote, with what a crash leaves in the middle."""
    live = LiveRun(tmp_path_factory.mktemp("live") / "run", LAB[:2], now=1763693554.0)
    for step in range(STEPS):
        if step == 11:
            with (live.run.path / "steps.rank1.jsonl").open("a") as file:
                file.write('{"step": 11, "lo\n')
            with (live.run.path / "gpu.tesla1.csv").open("a") as file:
                file.write('2026-11-21 03:12:44.120,"0,2\n')
        live.take_step()
        live.take_samples()
        live.run.event("overflow", step=step)
    with live.run.epochs() as lines:
        for step in (20, 40):
            lines.write(EpochRecord(step, 0, 360, 1.0, live.now, {"top1": 0.5}).as_json())
    live.close()
    return {path.name: path.read_bytes() for path in live.run.path.iterdir() if path.is_file()}


def told(found: list[NewRecords]) -> dict[str, list[object]]:
    """All that some looks found, by what it is of."""
    return {
        "rank 0": [line["step"] for new in found for line in new.steps.get(0, [])],
        "rank 1": [line["step"] for new in found for line in new.steps.get(1, [])],
        "evaluations": [line["step"] for new in found for line in new.evaluations],
        "events": [line["step"] for new in found for line in new.events],
        "tesla0": [sample.step for new in found for sample in new.samples.get("tesla0", [])],
        "tesla1": [sample.step for new in found for sample in new.samples.get("tesla1", [])],
    }


@settings(max_examples=30)
@given(st.data())
def test_each_is_read_once_though_readers_come_and_go(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    growing = {name: content for name, content in files.items() if name != ".lock"}
    reader, found = RunReader(RunFolder(folder)), []
    done = dict.fromkeys(growing, 0)
    for last in (False, False, False, True):
        for name, content in growing.items():
            until = len(content) if last else data.draw(st.integers(done[name], len(content)))
            with (folder / name).open("ab") as file:
                file.write(content[done[name] : until])
            done[name] = until
        found.append(reader.look(0.0, 0.0))
        if data.draw(st.booleans()):
            position = json.loads(json.dumps(found[-1].position.as_json()))
            reader = RunReader(RunFolder(folder), after=Position.from_json(position))
    every = list(range(STEPS))
    after = [step + 1 for step in every]
    assert told(found) == {
        "rank 0": every, "rank 1": every, "evaluations": [20, 40], "events": every,
        "tesla0": after, "tesla1": after,
    }  # fmt: skip


def test_a_long_file_is_read_whole_part_by_part(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:1])
    while live.run.step_file(0).stat().st_size < 2.5 * MOST:
        live.take_step()
    live.close()
    reader = RunReader(live.run)
    looks = [reader.look(0.0, 0.0) for _ in range(3)]
    assert [new.more for new in looks] == [True, True, False]
    steps = [line["step"] for new in looks for line in new.steps[0]]
    assert steps == list(range(live.step))


def test_steps_that_are_taken_again_are_not_read_again(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run", LAB[:1])
    for _ in range(8):
        live.take_step()
    reader = RunReader(live.run)
    assert len(reader.look(0.0, 0.0).steps[0]) == 8
    lines = live.run.step_file(0).read_text().splitlines(keepends=True)
    live.run.drop_after(5, 0, [0])
    assert not reader.look(1.0, 0.0)
    with live.run.step_file(0).open("a") as file:
        file.writelines([*lines[5:], lines[7].replace('"step": 7', '"step": 8')])
    assert [line["step"] for line in reader.look(2.0, 0.0).steps[0]] == [8]
    live.close()

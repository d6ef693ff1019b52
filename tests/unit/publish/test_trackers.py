"""Runs are published to real trackers, and read back with their own readers."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import wait_until
from live_runs import LiveRun
from project import LIMIT_S, ROOT
from trackers import (
    accumulator,
    command,
    end,
    environment,
    held_by,
    mlflow_run,
    publish,
    take,
    wandb_records,
)

from motley.errors import MotleyError
from motley.publish.series import Position
from motley.publish.trackers import trackers
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord

HOSTS = ("tesla0", "tesla1.lab")
# Trackio wants pillow < 13, which is not for a tracker to decide where models are trained.
TRACKERS = [name for name in trackers() if name != "trackio" or importlib.util.find_spec(name)]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "run", HOSTS, versions={"torch": "2.14.1"})
    yield run
    run.close()


@pytest.mark.turns
@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_record_is_there_once_however_often_it_is_published(
    tracker: str, live: LiveRun
) -> None:
    take(live, 5)
    live.take_step(loss=float("nan"), t_wait=None)
    first = publish(live.run.path, tracker)
    assert first.returncode == 0, first.stderr
    assert "6 steps" in first.stdout and "the run is still going on" in first.stdout
    take(live, 4)
    with live.run.epochs() as lines:
        lines.write(EpochRecord(10, 0, 360, 1.0, live.now, {"top1": 0.9, "loss": 0.3}).as_json())
    live.run.event("fault", step=9, rank=1, host=HOSTS[1], error="out of memory")
    end(live, "failed")
    second = publish(live.run.path, tracker)
    assert "4 steps, 1 evaluation, 1 event, 8 samples" in second.stdout, second.stderr
    if tracker == "mlflow":  # which knows what it is told twice
        forget_position(live.run)
    third = publish(live.run.path, tracker)
    anew = "10 steps" if tracker == "mlflow" else "nothing new since the last time"
    assert anew in third.stdout, third.stderr

    held = held_by(tracker, live.run.path)
    assert [step for step, *_ in held["all/lr"]] == [*range(10)]
    assert [step for step, *_ in held["all/loss"]] == [0, 1, 2, 3, 4, 6, 7, 8, 9]  # 5: unknown
    assert [step for step, *_ in held["rank/1_tesla1_lab/wait_s"]] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert held["all/loss"][3][2] == pytest.approx(2.3 / 1.15)
    assert held["all/images_per_s"][0][2] == pytest.approx(40 / 0.108)
    assert held["all/fraction_of_limit"][0][2] == pytest.approx(0.1 / 0.108)
    assert [held["evaluation/top1"][0][each] for each in (0, 2)] == [10, pytest.approx(0.9)]
    assert len(held["gpu/tesla0_0/load"]) == len(held["gpu/tesla1_lab_1/power_w"]) == 9
    assert next(iter(sorted(held))).startswith("all/")
    if held["all/lr"][0][1] is not None:
        times = [when for _, when, _ in held["gpu/tesla0_0/load"]]
        assert times[-1] - times[0] == pytest.approx(9 * 0.108, abs=0.01)
    TOLD[tracker](live.run.path)


def forget_position(run: RunFolder) -> None:
    """As if the last publisher had been killed before it saved how far it was."""
    path = run.published_file("mlflow")
    nowhere = Position().as_json()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"position": nowhere}))


def told_tensorboard(run: Path) -> None:
    events = accumulator(run)
    (fault,) = events.Tensors("events/fault")
    assert fault.step == 9 and b"out of memory" in fault.tensor_proto.string_val[0]
    about = events.Tensors("run")[0].tensor_proto.string_val[0]
    assert b"| versions.torch | 2.14.1 |" in about and b"| hosts | tesla0, tesla1.lab |" in about


def told_wandb(run: Path) -> None:
    records = list(wandb_records(run))
    (about, *_) = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["versions.torch"] == "2.14.1" and config["config.model"] == "vit_digits"
    assert {each.run.run_id for each in records if each.HasField("run")} == {about.run_id}
    assert any("out of memory" in str(each.history) for each in records)
    exits = [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"]
    assert exits == [0, 1]  # it went on, then it had failed


def told_mlflow(run: Path) -> None:
    _, found = mlflow_run(run)
    assert found.data.params["versions.torch"] == "2.14.1"
    assert found.info.status == "FAILED" and found.info.run_name == "run"
    assert "step 10, fault: rank 1 on tesla1.lab" in found.data.tags["mlflow.note.content"]


def told_trackio(run: Path) -> None:
    import sqlite3

    with sqlite3.connect(run.parent / "trackio" / "motley.db") as database:
        ((title, text, level),) = database.execute("SELECT title, text, level FROM alerts")
        assert (title, level) == ("fault", "warn") and "out of memory" in text


TOLD = {"tensorboard": told_tensorboard, "wandb": told_wandb, "mlflow": told_mlflow,
        "trackio": told_trackio}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_publisher_that_is_killed_loses_nothing_and_doubles_nothing(
    tracker: str, live: LiveRun
) -> None:
    take(live, 5)
    assert publish(live.run.path, tracker).returncode == 0
    kept = live.run.published_file(tracker).read_bytes()
    take(live, 5)
    following = subprocess.Popen(
        command(live.run.path, tracker, "--follow"), cwd=ROOT, env=environment(live.run.path.parent)
    )
    wait_until(lambda: reached(live.run.path, tracker, 9), 60)
    following.kill()
    following.wait()
    live.run.published_file(tracker).write_bytes(kept)  # as if it had been killed before it saved
    take(live, 2)
    end(live)
    assert publish(live.run.path, tracker).returncode == 0
    held = held_by(tracker, live.run.path)
    assert [step for step, *_ in held["all/loss"]] == [*range(12)]
    assert len(held["gpu/tesla0_0/load"]) == 12
    if tracker == "wandb":
        other = publish(live.run.path, tracker, "--project", "other")
        assert (
            other.returncode == 2 and "was published to the project motley of wandb" in other.stderr
        )


def reached(run: Path, tracker: str, step: int) -> bool:
    """Whether the tracker was told of a step; W&B writes its file when it likes."""
    if tracker == "wandb":
        return len(list((run / "wandb").glob("offline-run-*/*.wandb"))) > 1
    return held_by(tracker, run).get("all/loss", [(0,)])[-1][0] == step


def test_it_follows_a_run_until_it_dies_and_ends_at_once_on_ctrl_c(live: LiveRun) -> None:
    def follow() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(live.run.path, "tensorboard", "--follow"), cwd=ROOT, text=True,
            env=environment(live.run.path.parent), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    take(live, 5)
    following = follow()
    wait_until(lambda: any(live.run.path.glob("events.out.*")), 30)
    busy = publish(live.run.path, "tensorboard")
    assert busy.returncode == 2 and "is being published to tensorboard, by process" in busy.stderr
    take(live, 5)
    wait_until(lambda: reached(live.run.path, "tensorboard", 9), 30)
    following.send_signal(signal.SIGINT)
    said, errors = following.communicate(timeout=20)
    assert following.returncode == 0 and not errors and "10 steps" in said

    following = follow()
    take(live, 5)
    live.close()  # its processes die without a word
    began = time.monotonic()
    said, errors = following.communicate(timeout=LIMIT_S)
    assert following.returncode == 0 and not errors and "5 steps" in said
    assert time.monotonic() - began < 30 and "going on" not in said
    steps = [step for step, *_ in held_by("tensorboard", live.run.path)["all/loss"]]
    assert steps == [*range(15)]


def test_a_resumed_run_goes_on_in_the_same_tracker_run(live: LiveRun) -> None:
    take(live, 8)
    publish(live.run.path, "tensorboard")
    for rank in range(2):
        live.run.drop_after(5, rank, [0, 1])
    again = LiveRun(live.run.path.parent / "again", HOSTS)
    take(again, 12)
    for rank in range(2):  # as a job that begins at step 5 writes them
        lines = again.run.step_file(rank).read_text().splitlines(keepends=True)[5:]
        with live.run.step_file(rank).open("a") as file:
            file.writelines(lines)
    live.run.update_run(started=live.now + 100)
    end(again)
    assert "4 steps" in publish(live.run.path, "tensorboard").stdout
    (file,) = live.run.path.glob("events.out.*")
    steps = [step for step, *_ in held_by("tensorboard", live.run.path)["all/loss"]]
    assert steps == [*range(12)]
    file.unlink()  # whoever removes it wants all of it anew
    assert "12 steps" in publish(live.run.path, "tensorboard").stdout


@pytest.mark.parametrize("tracker", list(trackers()))
def test_a_tracker_that_is_missing_is_said_with_pip_s_line(
    tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == tracker:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(MotleyError, match=f"--to {tracker} needs .*pip install {tracker}"):
        trackers()[tracker].check()


def test_what_is_no_run_is_said(tmp_path: Path, live: LiveRun) -> None:
    (tmp_path / "empty").mkdir()
    for path, says in {
        tmp_path / "none": "does not exist",
        live.run.run_file: f"is a file; name the run's folder, {live.run.path}",
        tmp_path / "empty": "is neither a run nor a folder of runs",
        tmp_path: f"holds 1 run; name one of them (newest first): {live.run.path}",
    }.items():
        done = publish(path, "tensorboard")
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    wrong = publish(live.run.path, "tensorbord")
    assert wrong.returncode == 2 and "tensorboard" in wrong.stderr
    live.run.published_file("tensorboard").write_text("{}")
    damaged = publish(live.run.path, "tensorboard")
    assert damaged.returncode == 2 and "is damaged; remove it" in damaged.stderr


def test_hosts_whose_records_are_not_here_are_named_and_published_once_they_are(
    live: LiveRun,
) -> None:
    take(live, 5)
    end(live)
    here, away = live.run.path, live.run.path.parent / "tesla1"
    away.mkdir()
    for name in ("steps.rank1.jsonl", "gpu.tesla1.lab.csv"):
        (here / name).rename(away / name)
    done = publish(here, "tensorboard")
    assert (
        "tesla1.lab: its records are not on this machine, and are not published; --collect"
        in done.stderr
    )
    assert "rank/1_tesla1_lab/compute_s" not in held_by("tensorboard", here)
    for path in list(away.iterdir()):
        path.rename(here / path.name)
    assert not publish(here, "tensorboard").stderr
    held = held_by("tensorboard", here)
    assert len(held["rank/1_tesla1_lab/compute_s"]) == len(held["gpu/tesla1_lab_1/load"]) == 5
    assert len(held["all/loss"]) == 5


def test_gpu_logs_that_cannot_be_read_are_named(live: LiveRun) -> None:
    take(live, 2)
    first, second = (live.run.path / f"gpu.{host}.csv" for host in HOSTS)
    lines = first.read_text().splitlines(keepends=True)
    first.write_text(lines[0] + lines[1].replace(lines[1].split(",")[0], "noon") + lines[2])
    second.write_text("a,b\n1,2\n")
    done = publish(live.run.path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "1 of its" in done.stderr and "the time is 'noon' in line 2" in done.stderr
    assert f"{second.name} is not a GPU log" in done.stderr, done.stderr


def test_hostile_names_run_nothing_and_leave_nothing_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "$(touch owned); ../`x`'\"|<b>"
    hosts = ["../../../evil", "$(touch owned)"]
    live = LiveRun(folder, ["a", "b"], command=["train", "$(touch owned)"])
    live.run.update_run(ranks=[{"rank": rank, "host": host} for rank, host in enumerate(hosts)])
    take(live, 2)
    live.run.event("../../<script>", text="\x1b[2J\u202e" + "x" * 9000)
    end(live)
    before = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    for tracker in ("tensorboard", "wandb"):
        done = publish(folder, tracker)
        assert done.returncode == 0, done.stderr
        assert all("evil" not in name or name.startswith("rank/0______") for name
                   in held_by(tracker, folder))  # fmt: skip
    after = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    assert not [path for path in after - before if "owned" in path.name or "evil" in path.name]
    (link,) = folder.glob("events.out.*")
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in publish(folder, "tensorboard").stderr


def test_a_forged_position_removes_nobody_s_sessions(live: LiveRun) -> None:
    take(live, 2)
    other = live.run.path / "wandb" / "offline-run-20261126_000000-0123abcd"
    other.mkdir(parents=True)
    told = {"mode": "offline", "project": "motley", "run": "*", "sessions": []}
    state = {"started": 1.0, "position": Position().as_json(), "tracker": told}
    live.run.published_file("wandb").write_text(json.dumps(state))
    assert publish(live.run.path, "wandb").returncode == 0
    assert other.exists() and len(held_by("wandb", live.run.path)["all/loss"]) == 2


def test_a_tracker_is_added_by_one_file(live: LiveRun, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("src", "plots", "setup"):
        shutil.copytree(ROOT / folder, copy / folder)
    place = copy / "src" / "motley" / "publish" / "trackers"
    shutil.copy(ROOT / "tests" / "support" / "additions" / "lines.py", place)
    words = command(live.run.path, "lines")
    known = environment(tmp_path) | {"PYTHONPATH": str(copy / "src")}
    for count in (3, 2):
        take(live, count)
        done = subprocess.run(words, cwd=copy, env=known, capture_output=True, text=True)
        assert f"{count} steps" in done.stdout, done.stderr
    rows = [json.loads(line) for line in (live.run.path / "tracked.jsonl").open()]
    assert [row["step"] for row in rows if "all/loss" in row] == [*range(5)]

"""Records: written, read back, and read up to where a crash cut them."""

import dataclasses
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from project import ROOT

from motley.errors import MotleyError
from motley.records.gpu_csv import LAB_GPU_COLUMNS, find_gpu_logs, read_gpu_log
from motley.records.json_files import to_json
from motley.records.run_folder import RunFolder
from motley.records.training import StepRecord


def step(number: int, **changes: object) -> StepRecord:
    record = StepRecord(
        step=number, epoch=0, loss=2.0, lr=1e-3, loss_scale=1.0, overflow=False, grad_norm=1.0,
        n_local=5, n_global=10, t_data=0.1, t_compute=0.2, t_wait=None, t_comm=None, t_opt=0.1,
        mem_peak_mib=None, samples_per_s=3.0, weight=1.0, time=1.0,
    )  # fmt: skip
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def test_steps_are_read_as_written_and_unknown_is_null(folder: RunFolder) -> None:
    with folder.steps(3) as lines:
        lines.write(step(0, loss=float("nan")))
        lines.write(step(1))
    first, second = folder.read_steps()[3]
    assert first["loss"] is None and first["t_wait"] is None
    assert second["loss"] == 2.0
    text = (folder.path / "steps.rank3.jsonl").read_text()
    assert "NaN" not in text, "strict JSON has no NaN"


@pytest.mark.parametrize(
    "torn", [b'{"step": 1, "lo', b'{"event": "x\xff', b"[" * 200_000, b"\0" * 9]
)
def test_a_torn_line_costs_itself_alone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    for name in ("steps.rank0.jsonl", "epochs.jsonl", "events.jsonl"):
        (folder.path / name).write_bytes(b'{"event": "a", "step": 0}\n' + torn)
    with folder.steps(0) as lines:  # after a resume
        lines.write(step(1))
    with folder.epochs() as lines:
        lines.write({"step": 1})
    folder.event("b", step=1)
    folder.event("c", step=1)
    assert [record["step"] for record in folder.read_steps()[0]] == [0, 1]
    assert [record["step"] for record in folder.read_epochs()] == [0, 1]
    assert [record["event"] for record in folder.read_events()] == ["a", "b", "c"]
    assert capsys.readouterr().out.count("line 2 is cut short") == 3


def test_forgetting_drops_what_is_torn_or_tells_no_step(folder: RunFolder) -> None:
    path = folder.path / "steps.rank0.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"loss": 1.0}\n{"step": "x"}\n{"step": 1}\n{"step": 2}\n')
    folder.drop_after(2, 0, [0])
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


@pytest.mark.parametrize("torn", [1, 40, 70, 100, -3])
def test_a_torn_row_of_a_gpu_log_costs_itself_alone(folder: RunFolder, torn: int) -> None:
    """The header, or a name in quotes, which would reach to the next quote."""
    row = {"Timestamp": "2026-11-21 03:12:44.120", "GPU_ID": 0, "GPU_Name": 'a, "b", c', "Step": 1}
    log = folder.gpu_log("a")
    log.write(row)
    log.close()
    path = folder.path / "gpu.a.csv"
    whole = path.read_bytes()
    header, _, first = whole.partition(b"\n")
    cut = len(header) + 1 + first.index(b'"b') + 2 if torn < 0 else torn
    path.write_bytes(whole[:cut])
    for number in (2, 3):
        log = folder.gpu_log("a")
        log.write({**row, "Step": number})
        log.close()
    assert [sample.step for sample in read_gpu_log(path)] == [2, 3]


def test_a_long_field_of_a_gpu_log_is_read(folder: RunFolder) -> None:
    log = folder.gpu_log("a")
    for name in ("EPYC", "x" * 200_000):
        log.write({"Timestamp": "2026-11-21 03:12:44.120", "CPU_Name": name})
    log.close()
    assert [len(sample.name) for sample in read_gpu_log(folder.path / "gpu.a.csv")] == [4, 200_000]


def test_steps_that_will_be_taken_again_are_forgotten(folder: RunFolder) -> None:
    with folder.steps(0) as lines:
        for number in range(5):
            lines.write(step(number))
    folder.drop_after(3, 0, [0])
    assert [record["step"] for record in folder.read_steps()[0]] == [0, 1, 2]
    folder.drop_after(2, 2, [1, 2])  # not the first that trains now
    assert [record["step"] for record in folder.read_steps()[0]] == [0, 1, 2]
    folder.drop_after(2, 1, [1, 2])
    assert [record["step"] for record in folder.read_steps()[0]] == [0, 1]


@pytest.mark.parametrize("diverges", [False, True])
def test_records_that_a_killed_rank_did_not_write_come_from_another(
    folder: RunFolder, diverges: bool
) -> None:
    for rank, count in ((0, 1), (1, 3)):
        with folder.steps(rank) as lines:
            for number in range(count):
                lines.write(step(number, overflow=True))
    folder.drop_after(3, 0, [0, 1], diverges)
    for line in folder.read_steps()[0][1:]:
        assert line["loss"] == 2.0 and line["n_local"] is None
        own = [line["grad_norm"], line["overflow"], line["loss_scale"]]
        assert own == ([None] * 3 if diverges else [1.0, True, 1.0])


def test_a_folder_in_use_is_refused_until_its_run_dies(folder: RunFolder) -> None:
    code = (
        "import sys, time; from motley.records.run_folder import RunFolder\n"
        f"lock = RunFolder({str(folder.path)!r}).lock()\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT / "src")}
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        who = rf"by process {other.pid} on {os.uname().nodename} since 20\d\d-.*; wait until"
        with pytest.raises(MotleyError, match=f"in use by another run, {who}"):
            folder.lock()
        folder.write_run({"status": "running"})
        assert folder.read_run()["status"] == "running"
    finally:
        other.kill()
        other.wait()
    assert folder.read_run()["status"] == "stopped"
    with folder.lock():
        assert folder.read_run()["status"] == "running"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"since": 1e99, "pid": 1}'])
def test_a_lock_that_does_not_say_whose_it_is_is_a_lock(folder: RunFolder, content: str) -> None:
    with folder.lock():
        (folder.path / ".lock").write_text(content)
        with pytest.raises(MotleyError, match="in use by another run; wait until that run ends"):
            folder.lock()


def test_a_disk_without_locks_refuses_nobody_and_calls_no_run_stopped(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder.lock().close()
    folder.write_run({"status": "running"})
    assert folder.read_run()["status"] == "running"


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_records_that_are_gone_are_said_at_the_next_one(folder: RunFolder, how: str) -> None:
    folder.write_run({"status": "running"})
    lines = folder.steps(0)
    lines.write(step(0))
    if how == "removed":
        shutil.rmtree(folder.path)
    else:
        folder.path.rename(folder.path.with_name("elsewhere"))
    if how == "replaced":
        folder.create()
        (folder.path / "steps.rank0.jsonl").write_text("")
    with pytest.raises(MotleyError, match=r"steps.rank0.jsonl was removed, .*--resume auto"):
        lines.write(step(1))
    with pytest.raises(MotleyError, match=r"run.json was removed"):
        folder.update_run(status="finished")
    if how != "replaced":
        with pytest.raises(MotleyError, match=r"events.jsonl was removed"):
            folder.event("x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk this small")
def test_a_full_disk_is_said_and_the_status_is_written(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", tmp_path], check=True)
    try:
        folder = RunFolder(tmp_path / "run")
        folder.create()
        folder.write_run({"status": "running", "facts": [{"host": "x" * 5000}]}, keep_room=True)
        lines = folder.steps(0)
        with pytest.raises(OSError, match="No space left"), (tmp_path / "other").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        with pytest.raises(MotleyError, match=r"steps.rank0.*No space left.*free some space"):
            for number in range(99):
                lines.write(step(number))
        lines.close()
        folder.update_run(status="failed", failure={"error": "e" * 10_000})
        assert shutil.disk_usage(tmp_path).free < 2**17
        assert folder.read_run()["status"] == "failed"
        assert RunFolder(folder.path).read_run()["facts"][0]["host"] == "x" * 5000
        assert {path.name for path in folder.path.iterdir()} == {"run.json", "steps.rank0.jsonl"}
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_where_descriptors_are_used_up_it_is_said_and_the_status_is_written(
    folder: RunFolder,
) -> None:
    folder.write_run({"status": "running"}, keep_room=True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (folder.path / "x").open("w") as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, before[1]))
        taken = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(file.fileno()))
            with pytest.raises(MotleyError, match=r"events.jsonl: Too many open files; .*ulimit"):
                folder.event("fault")
            folder.update_run(status="failed")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for each in taken:
                os.close(each)
    assert folder.read_run() == {"status": "failed"}


def test_the_room_that_is_kept_is_given_back(folder: RunFolder) -> None:
    folder.write_run({"status": "running"}, keep_room=True)
    assert len(list(folder.path.iterdir())) == 2
    folder.update_run(status="finished")
    assert {path.name for path in folder.path.iterdir()} == {"run.json"}


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MotleyError, match="--logs DIR"):
        RunFolder(tmp_path / "file" / "run").create()


@pytest.mark.parametrize("target", [".", "nowhere"])
def test_a_link_in_place_of_a_run_folder_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").mkdir()
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "there" / target)
    with pytest.raises(MotleyError, match=f"{run} is a symbolic link to {tmp_path}/there"):
        RunFolder(run).create()
    assert not any((tmp_path / "there").iterdir())


@given(st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=9))
def test_any_value_becomes_strict_json(value: object) -> None:
    json.loads(to_json({"value": value}), parse_constant=lambda name: pytest.fail(name))


def test_run_json_is_replaced_in_one_piece(folder: RunFolder) -> None:
    folder.write_run({"status": "running", "config": {"lr": 1e-3}})
    folder.update_run(status="finished")
    assert folder.read_run() == {"status": "finished", "config": {"lr": 1e-3}}
    assert {path.name for path in folder.path.iterdir()} == {"run.json"}


def test_our_gpu_log_starts_with_the_labs_columns_and_leaves_unknowns_empty(
    folder: RunFolder,
) -> None:
    log = folder.gpu_log("a")
    log.write(
        {"Timestamp": "2026-11-21 03:12:44.120", "Host": "a", "CPU_Load": 0.5, "GPU_ID": None}
    )
    log.close()
    path = folder.path / "gpu.a.csv"
    header, row = path.read_text().splitlines()
    assert header.split(",")[: len(LAB_GPU_COLUMNS)] == list(LAB_GPU_COLUMNS)
    assert row.split(",")[4:11] == [""] * 7
    (sample,) = read_gpu_log(path)
    assert (sample.host, sample.gpu, sample.load, sample.power_w) == ("a", None, 0.5, None)


def test_the_labs_old_files_are_found_and_read(tmp_path: Path) -> None:
    path = tmp_path / "5_GPUs" / "p1_b16_e10" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(
        ",".join(LAB_GPU_COLUMNS) + "\n"
        "2024-11-21 03:12:44,2,0,0.21,0,Tesla P4,88.0%,700.0,6980.0,7680.0,61.0\n"
        "2024-11-21 03:12:4"
    )
    assert find_gpu_logs([tmp_path]) == [path]
    (sample,) = read_gpu_log(path)
    assert (sample.load, sample.gpu, sample.name) == (0.88, "0", "Tesla P4")
    assert sample.memory_total_mib == 7680 and sample.others_memory_mib is None
    assert os.path.sep not in sample.host

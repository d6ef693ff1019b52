"""What happens to a run's folder while it runs: its disk fills up, somebody removes it; and to what
else a run needs of its host."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import Done, Jobs, wait_until
from long_runs import steps_done
from project import DDP, ROOT

pytestmark = pytest.mark.mpi

NOISE = (DDP, "--dataset", "synthetic", "--model", "vit_digits", "--shares", "equal")
LONG = (*NOISE, "--batch-size", 8, "--eval-samples", 8, "--epochs", 900)


def the_line_of(done: Done) -> str:
    """What a job that failed says to its user."""
    assert done.code != 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert len(lines) == 1 and "Traceback" not in done.output, done.output
    return lines[0]


def status(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["status"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for some 300 steps' records."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a disk this small")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_fails_the_run_in_a_line_and_in_its_status(
    jobs: Jobs, small_disk: Path
) -> None:
    line = the_line_of(jobs.fork(1, *LONG, "--logs", small_disk, "--run", "x"))
    assert "No space left on device; free some space, or choose another folder" in line
    assert status(small_disk / "x") == "failed"


def test_a_run_folder_that_is_removed_in_mid_run_is_said(jobs: Jobs) -> None:
    folder = jobs.logs / "x"
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(jobs.fork, 1, *LONG, "--logs", jobs.logs, "--run", "x")
        wait_until(lambda: steps_done(folder) > 2 or job.done(), 60)
        shutil.rmtree(folder)
        line = the_line_of(job.result(60))
    assert ".jsonl was removed, moved or replaced" in line and "step " in line


def test_a_master_port_that_is_taken_is_refused_in_a_line(jobs: Jobs) -> None:
    words = (*NOISE, "--max-steps", 2, "--logs", jobs.logs)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = the_line_of(jobs.fork(2, *words, MASTER_PORT=str(port)))
    assert f"MASTER_PORT={port} cannot be used on" in line and "another program listens" in line
    assert not jobs.logs.exists()
    done = jobs.fork(2, *words, MASTER_PORT=str(port))
    assert done.code == 0, done.output


def test_a_run_whose_run_json_is_damaged_goes_on_and_says_so(jobs: Jobs) -> None:
    run = jobs.train(1, DDP, "x", "--max-steps", 2, "--shares", "equal")
    (run.folder / "run.json").write_text("")
    again = jobs.train(1, DDP, "x", "--max-steps", 4, "--shares", "equal", "--resume", "auto")
    assert "run.json is damaged" in again.done.output
    assert "The run continues from its checkpoints" in again.done.output
    assert [step["step"] for step in again.steps()] == [0, 1, 2, 3]
    assert status(run.folder) == "finished"


LEAKS = """
import itertools, os

_CALLS, _KEPT = itertools.count(), []


def _leak():
    try:
        while next(_CALLS) > 22_000:  # in the second epoch
            _KEPT.append(os.dup(0))
    except OSError:
        pass
"""


def test_where_no_file_can_be_opened_any_more_the_run_has_failed(
    jobs: Jobs, tmp_path: Path
) -> None:
    task = (ROOT / "examples" / "my_task.py").read_text()
    path = tmp_path / "mine.py"
    found = '        return {"x": x'
    assert found in task
    path.write_text(task.replace(found, f"        _leak()\n{found}") + LEAKS)
    done = jobs.fork(1, DDP, "--task", path, "--shares", "1", "--logs", jobs.logs, "--run", "x",
                     "--batch-size", 500, "--epochs", 3)  # fmt: skip
    assert done.code != 0 and "Too many open files" in done.output, done.output
    assert "ulimit -n" in done.output
    assert status(jobs.logs / "x") == "failed"

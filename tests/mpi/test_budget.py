"""What a run says of its disk is what it takes."""

from pathlib import Path

import pytest
from jobs import Jobs
from project import DDP

pytestmark = pytest.mark.mpi


def test_a_run_says_it_and_its_checkpoint_is_as_large(jobs: Jobs, tmp_path: Path) -> None:
    words = ("--epochs", 2, "--logs", tmp_path, "--run", "b", "--wire", "powersgd:2")
    done = jobs.fork(2, DDP, *words, "--shares", "1,1")
    assert done.code == 0 and "24 steps; checkpoints take up to" in done.output
    newest = max((tmp_path / "b" / "checkpoints").glob("step_*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    said = float(done.output.split("take up to ")[1].split(" MiB")[0]) / 2 * 2**20
    assert size == pytest.approx(said, rel=0.05)

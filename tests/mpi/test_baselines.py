"""A matrix of cells: none hurts the next, and each failure is explained."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from matrices import matrix_file, measure
from project import ROOT, environment

from motley.sweep.results import BaselineFolder
from motley.sweep.rows import read_rows

pytestmark = pytest.mark.mpi


MATRIX = """
steps = 8
limit_s = 150
[[cell]]
name = "good"
options = "--micro-batch 32"
[[cell]]
name = "memory"
script = "tests/support/drivers/failing.py"
options = "--fail memory --shares 1,1"
[[cell]]
name = "killed"
script = "tests/support/drivers/failing.py"
options = "--fail killed --shares 1,1"
[[cell]]
name = "no-number"
options = "--lr 1e30 --warmup-epochs 0"
[[cell]]
name = "hang"
script = "tests/support/drivers/failing.py"
options = "--fail hang --shares 1,1"
limit_s = 40
"""


def test_no_cell_can_hurt_the_next_and_each_failure_is_explained(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=2\n")
    out, path = tmp_path / "out", matrix_file(tmp_path, MATRIX)
    words = ("--matrix", path, "--hostfile", hosts, "--out", out, "--repeats", 1)
    done = subprocess.run(
        [sys.executable, "torch_dist/baseline_measure.py", *map(str, words)], cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row.name: row for row in read_rows(BaselineFolder(out))}
    assert {name: row.outcome for name, row in rows.items()} == {
        "reference": "done", "good": "done", "memory": "out of memory", "killed": "killed",
        "no-number": "not finite", "hang": "hang",
    }, done.stdout  # fmt: skip
    good = rows["good"]
    assert good.samples_per_s and good.fraction_of_limit and good.epoch_s and good.memory_mib
    assert good.loss_difference is not None and abs(good.loss_difference) < 1e-5
    assert "rank 1 is computing" in rows["hang"].error
    for name in ("memory", "killed", "no-number", "hang"):
        assert rows[name].error and "step " in rows[name].when, rows[name]
        assert rows[name].error in (out / "results.md").read_text()
    with (out / "results.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == list(rows)

    assert not list(out.rglob("*.pt")) and not list(out.rglob("checkpoints"))

    again = measure(*words)  # all has ended: nothing runs
    assert "[1/" not in again.stdout and "not finite" in again.stdout
    other = matrix_file(tmp_path, MATRIX.replace("1e30", "1e29"))
    refused = measure("--matrix", other, "--hostfile", hosts, "--out", out)
    assert (
        refused.returncode == 2 and "another matrix, which differs in no-number" in refused.stderr
    )

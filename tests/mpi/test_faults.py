"""Rows of the fault matrix that no other test holds, as benchmarks/faults.py plays them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT, environment

pytestmark = pytest.mark.mpi

ROWS = ("rank-0-segfault", "rank-gradient-inf", "checkpoint-pickle", "hostile-hosts",
        "hostile-records")  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_fault_matrix_is_ok(name: str, tmp_path: Path) -> None:
    out = tmp_path / "row.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/faults.py", "--only", name, "--json", out],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["verdict"] == "ok" and row["row"] == name
    assert out.with_suffix(".md").read_text().count(f"`{name}`") == 2

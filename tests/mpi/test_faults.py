"""Rows of the fault matrix that no other test holds, as benchmarks/faults.py plays them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT, environment

pytestmark = pytest.mark.mpi

ROWS = ("rank-0-segfault", "rank-gradient-inf", "checkpoint-pickle", "hostile-hosts",
        "hostile-records")  # fmt: skip


def play(folder: Path, *names: str) -> dict[str, Any]:
    """These rows, by their names."""
    only = [word for name in names for word in ("--only", name)]
    out = folder / "rows.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/faults.py", *only, "--json", out],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    print(done.stdout + done.stderr)
    assert all(out.with_suffix(".md").read_text().count(f"`{name}`") == 2 for name in names)
    return {row["row"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All whose turn it is: the run without a fault, which they are compared with, is made once."""
    names = {item.name for item in request.session.items}
    rows = [row for row in ROWS if f"test_a_row_of_the_fault_matrix_is_ok[{row}]" in names]
    return play(tmp_path_factory.mktemp("faults"), *rows)


@pytest.mark.turns
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_fault_matrix_is_ok(
    name: str, played: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    again = getattr(request.node, "execution_count", 1) > 1  # it failed: it alone is played anew
    rows = play(tmp_path, name) if again else played
    assert rows[name]["verdict"] == "ok", rows[name]

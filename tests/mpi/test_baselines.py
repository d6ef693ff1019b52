"""A matrix of cells: none hurts the next, and each failure is explained."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from matrices import matrix_file, measure
from project import LIMIT_S, ROOT, environment

from motley.sweep.results import BaselineFolder
from motley.sweep.table import read_rows

pytestmark = pytest.mark.mpi


FAILING = 'script = "tests/support/drivers/failing.py"\noptions = "--fail {} --shares 1,1"'
CELLS = {
    "memory": FAILING.format("memory"),
    "killed": FAILING.format("killed"),
    "no-number": 'options = "--lr 1e30 --warmup-epochs 0"',
    "hang": f"{FAILING.format('hang')}\nlimit_s = 40",
    "good": 'options = "--micro-batch 32"',
}
OUTCOMES = {
    "memory": "out of memory", "killed": "killed", "no-number": "not finite", "hang": "hang",
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("failing", ["memory", "killed, no-number", "hang"])
def test_no_cell_can_hurt_the_next_and_each_failure_is_explained(
    tmp_path: Path, failing: str
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=2\n")
    names = failing.split(", ")
    text = "steps = 8\nlimit_s = 150\n" + "".join(
        f'[[cell]]\nname = "{name}"\n{CELLS[name]}\n' for name in (*names, "good")
    )
    out, path = tmp_path / "out", matrix_file(tmp_path, text)
    words = ("--matrix", path, "--hostfile", hosts, "--out", out, "--repeats", 1)
    done = subprocess.run(
        [sys.executable, "torch_dist/baseline_measure.py", *map(str, words)], cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row.name: row for row in read_rows(BaselineFolder(out))}
    ended = {name: row.outcome for name, row in rows.items()}
    expected = {name: OUTCOMES[name] for name in names}
    assert ended == {"reference": "done", **expected, "good": "done"}, done.stdout
    good = rows["good"]
    assert good.samples_per_s and good.fraction_of_limit and good.epoch_s and good.memory_mib
    assert good.score_name == "top1" and good.score is not None
    assert good.loss_difference is not None and abs(good.loss_difference) < 1e-5
    if "hang" in rows:
        assert "rank 1 is computing" in rows["hang"].error
    for name in names:
        assert rows[name].error and "step " in rows[name].when, rows[name]
        assert rows[name].error in (out / "results.md").read_text()
    with (out / "results.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == list(rows)

    assert not list(out.rglob("*.pt")) and not list(out.rglob("checkpoints"))

    again = measure(*words)  # all has ended: nothing runs
    assert "[1/" not in again.stdout and OUTCOMES[names[0]] in again.stdout
    other = matrix_file(tmp_path, text.replace("--micro-batch 32", "--micro-batch 16"))
    refused = measure("--matrix", other, "--hostfile", hosts, "--out", out)
    assert refused.returncode == 2 and "another matrix, which differs in good" in refused.stderr

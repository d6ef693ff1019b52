"""A host with an edited file is refused before it trains."""

import os
import shutil
from pathlib import Path

import pytest
from jobs import Jobs
from project import DDP, ROOT, venv

pytestmark = pytest.mark.mpi


ORDER, PLAN = "src/motley/data/source.py", "src/motley/plan/plan.py"


ENTRY = """#!/bin/sh
# A host with a home of its own: rank 1 has other files.
[ "$OMPI_COMM_WORLD_RANK" = 1 ] && root={other} || root={root}
script=$1
shift
exec "$root/entry_cn.sh" "$root/$script" "$@"
"""


@pytest.mark.turns
@pytest.mark.parametrize("edited", [ORDER, "torch_dist/train_vit.py"])
def test_a_host_with_an_edited_file_is_refused(jobs: Jobs, tmp_path: Path, edited: str) -> None:
    other = tmp_path / "home" / "motley"
    for name in ("src", "torch_dist", "entry_cn.sh"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, other / name)
    with (other / edited).open("a") as file:
        file.write("\n# edited\n")
    entry = tmp_path / "entry.sh"
    entry.write_text(ENTRY.format(root=ROOT, other=other))
    entry.chmod(0o755)
    done = jobs.run(
        2, DDP, "--max-steps", 2, "--logs", jobs.logs, entry=entry, MOTLEY_VENV=str(venv())
    )
    assert done.code != 0 and not jobs.logs.exists(), done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert f"on {os.uname().nodename} (rank 1), these files differ" in line and edited in line
    assert "sync_cn.sh" in line
    assert "Traceback" not in done.output

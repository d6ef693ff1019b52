"""What somebody who stops a run is told of what is saved."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from project import ROOT

from motley.checkpoint.store import Checkpoints
from motley.train.start import how_to_continue


def test_whoever_stops_a_run_is_told_what_is_saved_of_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    assert "nothing of this run is saved yet; " in how_to_continue("mpirun x", checkpoints, None, 2)
    for step in (3, 12):
        checkpoints.save({"model.x": torch.ones(1)}, {"step": step})
    for done, repeated in (
        (None, no := ", so no step will be repeated"), (11, no), (12, no),
        (13, ", and step 13 will be repeated"),
        (15, ", and steps 13 to 15 will be repeated"),
    ):  # fmt: skip
        said = how_to_continue("mpirun x", checkpoints, None, done)
        assert said == f"the last checkpoint is of step 12{repeated}; continue with: mpirun x"
    checkpoints.save_behind({"model.x": torch.ones(1)}, {"step": 60})
    assert "is of step 60, so no" in how_to_continue("mpirun x", checkpoints, None, 60)
    assert "keeps no checkpoints" in how_to_continue("mpirun x", checkpoints, 0, 15)


KEEPER = """
import subprocess, sys
code = (
    "import sys; from pathlib import Path; from motley.records.run_folder import RunFolder;"
    "from motley.train.command_line import make_resume_line;"
    "print(make_resume_line(RunFolder(Path(sys.argv[1]))))"
)
subprocess.run([sys.executable, "-c", code, "my logs/a run"], check=True)
"""


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("motley.provision.keep_training",
         "--restarts 2 mpirun -np 2 ./entry_cn.sh --text 'a b' --resume=x --run old --lr 1",
         "bash setup/keep_training.sh --restarts 2 mpirun -np 2 ./entry_cn.sh --text 'a b' --lr 1"),
        ("other.py", "", "./entry_cn.sh -c 'my logs/a run'"),  # nobody's: the process's own words
    ],
)  # fmt: skip
def test_the_line_that_continues_is_the_whole_one_that_was_typed(
    tmp_path: Path, name: str, words: str, line: str
) -> None:
    (tmp_path / name).write_text(KEEPER)
    done = subprocess.run(
        [sys.executable, tmp_path / name, *shlex.split(words)], capture_output=True, text=True,
        check=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout == f"{line} --logs 'my logs' --run 'a run' --resume auto\n"

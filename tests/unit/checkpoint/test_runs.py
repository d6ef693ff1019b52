"""Which run ``--resume`` means."""

from pathlib import Path

import pytest
import torch

from motley.checkpoint.run import find_run
from motley.checkpoint.store import Checkpoints
from motley.config.options import Config
from motley.errors import MotleyError
from motley.records.run_folder import RunFolder
from motley.train.command_line import read_config, training_parser


def config(logs: Path, *words: str) -> Config:
    return read_config(training_parser("test"), ["--logs", str(logs), *words])


def make_run(logs: Path, name: str, started: float, status: str, step: int = 3) -> Path:
    folder = RunFolder(logs / name)
    folder.create()
    folder.write_run({"status": status, "started": started})
    if step:
        Checkpoints(folder.checkpoints, 2).save({"model.x": torch.ones(1)}, {"step": step})
    return folder.path


def test_auto_is_the_newest_unfinished_run_whatever_its_name(tmp_path: Path) -> None:
    make_run(tmp_path, "quickstart", 5.0, "finished")
    make_run(tmp_path, "z-older", 1.0, "failed")
    wanted = make_run(tmp_path, "a-newer", 2.0, "running")  # killed with its machine
    make_run(tmp_path, "b-without", 3.0, "failed", step=0)
    path, checkpoints = find_run(config(tmp_path, "--resume", "auto"))
    assert path == wanted and checkpoints[0].parent.parent == wanted


def test_auto_starts_afresh_where_there_is_nothing(tmp_path: Path) -> None:
    assert find_run(config(tmp_path / "none", "--resume", "auto"))[1] == []
    assert find_run(config(tmp_path, "--resume", "auto", "--run", "new")) == (tmp_path / "new", [])


def test_a_checkpoint_may_be_continued_under_another_name(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old", 1.0, "failed")
    path, checkpoints = find_run(config(tmp_path, "--resume", str(old), "--run", "branch"))
    assert path == tmp_path / "branch" and checkpoints[0].parent.parent == old


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "a\nb"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(MotleyError, match="is a name, not a path"):
        find_run(config(tmp_path, "--run", name))

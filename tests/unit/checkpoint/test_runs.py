"""Which run ``--resume`` means."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley.checkpoint.run import Run, find_run, new_folder
from motley.checkpoint.store import Checkpoints
from motley.config.options import Config
from motley.errors import MotleyError
from motley.records.run_folder import RunFolder
from motley.train.command_line import read_config, training_parser


def config(logs: Path, *words: str) -> Config:
    return read_config(training_parser("test"), ["--logs", str(logs), *words])


def make_run(
    logs: Path, name: str, started: float, status: str, step: int = 3, **more: object
) -> Path:
    folder = RunFolder(logs / name)
    folder.create()
    folder.write_run({"status": status, "started": started, **more})
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


def test_auto_passes_over_what_learns_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_run(tmp_path, "images", 1.0, "failed", config={"task": "image"})
    own = make_run(tmp_path, "own", 2.0, "stopped", config={"task": "/home/me/sums.py"})
    assert find_run(config(tmp_path, "--resume", "auto"))[0] == images
    assert f"skips {own}, which has --task /home/me/sums.py" in capsys.readouterr().out
    for task, wanted in (("./sums.py", own), ("image", images)):
        again = Config(logs=str(tmp_path), resume="auto", task=task)
        assert find_run(again)[0] == wanted


def test_auto_says_that_it_starts_afresh_where_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world: Any = SimpleNamespace(rank=0, from_first=lambda make: make())
    for words, says in (
        ((), f"{tmp_path} has no unfinished run with a checkpoint, so --resume auto starts a new"),
        (
            ("--run", "new"),
            f"{tmp_path / 'new'} has no checkpoint, so --resume auto starts the run",
        ),
    ):
        assert Run.find(world, config(tmp_path, "--resume", "auto", *words)).resume_from == []
        assert says in capsys.readouterr().out


def test_a_checkpoint_may_be_continued_under_another_name(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old", 1.0, "failed")
    path, checkpoints = find_run(config(tmp_path, "--resume", str(old), "--run", "branch"))
    assert path == tmp_path / "branch" and checkpoints[0].parent.parent == old


@pytest.mark.parametrize("content", ["", "[" * 200_000, "[]", '{"config": 7}', "\xff"])
def test_auto_passes_over_a_damaged_run_and_names_it(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = make_run(tmp_path, "good", 1.0, "failed")
    damaged = make_run(tmp_path, "bad", 2.0, "failed")
    (damaged / "run.json").write_bytes(content.encode("latin-1"))
    assert find_run(config(tmp_path, "--resume", "auto"))[0] == wanted
    said = capsys.readouterr().out
    assert f"{damaged / 'run.json'} is damaged" in said and "--run bad --resume auto" in said
    path, checkpoints = find_run(config(tmp_path, "--resume", "auto", "--run", "bad"))
    assert path == damaged and len(checkpoints) == 1


def test_a_run_of_ones_own_that_is_damaged_goes_on_from_its_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = make_run(tmp_path, "bad", 2.0, "failed")
    (damaged / "run.json").write_text("")
    for words in (("--run", "bad", "--resume", "auto"), ("--resume", str(damaged))):
        path, checkpoints = find_run(config(tmp_path, *words))
        said = capsys.readouterr().out
        assert (
            f"{damaged / 'run.json'} is damaged" in said
            and "The run continues from its checkpoints" in said
        )
    world: Any = SimpleNamespace(rank=0)
    assert Run(RunFolder(path), checkpoints, world).read_continued() == {}


def test_runs_of_the_same_second_get_a_number(tmp_path: Path) -> None:
    first = find_run(config(tmp_path))[0]
    made = [new_folder(first) for _ in range(3)]
    assert made == [first, *(first.with_name(f"{first.name}-{n}") for n in (2, 3))]
    assert all(path.is_dir() for path in made)
    (tmp_path / "file").write_text("")
    assert new_folder(tmp_path / "file" / "run") == tmp_path / "file" / "run", "refused later"


def test_a_copy_of_a_checkpoint_is_continued_in_a_run_of_its_own(tmp_path: Path) -> None:
    old = make_run(tmp_path / "logs", "old", 1.0, "failed")
    copy = shutil.copytree(next((old / "checkpoints").glob("step_*")), tmp_path / "good")
    path, checkpoints = find_run(config(tmp_path / "logs", "--resume", str(copy)))
    assert path.parent == tmp_path / "logs" and checkpoints == [copy]


@pytest.mark.parametrize("words", [(), ("--run", "here"), ("--resume", "auto")])
def test_an_empty_logs_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(MotleyError, match="--logs is empty; name a folder"):
        find_run(read_config(training_parser("test"), ["--logs", "", *words]))


def test_an_empty_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="--run is empty; give a name"):
        find_run(config(tmp_path, "--run", "", "--resume", "auto"))


def test_a_link_in_place_of_a_run_folder_is_refused(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old", 1.0, "failed")
    (tmp_path / "link").symlink_to(old)
    for words in (("--run", "link", "--resume", "auto"), ("--resume", str(tmp_path / "link"))):
        with pytest.raises(MotleyError, match=f"symbolic link to {old}; name that folder"):
            find_run(config(tmp_path, *words))


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "a\nb"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(MotleyError, match="is a path, and has to be a name"):
        find_run(config(tmp_path, "--run", name))

"""torch_dist/verify.py: what of a run is whole, and which file is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from forked import run_script

from motley.checkpoint.read import Finding, verify
from motley.checkpoint.store import Checkpoints
from motley.errors import MotleyError
from motley.records.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Finished, with two checkpoints."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_run({"status": "finished"})
    for rank in range(2):
        with folder.steps(rank) as lines:
            for step in range(4):
                lines.write({"step": step})
    folder.event("overflow", step=3)
    checkpoints = Checkpoints(folder.checkpoints, 2)
    for step in (2, 4):
        checkpoints.save({"model.x": torch.ones(300)}, {"step": step})
    return folder


def damaged(found: list[Finding]) -> list[str]:
    return [each.text for each in found if each.damaged]


def test_what_is_whole_is_said_of_each_file(run: RunFolder) -> None:
    found = list(verify(run.path))
    assert not damaged(found)
    text = "\n".join(each.text for each in found)
    assert "run.json: finished" in text and "steps.rank1.jsonl: 4 lines" in text
    assert "events.jsonl: 1 lines" in text
    assert "step_00000004: whole, step 4" in text and "step_00000002: whole, step 2" in text
    one = run.checkpoints / "step_00000002"
    assert [each.text for each in verify(one)] == [f"{one}: whole, step 2, 0.0 MiB"]


def test_a_pointer_to_a_checkpoint_that_is_gone_is_named(run: RunFolder) -> None:
    checkpoints, latest = Checkpoints(run.checkpoints, 2), run.checkpoints / "latest"
    checkpoints.set_aside_after(2)
    assert latest.read_text() == "step_00000002\n" and not damaged(list(verify(run.path)))
    shutil.rmtree(run.checkpoints / "step_00000002")
    for path in (run.path, run.checkpoints):
        checkpoints.save({"model.x": torch.ones(3)}, {"step": 1})
        latest.write_text("step_00000002\n")
        (text,) = damaged(list(verify(path)))
        assert f"{latest} is damaged: it names step_00000002, which does not exist" in text
    checkpoints.set_aside_after(0)
    assert not latest.exists()
    best = run.checkpoints / "best"
    best.symlink_to("step_00000009")
    (text,) = damaged(list(verify(run.path)))
    assert f"{best} is damaged: it names step_00000009, which does not exist" in text


def test_each_damaged_file_is_named(run: RunFolder) -> None:
    model = run.checkpoints / "step_00000002" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    (run.checkpoints / "step_00000004" / "progress.json").unlink()
    (run.path / "run.json").write_text("{")
    texts = damaged(list(verify(run.path)))
    names = (run.path / "run.json", run.checkpoints / "step_00000004" / "progress.json", model)
    for text, name in zip(texts, names, strict=True):
        assert f"{name} is damaged: " in text
    (run.path / "run.json").unlink()
    assert f"{run.path / 'run.json'} is damaged: it is missing" in damaged(list(verify(run.path)))


def test_torn_lines_are_counted_and_no_damage(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / "steps.rank0.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo\n' + json.dumps({"step": 4}) + "\n{")
    found = list(verify(run.path))
    assert not damaged(found)
    assert "5 lines; 2 more lines are cut short" in found[2].text and found[2].text.endswith(
        "line 5, 7"
    )
    assert not capsys.readouterr().out


def test_where_there_is_nothing_it_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(MotleyError, match="is neither a run nor a checkpoint"):
            list(verify(path))


def test_the_script_says_by_its_status_whether_all_is_whole(run: RunFolder, tmp_path: Path) -> None:
    done = run_script("torch_dist/verify.py", run.path)
    assert done.returncode == 0 and "DAMAGED" not in done.stdout, done.stdout + done.stderr
    (run.checkpoints / "step_00000004" / "manifest.json").write_text("{}")
    done = run_script("torch_dist/verify.py", run.path)
    assert done.returncode == 1 and done.stdout.count("DAMAGED") == 1, done.stdout + done.stderr
    assert "step_00000004/manifest.json is damaged" in done.stdout
    done = run_script("torch_dist/verify.py", tmp_path / "none")
    assert done.returncode == 2 and done.stderr.startswith("motley: ") and not done.stdout
    assert "python torch_dist/verify.py logs/RUN" in run_script("torch_dist/verify.py", "-h").stdout

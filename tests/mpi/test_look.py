"""A real run is looked at by others' tools: the notebook, and a tracker."""

import base64
import re

import nbformat
import pytest
from jobs import Jobs, Trained
from nbclient import NotebookClient
from project import DDP, LIMIT_S, ROOT
from trackers import held_by, publish

pytestmark = pytest.mark.mpi

NOTEBOOK = ROOT / "examples" / "look.ipynb"


@pytest.fixture(scope="module")
def trained(module_jobs: Jobs) -> Trained:
    return module_jobs.train(2, DDP, "looked-at", "--epochs", 2)


def test_the_notebook_runs_from_top_to_bottom(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_RUN", str(trained.folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=":")
    stored = NOTEBOOK.read_text()
    assert not re.search(r"/(home|root|tmp|usr)/", stored)
    notebook = nbformat.reads(stored, 4)
    nbformat.validate(notebook)
    assert not [
        cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")
    ]
    where = {"metadata": {"path": ROOT / "examples"}}
    client = NotebookClient(notebook, timeout=LIMIT_S, resources=where)
    told = [output for cell in client.execute().cells for output in cell.get("outputs", [])]
    assert not [output for output in told if output.output_type == "stream"]  # no warning
    shown = [output.data for output in told]
    pictures = [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
    assert len(pictures) == 4 and min(map(len, pictures)) > 8000
    said = "\n".join(data["text/plain"] for data in shown)
    assert f"{trained.folder}, finished: 48 steps, 2 evaluations" in said and "finished" in said


def test_a_tracker_has_what_was_recorded(trained: Trained) -> None:
    done = publish(trained.folder, "tensorboard", "--follow")
    assert done.returncode == 0 and not done.stderr, done.stderr
    held = held_by("tensorboard", trained.folder)
    assert [value for *_, value in held["all/loss"]] == pytest.approx(trained.losses, rel=1e-6)
    assert [step for step, *_ in held["evaluation/top1"]] == [12, 24]
    times = [when for _, when, _ in held["all/loss"]]
    assert times == pytest.approx([step["time"] for step in trained.steps()], abs=1)

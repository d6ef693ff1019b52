"""How runs differ, in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from motley.errors import MotleyError
from motley.plotting.run_diff import print_differences


def make_run(folder: Path, **content: Any) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "finished", **content}))
    return folder


def test_what_differs_is_shown_and_all_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(
        tmp_path / "one", config={"lr": 0.1, "opt": "sgd", "logs": "a"}, versions={"torch": "2.1"},
        ranks=[{"rank": 0, "host": "a", "device": "cpu", "precision": "fp32"}],
        plan={"counts": [3, 5]}, result={"top1": 0.5, "steps": 7},
    )  # fmt: skip
    other = make_run(
        tmp_path / "other", config={"lr": 0.2, "opt": "sgd", "logs": "b"},
        versions={"torch": "2.2"}, ranks=[], plan={"counts": [8]},
        result={"top1": 0.75, "steps": 7},
    )  # fmt: skip
    assert print_differences([one, other, one]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["one", "other"]
    for row in (["--lr", "0.1", "0.2"], ["torch", "2.1", "2.2"], ["top1", "0.5", "0.75"],
                ["steps", "7", "7"], ["rank", "0", "a,", "cpu,", "fp32", "-"]):  # fmt: skip
        assert row in lines
    shown = {line[0] for line in lines}
    assert not shown & {"--opt", "--logs"}


def test_one_run_differs_from_none(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=r"two runs are needed, and .*one was found"):
        print_differences([make_run(tmp_path / "one")])

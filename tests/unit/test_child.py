"""Programs that are waited for end in time, and are named where they do not."""

import time
from pathlib import Path

import pytest

from motley.checkpoint import run
from motley.cluster.processes import ChildTimeoutError, run_child


def test_what_a_program_printed_is_returned() -> None:
    done = run_child(["sh", "-c", "echo out; echo err >&2; exit 3"], 10, "")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)


def test_one_that_hangs_is_named_and_killed() -> None:
    begun = time.monotonic()
    with pytest.raises(ChildTimeoutError, match=r"^sleep 60 on \S+ did not end within 0.2 s; w"):
        run_child(["sleep", "60"], 0.2, "wait")
    assert time.monotonic() - begun < 5


def test_a_git_that_hangs_costs_the_commit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.commit()
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(run, "GIT_LIMIT_S", 0.2)
    assert run.commit() is None
    assert "git --no-optional-locks" in capsys.readouterr().err

"""What a run's compilers made is kept beside the runs, and a node that lacks it takes it."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import Done, Jobs, wait_until

pytestmark = pytest.mark.mpi

KERNEL = "triton/KEY/kernel.cubin"  # as one is after a run that compiles, which takes half a minute
NOISE = (
    "--dataset", "synthetic", "--model", "vit_digits", "--shares", "equal", "--batch-size", 8,
    "--eval-samples", 8,
)  # fmt: skip


class Node:
    """A node's own disk."""

    def __init__(self, jobs: Jobs, temporary: Path) -> None:
        self._jobs, self._temporary = jobs, temporary
        temporary.mkdir()
        self.kernel = temporary / f"motley-{os.getuid()}" / KERNEL

    def compile(self) -> None:
        self.kernel.parent.mkdir(parents=True)
        self.kernel.parents[2].chmod(0o700)
        self.kernel.write_bytes(b"a kernel")
        for path in (self.kernel, self.kernel.parent):
            os.utime(path, (time.time() + 60,) * 2)  # by the run that follows

    def train(self, name: str, *options: object, ranks: int = 2) -> Done:
        words = ("tests/support/drivers/own_cache.py", self._temporary, *NOISE, *options)
        return self._jobs.fork(ranks, *words, "--logs", self._jobs.logs, "--run", name)

    def train_some(self, name: str) -> Done:
        return self.train(name, "--max-steps", 2)


def test_a_run_that_is_killed_leaves_it_for_the_next(jobs: Jobs, tmp_path: Path) -> None:
    node, other = Node(jobs, tmp_path / "node"), Node(jobs, tmp_path / "other")
    node.compile()
    kept = jobs.logs / ".compiled"
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(node.train, "long", "--epochs", 900, ranks=1)
        wait_until(lambda: bool(list(kept.glob("*.json"))) or job.done(), 120)
        shutil.rmtree(jobs.logs / "long")  # which ends it
        assert job.result(60).code != 0 and list(kept.glob("*.tar.gz"))
    # What is compiled names its own place, so it is of use at the same one alone.
    shutil.rmtree(node.kernel.parents[2])
    done = node.train_some("next")
    assert done.code == 0 and node.kernel.read_bytes() == b"a kernel"
    assert done.output.count("comes from") == 1
    (event,) = [
        json.loads(line) for line in (jobs.logs / "next" / "events.jsonl").read_text().splitlines()
        if "compile_archive" in line
    ]  # fmt: skip
    assert event["text"] in done.output
    assert "comes from" not in other.train_some("other").output


def _open(kept: Path) -> None:
    kept.chmod(0o777)


def _is_a_file(kept: Path) -> None:
    shutil.rmtree(kept)
    kept.write_text("")


@pytest.mark.parametrize(
    ("change", "says"), [(_open, "other users can write to it"), (_is_a_file, "Not a directory")]
)
def test_what_cannot_be_taken_or_kept_is_said_once_and_ends_nothing(
    jobs: Jobs, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    node = Node(jobs, tmp_path / "node")
    node.compile()
    assert node.train_some("first").code == 0
    change(jobs.logs / ".compiled")
    node.kernel.with_name("new.cubin").write_bytes(b"another")
    done = node.train("second", "--max-steps", 20)
    assert done.code == 0, done.output
    assert done.output.count(says) == 1, done.output

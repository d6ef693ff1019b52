"""Jobs of several ranks, by mpirun or forked, and what tests wait for."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from project import LIMIT_S, ROOT, environment
from warm.ranks import WarmRanks, keep_place


@dataclass(frozen=True)
class Done:
    """A job that ended."""

    code: int
    output: str
    seconds: float


def needs(program: str, why: str) -> None:
    """Skip the test where ``program`` is missing; with CI=true that is a failure."""
    if shutil.which(program) is None:
        message = f"{program} is not installed, so {why} is not tried"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


class Jobs:
    """Starts jobs and ends what is left of them.

    Args:
        ranks: for jobs that need no launcher.
    """

    def __init__(self, folder: Path, ranks: WarmRanks) -> None:
        self.logs = folder / "logs"
        self._ranks = ranks
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, ranks: int, *words: object, entry: str | Path = "./entry_cn.sh", **extra: str
    ) -> subprocess.Popen[str]:
        """``mpirun -np RANKS --hostfile hosts.txt ./entry_cn.sh WORDS...``, not waited for."""
        job = subprocess.Popen(
            ["mpirun", "-np", str(ranks), "--hostfile", "hosts.txt", str(entry), *map(str, words)],
            cwd=ROOT, env=environment(**extra), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        keep_place(job.pid)
        self._started.append(job)
        return job

    def wait(self, job: subprocess.Popen[str], limit: float = LIMIT_S) -> Done:
        """Wait for a job; the test fails if it takes longer than ``limit`` seconds."""
        start = time.monotonic()
        output, _ = job.communicate(timeout=limit)
        return Done(job.returncode, output, time.monotonic() - start)

    def run(
        self, ranks: int, *words: object, entry: str | Path = "./entry_cn.sh", **extra: str
    ) -> Done:
        """Run any script on ``ranks`` ranks of mpirun."""
        return self.wait(self.start(ranks, *words, entry=entry, **extra))

    def fork(self, ranks: int, *words: object, folder: Path | None = None, **extra: str) -> Done:
        """The same without mpirun and without importing torch: a second in place of ten.

        Args:
            folder: for the ranks' output and the numbers of their processes.
            extra: variables of their environment.
        """
        start = time.monotonic()
        folder = folder or Path(tempfile.mkdtemp(prefix="ranks-", dir=self.logs.parent))
        argument = {"words": [*map(str, words)], "variables": extra}
        ended = self._ranks.run(ranks, "warm.script:main", argument, folder, LIMIT_S)
        assert not ended.timed_out, ended.output
        code = next((code for code in ended.codes if code), 0)
        return Done(code, ended.output, time.monotonic() - start)

    def train(self, ranks: int, script: str, name: str, *options: object) -> "Trained":
        """Train to the end on forked ranks, or fail the test with the job's output."""
        # Tests stop runs by --max-steps to continue them: one schedule for both halves.
        stops = "--max-steps" in options and "--epochs" not in options
        epochs = ("--epochs", 30) if stops else ()
        words = ("--logs", self.logs, "--run", name, *epochs, *options)
        done = self.fork(ranks, script, *words)
        assert done.code == 0, done.output
        return Trained(self.logs / name, done)

    def end(self) -> None:
        """Kill what a failed test left."""
        for job in self._started:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()


@dataclass(frozen=True)
class Trained:
    """A finished run and its records."""

    folder: Path
    done: Done

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Step records of one rank."""
        return [json.loads(line) for line in (self.folder / f"steps.rank{rank}.jsonl").open()]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """Its evaluations."""
        return [json.loads(line) for line in (self.folder / "epochs.jsonl").open()]

    @property
    def losses(self) -> list[float]:
        """Global loss of each step."""
        return [step["loss"] for step in self.steps()]

    @property
    def run(self) -> dict[str, Any]:
        """run.json"""
        content: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return content

    @property
    def events(self) -> list[dict[str, Any]]:
        """events.jsonl"""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.open()] if path.exists() else []


def wait_until(condition: Callable[[], bool], limit: float) -> None:
    """Poll; the test fails after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        asked = time.monotonic()
        if condition():
            return
        answered = time.monotonic()
        assert answered < deadline, f"not within {limit} s"
        time.sleep(max(0.02, answered - asked))  # what is waited for needs the processor too


def processes_of(mark: str) -> list[int]:
    """Processes with ``mark`` in their command line (a run's unique logs folder, say)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if mark in command and not zombie and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found

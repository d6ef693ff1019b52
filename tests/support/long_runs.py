"""A run that goes on until something ends it, and how far it has come."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Jobs, processes_of, wait_until

from motley.records.run_folder import RunFolder

LONG = ("--epochs", 500, "--micro-batch", 16, "--shares", "equal")


def start(jobs: Jobs, script: str, ranks: int = 3, **extra: str) -> subprocess.Popen[str]:
    """A long run that has come past its tenth step."""
    job = jobs.start(ranks, script, "--logs", jobs.logs, "--run", "long", *LONG, **extra)
    wait_until(lambda: steps_done(jobs.logs / "long") > 10 or job.poll() is not None, 120)
    assert job.poll() is None, f"it has ended before: {job.communicate()[0]}"
    return job


def steps_done(folder: Path) -> int:
    """How many steps rank 0 has recorded in a run's folder."""
    path = folder / "steps.rank0.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def rank_process(logs: Path, rank: int) -> int:
    """The process of one rank, by its own environment."""
    for pid in processes_of(str(logs)):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"OMPI_COMM_WORLD_RANK={rank}".encode() in environ:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def status(jobs: Jobs) -> dict[str, Any]:
    """The long run's run.json."""
    return RunFolder(jobs.logs / "long").read_run()


def goes_on(steps: Callable[[], int]) -> None:
    """Wait for some more steps."""
    now = steps()
    wait_until(lambda: steps() > now + 5, 30)

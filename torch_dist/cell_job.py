"""Starts one run of a cell, by mpirun or by srun, and ends it with all its processes."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.cluster.hostfile import Host, allocated_nodes, srun_words
from motley.errors import MotleyError
from motley.launch.process import die_with_parent
from motley.sweep.matrix import Cell, Matrix, first_hosts
from motley.sweep.results import BaselineFolder

ROOT = Path(__file__).resolve().parents[1]
_EVAL_IMAGES = 512  # of a run: what counts is its training, and a limit is for that
_GRACE_S = 10.0  # for a job that was told to stop


@dataclass(frozen=True)
class Launcher:
    """What starts ranks.

    Attributes:
        words: the command with its own options.
        slurm: it is srun, on nodes of the allocation that this process is in.
    """

    words: tuple[str, ...]
    slurm: bool

    @classmethod
    def of(cls, command: str | None, slurm: bool) -> "Launcher":
        """As the user wrote it; None: the usual one."""
        usual = srun_words() if slurm else ["mpirun"]
        words = usual if command is None else shlex.split(command)
        return cls(tuple(words) or ("",), slurm)

    def check(self) -> None:
        """MotleyError if it cannot start anything here."""
        if shutil.which(self.words[0]) is None:
            raise MotleyError(
                f"there is no {self.words[0]!r} on PATH; put .venv/bin there, or name "
                "it with --mpirun"
            )
        if self.slurm and not allocated_nodes():
            raise MotleyError(
                "--nodes is of Slurm's allocation, and this is in none; submit the line with "
                "setup/slurm_job.sh --array"
            )

    def line(self, hosts: Sequence[Host], hostfile: Path) -> list[str]:
        """The words before the ranks' own.

        Args:
            hostfile: is written, where it is of use.
        """
        ranks = sum(host.slots for host in hosts)
        if self.slurm:
            each = hosts[0].slots
            places = [f"--nodes={len(hosts)}", f"--ntasks={ranks}", f"--ntasks-per-node={each}"]
            return [*self.words, *places]
        hostfile.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
        return [*self.words, "-np", str(ranks), "--hostfile", str(hostfile.absolute())]


def run_one(
    matrix: Matrix, cell: Cell, repeat: int, folder: BaselineFolder, launcher: Launcher
) -> tuple[int | None, float]:
    """One run, ended with all its processes if it takes too long.

    Returns:
        Its exit status, None if it was ended; and its seconds.
    """
    hosts, _ = first_hosts(cell, matrix.hosts)
    attempt = folder.attempt(cell, repeat)
    if attempt.path.exists():  # of a break in the middle of it
        shutil.rmtree(attempt.path)
    script, *words = cell.words
    command = [
        *launcher.line(hosts, folder.path / f"hosts.{cell.hosts}.txt"), "./entry_cn.sh", script,
        "--eval-samples", str(_EVAL_IMAGES), *matrix.options, *words,
        "--max-steps", str(matrix.steps), "--seed", "0",
        "--logs", str(folder.cells.absolute()), "--run", attempt.path.name,
    ]  # fmt: skip
    start = time.monotonic()
    with folder.output(cell, repeat).open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        job = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )  # fmt: skip
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = job.wait(cell.limit_s or matrix.limit_s)
        finally:
            _end(job)
    return status, time.monotonic() - start


def _end(job: subprocess.Popen[bytes]) -> None:
    """Stop a job, with all that is left of it on this host; its ranks elsewhere end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)
            return

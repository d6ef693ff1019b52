"""An array of Slurm's over a matrix of torch_dist/baseline_measure.py: a task for each cell."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cn

from motley.child import run_child
from motley.cluster.slurm import srun_words
from motley.errors import MotleyError

PREPARE_LIMIT_S = 600.0  # to read the matrix and what is measured of it
_SCRIPT = "baseline_measure.py"
_EXAMPLE = "slurm_job.sh --array torch_dist/baseline_measure.py --matrix strategies"


@dataclass(frozen=True)
class Array:
    """What is measured.

    Attributes:
        words: of the measuring command, whose last option is a task's number.
        rest: what follows them, for every run.
        tasks: numbers of the cells that have something left.
        seconds: that a task takes at most.
        folder: of the results.
    """

    words: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: tuple[int, ...]
    seconds: float
    folder: Path

    @classmethod
    def of(cls, line: Sequence[str], nodes: int, ranks: int, mpi: str, dry_run: bool) -> "Array":
        """Make the folder of the results ready for tasks on so many nodes, of so many ranks each.

        Args:
            line: as the user wrote it, from baseline_measure.py on.
            dry_run: make nothing.

        Raises:
            MotleyError: it is no such line, its matrix is wrong, or all is measured.
        """
        if Path(line[0]).name != _SCRIPT:
            raise MotleyError(f"--array is for torch_dist/{_SCRIPT}, not for {line[0]}; {_EXAMPLE}")
        at = line.index("--") if "--" in line else len(line)
        start = " ".join(srun_words(mpi))
        words = (sys.executable, *line[:at], "--nodes", f"{nodes}x{ranks}", "--mpirun", start)
        rest = tuple(line[at:])
        asks = [*words, "--prepare", *(["--dry-run"] if dry_run else []), *rest]
        done = run_child(asks, PREPARE_LIMIT_S, "see whether its disk answers", cn.ROOT)
        print(done.stderr, end="", file=sys.stderr)
        if done.returncode:  # it has said why
            raise MotleyError(f"{_SCRIPT} cannot measure this matrix; nothing is submitted")
        told = json.loads(done.stdout)
        if not told["tasks"]:
            raise MotleyError(
                f"every cell of {told['folder']} is measured; --retry, after {_SCRIPT}, measures "
                "again what failed"
            )
        return cls(words, rest, tuple(told["tasks"]), told["seconds"], Path(told["folder"]))

    def numbers(self, at_once: int | None) -> str:
        """As sbatch takes them: ``0-2,5``, or ``0-2,5%4`` for four at once."""
        parts = list[list[int]]()
        for task in self.tasks:
            if parts and task == parts[-1][-1] + 1:
                parts[-1].append(task)
            else:
                parts.append([task])
        said = ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
        return f"{said}%{at_once}" if at_once else said

    def command(self) -> str:
        """A task's, for the shell of its job."""
        return (
            shlex.join([*self.words, "--task"]) + f' "$SLURM_ARRAY_TASK_ID" {shlex.join(self.rest)}'
        )

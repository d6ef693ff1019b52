"""Writes a batch script of Slurm's and submits it; the .sh beside it says how to call it."""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cn
from launch_line import LaunchLine

from motley.cluster.partitions import Partition, partitions, seconds_of_slurm
from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.text import did_you_mean

_ENTRY = "./entry_cn.sh"
_CELLS = "torch_dist/baseline_measure.py"


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm.

    Attributes:
        line: that srun is to start. name: of the job, and of the run.
        ranks, gpus, cores: of a node. time: as Slurm writes it; None: the partition's own.
        before_s: of the end, that the ranks are told. cells: of a matrix, one a job; 0: no array.
    """

    line: tuple[str, ...]
    name: str
    partition: str
    nodes: int
    ranks: int
    gpus: int
    cores: int
    time: str | None
    before_s: int
    requeue: bool
    mpi: str
    account: str | None = None
    container: Path | None = None


def main(words: Sequence[str]) -> int:
    """Show what there is, or write the script and submit it."""
    options = parse(words)
    if not options.line and not options.array:
        show(partitions())
        return 0
    job = plan(options, partitions())
    script = text_of(job)
    if options.dry_run:
        print(script, end="")
        return 0
    path = cn.ROOT / "logs" / f"{job.name}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    print(f"{job.name}: {said(job)}; written to {path}")
    if not options.submit:
        print(f"submit it with: sbatch {path}")
        return 0
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise MotleyError(f"sbatch: {done.stderr.strip() or 'no word'}")
    number = done.stdout.strip().partition(";")[0]
    print(f"job {number}; its output: {path.with_suffix('')}.{number}.out; end it: scancel {number}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options, and the line after them."""
    parser = cn.Parser("slurm_job")
    for name, usual in (("nodes", 1), ("gpus", None), ("ranks", 1), ("before", 180)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name in ("time", "partition", "account", "array"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--mpi", default="none")
    parser.add_argument("--container", type=Path)
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--submit", action="store_true")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    for name in ("nodes", "ranks", "before"):
        if getattr(options, name) < 1:
            raise MotleyError(f"--{name} {getattr(options, name)} is less than 1")
    if options.container and not options.container.exists():
        raise MotleyError(f"--container {options.container} is no file; see setup/containers/")
    if options.time:
        seconds_of_slurm(options.time)
    return options

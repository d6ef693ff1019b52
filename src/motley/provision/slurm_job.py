"""Write a batch script for Slurm that runs a training, and submit the script.

  bash setup/slurm_job.sh --nodes 2 --time 4:00:00 ./entry_cn.sh --epochs 90 --run vit
  bash setup/slurm_job.sh --nodes 2 --time 1:00:00 --submit --requeue ./entry_cn.sh --epochs 5
  bash setup/slurm_job.sh --nodes 2 --array --submit torch_dist/baseline_measure.py --matrix full
  bash setup/slurm_job.sh                       # shows the partitions

In the job, srun starts the line in the repository's folder. sinfo reports the partitions, the cores
and GPUs of a node, and the longest time. A request for more than that is refused before it waits in
a queue. Each GPU gets a rank. A node without GPUs gets one rank.

Some minutes before the end of the allocation Slurm signals all ranks, which save after their
current step. The job then ends. The next job with the same line continues from the saved step. With
--requeue, the same job continues by itself. No step is lost or done twice.

With --array the line runs baseline_measure.py. Each cell of its matrix becomes a task of a job
array, with nodes of its own. Each task writes the table of all runs that have ended by then. A
second run of the same line submits the remaining cells. Results of two tasks can be compared only
if their nodes have equal hardware.

Options, before the line:
  --nodes N          default 1
  --gpus N           GPUs of each node. Default: all GPUs; 0: none
  --ranks N          ranks on each node without GPUs, default 1
  --time TIME        time limit: 30 (minutes), 4:00:00 or 1-12. Default: the partition's limit
  --partition NAME   default: the cluster's default; --account NAME: the account that pays
  --mem, --qos, --constraint, --gres, --exclude   as sbatch takes them
  --sbatch=OPTION    any other option of sbatch, as in --sbatch=--mail-type=END. May be repeated
  --run-before CMD   a command before srun, as in --run-before "module load cuda". May be repeated
  --before SECONDS   seconds before the end at which Slurm signals the ranks. Default: 180
  --requeue          continue in the same job, until the training has finished
  --array            run a task for each cell of a matrix. With --at-once K: at most K at a time
  --container IMAGE  run the ranks in an Apptainer image
  --mpi KIND         srun's --mpi. Default none: the ranks connect without srun's help
  --submit           submit the script with sbatch. Default: write it, and print how
  --dry-run          print the script, write nothing; works without Slurm too

Exit status: 0 the script was written or submitted, 2 nothing was done.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from motley.cluster.hostfile import Partition, partitions, seconds_of_slurm, srun_words
from motley.cluster.processes import run_child
from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.provision import setup_command
from motley.provision.launch_line import LaunchLine
from motley.provision.setup_command import PLACE, many
from motley.text import did_you_mean

PREPARE_LIMIT_S = 600.0  # seconds for reading the matrix and its results
_MATRIX_SCRIPT = "baseline_measure.py"
_EXAMPLE = "setup/slurm_job.sh --array torch_dist/baseline_measure.py --matrix strategies"


@dataclass(frozen=True)
class Array:
    """The measurement that the tasks of a job array share.

    Attributes:
        words: words of the measuring command. Each task adds its number to them.
        rest: words after ``--`` in the user's line, which are given to every run.
        tasks: numbers of the cells that have runs left.
        seconds: time limit of a task, in seconds.
        folder: folder of the results.
    """

    words: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: tuple[int, ...]
    seconds: float
    folder: Path

    @classmethod
    def prepare(
        cls, line: Sequence[str], nodes: int, ranks: int, mpi: str, dry_run: bool
    ) -> "Array":
        """Prepare the folder of the results for tasks of ``nodes`` nodes with ``ranks`` ranks each.

        Args:
            line: the user's line, starting with baseline_measure.py or ``motley baselines``.
            nodes: nodes of a task.
            ranks: ranks on each node.
            mpi: kind of MPI that srun uses.
            dry_run: True: create nothing.

        Raises:
            MotleyError: the line is no line of baseline_measure.py, its matrix has an error, or all
                cells are measured.
        """
        if [Path(line[0]).name, *line[1:2]] == ["motley", "baselines"]:
            line = ["-P", "-m", "motley.cli", *line[1:]]
        elif Path(line[0]).name != _MATRIX_SCRIPT:
            raise MotleyError(
                f"--array runs torch_dist/{_MATRIX_SCRIPT} alone, and the command is {line[0]}; "
                f"{_EXAMPLE}"
            )
        at = line.index("--") if "--" in line else len(line)
        start = " ".join(srun_words(mpi))
        words = (sys.executable, *line[:at], "--nodes", f"{nodes}x{ranks}", "--mpirun", start)
        rest = tuple(line[at:])
        asks = [*words, "--prepare", *(["--dry-run"] if dry_run else []), *rest]
        done = run_child(asks, PREPARE_LIMIT_S, "see whether its disk answers", PLACE)
        print(done.stderr, end="", file=sys.stderr)
        if done.returncode:  # its stderr has the reason
            raise MotleyError(
                f"{_MATRIX_SCRIPT} cannot measure this matrix, so nothing was submitted; its "
                "error is above"
            )
        request = json.loads(done.stdout)
        if not request["tasks"]:
            raise MotleyError(
                f"every cell of {request['folder']} is measured already; to measure failed cells "
                f"again, add --retry after {_MATRIX_SCRIPT}"
            )
        return cls(
            words, rest, tuple(request["tasks"]), request["seconds"], Path(request["folder"])
        )

    def numbers(self, at_once: int | None) -> str:
        """Return the task numbers for sbatch: ``0-2,5``, or ``0-2,5%4`` for four at once."""
        parts = list[list[int]]()
        for task in self.tasks:
            if parts and task == parts[-1][-1] + 1:
                parts[-1].append(task)
            else:
                parts.append([task])
        text = ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
        return f"{text}%{at_once}" if at_once else text

    def command(self) -> str:
        """Return the shell command that measures the cell of a task."""
        return (
            shlex.join([*self.words, "--task"]) + f' "$SLURM_ARRAY_TASK_ID" {shlex.join(self.rest)}'
        )


SBATCH_LIMIT_S = 60.0
_WORD = re.compile(r"[\w.-]+", re.ASCII)
_REQUEST = re.compile(r"[\w.,:;=+*&|!()\[\]@%/-]+", re.ASCII)  # as in gpu:a100:2 and a&[b|c]
_REQUESTS = ("account", "mem", "qos", "constraint", "gres", "exclude")  # sbatch's own options
_PAUSED = FaultKind.PAUSED.code  # exit status of a job that has saved and may continue


@dataclass(frozen=True)
class Job:
    """The request to Slurm.

    Attributes:
        line: the line that srun is to start.
        name: name of the job, and of the run.
        partition: name of the partition.
        nodes: number of nodes.
        ranks: number of ranks on each node.
        gpus: number of GPUs on each node.
        cores: number of cores for each rank; 0: the cluster's default.
        time: longest time, in Slurm's notation; None: the partition's default.
        before_s: seconds before the end of the allocation at which Slurm signals the ranks.
        requeue: True if Slurm starts the job again until the training has finished.
        mpi: value of srun's option ``--mpi``.
        requests: other options of sbatch, without ``--``, as in ``mem=64G``.
        run_before: shell commands that precede srun.
        container: Apptainer image in which the ranks run; None: none.
        array: the cells of a measurement, one per task; None for a training.
        at_once: largest number of tasks at the same time; None: no limit.
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
    requests: tuple[str, ...] = ()
    run_before: tuple[str, ...] = ()
    container: Path | None = None
    array: Array | None = None
    at_once: int | None = None


# Slurm sends a signal to all ranks, which save and then end with the status _PAUSED.
_SCRIPT = """\
#!/bin/bash
{settings}
set -uo pipefail
cd {root}
# srun does not take the cores of a task from sbatch by itself.
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
{before}{line}
status=$?
{after}exit $status
"""
_REQUEUE = """\
if [ "$status" = {paused} ]; then
  echo "motley: job $SLURM_JOB_ID goes on with the next allocation"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
"""


def main(words: Sequence[str]) -> int:
    """Show the partitions, or write the script and submit it; return the exit code."""
    options = parse(words)
    if not options.line:
        show(partitions())
        return 0
    job = plan_on_cluster(options)
    script = make_script(job)
    if options.dry_run:
        print(script, end="")
        return 0
    path = PLACE / "logs" / f"{job.name}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    print(f"{job.name}: {describe_job(job)}; written to {path}")
    if not options.submit:
        print(f"submit it with: sbatch {path}")
        return 0
    fix = "see whether Slurm answers (sinfo), and whether the job is there already (squeue --me)"
    done = run_child(["sbatch", "--parsable", path], SBATCH_LIMIT_S, fix)
    if done.returncode:
        raise MotleyError(f"sbatch refuses the job: {done.stderr.strip() or 'no message'}")
    number = done.stdout.strip().partition(";")[0]
    output = f"{number}_*" if job.array else number
    print(
        f"job {number}; its output: {path.with_suffix('')}.{output}.out; end it: scancel {number}"
    )
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, and the line after them."""
    parser = setup_command.Parser("slurm_job", __doc__)
    numbers = (("nodes", 1), ("gpus", None), ("ranks", 1), ("before", 180), ("at-once", None))
    for name, usual in numbers:
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name in ("time", "partition", *_REQUESTS):
        parser.add_argument(f"--{name}")
    for name in ("sbatch", "run-before"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("--mpi", default="none")
    parser.add_argument("--container", type=Path)
    parser.add_argument("--array", action="store_true")
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--submit", action="store_true")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    for name, least in (("nodes", 1), ("ranks", 1), ("before", 1), ("gpus", 0), ("at-once", 1)):
        given = getattr(options, name.replace("-", "_"))
        if given is not None and given < least:
            raise MotleyError(f"--{name} {given} is below {least}; give {least} or more")
    check_word("--mpi", options.mpi)
    for name in _REQUESTS:
        word = getattr(options, name)
        if word is not None and not _REQUEST.fullmatch(word):
            raise MotleyError(f"--{name} {word!r}: give one word, as sbatch --{name} takes it")
    for line in options.sbatch:
        if not re.fullmatch(r"--?[a-zA-Z][^\n\r]*", line):
            raise MotleyError(
                f"--sbatch {line!r}: give one option for sbatch, as in --sbatch=--mail-type=END"
            )
    if any("\n" in line or not line.strip() for line in options.run_before):
        raise MotleyError(
            "--run-before: give one command; repeat the option for each further command"
        )
    if options.container and options.array:
        raise MotleyError(
            "--container does not apply to --array, which measures without a container; leave it "
            "out"
        )
    if options.container and not options.container.exists():
        raise MotleyError(f"--container {options.container} is not a file")
    if options.time:
        seconds_of_slurm(options.time)
    return options


def check_word(flag: str, word: str | None) -> None:
    """Raise MotleyError if the value of an option is not one plain word.

    The batch script contains the value without quotes.
    """
    if word is not None and not _WORD.fullmatch(word):
        raise MotleyError(f"{flag} {word!r}: use letters, digits, '.', '_' and '-' alone")


def plan_on_cluster(options: argparse.Namespace) -> Job:
    """Return the job that the options describe, after a check that the cluster can run it.

    A dry run works without a cluster.
    """
    try:
        result = partitions()
    except MotleyError as error:
        if not options.dry_run:
            raise
        print(f"motley: {error}; the script is not checked against a cluster", file=sys.stderr)
    else:
        return plan(options, result)
    ranks = options.gpus or options.ranks
    assumed = Partition(
        options.partition or "", True, True, options.nodes, ranks, options.gpus or 0, None, None
    )
    return replace(plan(options, [assumed]), cores=0)


def show(found: Sequence[Partition]) -> None:
    """Print the partitions of the cluster, with their nodes and time limits."""
    rows = [
        (each.name + " (default)" * each.usual, "up" if each.up else "down", each.nodes,
         each.cores, each.gpus or "none", clock(each.most_s))
        for each in found
    ]  # fmt: skip
    print(setup_command.table(("partition", "state", "nodes", "cores", "GPUs", "at most"), rows))


def clock(seconds: float | None) -> str:
    """Return a duration in Slurm's notation."""
    if seconds is None:
        return "no end"
    minutes = int(seconds) // 60
    days, minutes = divmod(minutes, 1440)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00" if days else (
        f"{minutes // 60}:{minutes % 60:02}:00"
    )  # fmt: skip


def plan(options: argparse.Namespace, found: Sequence[Partition]) -> Job:
    """Return the job that the options describe. Raise MotleyError if the cluster cannot run it."""
    place = chosen(options.partition, found)
    most = place.most_s
    requested = seconds_of_slurm(options.time) if options.time else place.usual_s or most
    if options.nodes > place.nodes:
        raise MotleyError(
            f"--nodes {options.nodes}: the partition {place.name} has only "
            f"{many(place.nodes, 'node')}"
        )
    if (options.gpus or 0) > place.gpus:
        raise MotleyError(
            f"--gpus {options.gpus}: a node of the partition {place.name} has "
            f"{place.gpus or 'no'} GPUs"
        )
    if most is not None and (requested is None or requested > most):
        raise MotleyError(
            f"--time {options.time}: the partition {place.name} limits a job to {clock(most)}"
        )
    if requested is not None and options.before >= requested:
        raise MotleyError(
            f"--before {options.before}: the whole job takes {requested:.0f} s, so the "
            "ranks would end before they begin; give a longer --time"
        )
    gpus = place.gpus if options.gpus is None else options.gpus
    ranks = gpus or options.ranks
    if ranks > place.cores:
        raise MotleyError(
            f"--ranks {ranks}: a node of the partition {place.name} has {place.cores} cores"
        )
    requests = [f"{name}={word}" for name in _REQUESTS if (word := getattr(options, name))]
    requests += [line.lstrip("-") for line in options.sbatch]
    job = Job(
        (), "", place.name, options.nodes, ranks, gpus, max(1, place.cores // ranks), options.time,
        options.before, options.requeue, options.mpi, tuple(requests), tuple(options.run_before),
        options.container,
    )  # fmt: skip
    return with_array(job, options, place) if options.array else with_line(job, options)


def with_line(job: Job, options: argparse.Namespace) -> Job:
    """Return a job that runs a training, with the line and name from the options."""
    line = LaunchLine.parse(["srun", *options.line]).named(time.strftime("%Y-%m-%d_%H-%M-%S"))
    check_word("--run, which names the job,", line.folder.name)
    return replace(job, line=line.resumed(has_own=False).words[1:], name=line.folder.name)


def with_array(job: Job, options: argparse.Namespace, place: Partition) -> Job:
    """Return a job array that measures a matrix. Its time is the longest time limit of a cell."""
    line = options.line[1:] if options.line[0] == "--" else options.line
    array = Array.prepare(line, job.nodes, job.ranks, job.mpi, options.dry_run)
    check_word("the folder of the results, which names the job,", array.folder.name)
    most = array.seconds if place.most_s is None else min(array.seconds, place.most_s)
    return replace(
        job, name=array.folder.name, array=array, at_once=options.at_once,
        time=options.time or clock(most + 59),
    )  # fmt: skip


def chosen(name: str | None, found: Sequence[Partition]) -> Partition:
    """Return the partition of this name, or the default one.

    Raises:
        MotleyError: there is no such partition, or it is down.
    """
    known = {each.name: each for each in found}
    if name is None:
        usual = [each for each in found if each.usual] or list(found)
        if not usual:
            raise MotleyError(
                "this cluster has no partition that you may use (sinfo lists none); ask its "
                "administrator"
            )
        name = usual[0].name
    if name not in known:
        raise MotleyError(
            f"--partition {name} does not exist{did_you_mean(name, known)}; the partitions are "
            f"{', '.join(known)}"
        )
    if not known[name].up:
        raise MotleyError(f"--partition {name} is down; ask the administrator of the cluster")
    return known[name]


def make_script(job: Job) -> str:
    """Return the text of the batch script."""
    logs, number = PLACE / "logs", "%A_%a" if job.array else "%j"
    settings = {
        "job-name": job.name, "partition": job.partition or None,
        "nodes": job.nodes, "ntasks-per-node": job.ranks, "cpus-per-task": job.cores or None,
        "gpus-per-node": job.gpus or None, "time": job.time,
        "signal": None if job.array else f"USR2@{job.before_s}",
        "array": job.array.numbers(job.at_once) if job.array else None,
        "output": f'"{logs / job.name}.{number}.out"', "open-mode": "append",
    }  # fmt: skip
    lines = [f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None]
    lines += [f"#SBATCH --{request}" for request in job.requests]
    lines.append(f"#SBATCH --{'' if job.requeue else 'no-'}requeue")
    inside = ()
    if job.container:
        nv = ("--nv",) if job.gpus else ()
        inside = ("apptainer", "exec", *nv, "--bind", str(PLACE), str(job.container.absolute()))
    ranks = shlex.join((*srun_words(job.mpi), *inside, *job.line))
    return _SCRIPT.format(
        settings="\n".join(lines), root=shlex.quote(str(PLACE)),
        before="".join(f"{command}\n" for command in job.run_before),
        line=job.array.command() if job.array else ranks,
        after=_REQUEUE.format(paused=_PAUSED) if job.requeue and not job.array else "",
    )  # fmt: skip


def describe_job(job: Job) -> str:
    """Return a text for the user that describes the job."""
    each = many(job.gpus, "GPU") if job.gpus else many(job.ranks, "rank")
    if job.array:
        return (
            f"{many(len(job.array.tasks), 'task')} on {many(job.nodes, 'node')} of "
            f"{job.partition} with {each}, {job.time} each at most; the table after each task: "
            f"{job.array.folder / 'results.md'}"
        )
    return (
        f"{many(job.nodes, 'node')} of {job.partition} with {each}, {job.cores} cores a rank, "
        f"{job.time or 'the time that is usual there'}; saves {job.before_s} s before the end"
    )


if __name__ == "__main__":
    setup_command.run(main)

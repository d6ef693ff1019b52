r"""Measure many ways to train, one after the other, and show the fastest on these hosts.

    python torch_dist/baseline_measure.py --matrix precision --steps 10 --repeats 1
    python torch_dist/baseline_measure.py --matrix strategies -- --model vit_base_patch16_224 \
        --dataset synthetic
    python torch_dist/baseline_measure.py --matrix my.toml --dry-run

Each cell of the matrix is one way to train, and starts an mpirun of its own. The cell uses as many
of the first hosts of hosts.txt as it needs. Each cell ends at its time limit at the latest, and a
failed cell leaves no process for the next cell. Repeats are interleaved (A B C, C B A). An fp32 run
of the same samples comes first. The loss of each cell is compared with the loss of that run, which
shows a fast but wrong cell. Results of finished runs stay, and the same command continues after an
interruption. Words after ``--`` are given to every run. motley/sweep/matrix.py shows the form of a
matrix file, and motley/sweep/presets/ has the presets. On a cluster, setup/slurm_job.sh --array
gives each cell a job.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from motley import ROOT
from motley.cluster.hostfile import Host, allocated_nodes, read_hosts, srun_words
from motley.cluster.processes import handle_end
from motley.config.option import get_flag, get_options
from motley.config.options import GROUPS
from motley.engines.strategies import TORCH, ZERO, StrategyOptions, known_strategies, list_engines
from motley.errors import MotleyError
from motley.launch.process import die_with_parent
from motley.provision.setup_command import PLACE, table
from motley.sweep.matrix import PRESETS, Cell, KnownNames, Matrix, first_hosts, read_matrix, shorter
from motley.sweep.results import DONE, BaselineFolder
from motley.sweep.table import HEAD, Row, read_rows, shown, write_rows
from motley.text import RUN, clock, did_you_mean, escape_unprintable, typed_command
from motley.train.command_line import read_config, training_parser

_START_S = 15.0  # least time before a run's first step, for an estimate
_TASK_S = 60.0  # time of a task besides its runs
_EVAL_IMAGES = 512  # images of each evaluation: few, since only the training is measured
_GRACE_S = 10.0  # seconds in which a job has to stop after its signal


@dataclass(frozen=True)
class CellLauncher:
    """The launcher of the ranks of one measurement: mpirun, srun, or a command of the user's.

    Attributes:
        words: words of the launcher's command line, without the hostfile and the ranks' command.
        slurm: True if the command is srun, on nodes of the allocation that this process is in.
    """

    words: tuple[str, ...]
    slurm: bool

    @classmethod
    def from_command(cls, command: str | None, slurm: bool) -> "CellLauncher":
        """Return the launcher in the user's command, or mpirun or srun if ``command`` is None."""
        usual = srun_words() if slurm else ["mpirun"]
        words = usual if command is None else shlex.split(command)
        return cls(tuple(words) or ("",), slurm)

    def check(self) -> None:
        """Raise MotleyError if the launcher cannot start ranks on this machine."""
        if shutil.which(self.words[0]) is None:
            raise MotleyError(
                f"{self.words[0]!r} is not on PATH; add "
                f"{('.venv/bin' if ROOT else Path(sys.executable).parent)} to PATH, or give its "
                "path with --mpirun"
            )
        if self.slurm and not allocated_nodes():
            raise MotleyError(
                "--nodes needs an allocation of Slurm, and this shell is in none; submit the "
                "command with setup/slurm_job.sh --array"
            )

    def line(self, hosts: Sequence[Host], hostfile: Path) -> list[str]:
        """Return the words that come before the command of a rank.

        Args:
            hosts: hosts of the ranks.
            hostfile: path at which a hostfile is written if the launcher needs one.
        """
        ranks = sum(host.slots for host in hosts)
        if self.slurm:
            each = hosts[0].slots
            places = [f"--nodes={len(hosts)}", f"--ntasks={ranks}", f"--ntasks-per-node={each}"]
            return [*self.words, *places]
        hostfile.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
        return [*self.words, "-np", str(ranks), "--hostfile", str(hostfile.absolute())]


def main() -> int:
    """Run the measurements that the command line names; return the exit code.

    The exit code is 2 for an error of the user.
    """
    escape_unprintable()
    try:
        return measure(arguments())
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return 130


def measure(options: argparse.Namespace) -> int:
    """Run the unfinished cells of the matrix and print the table.

    Return 0 if every cell is done, else 1.
    """
    matrix = read_matrix(
        matrix_file(options.matrix), options.nodes or read_hosts(options.hostfile),
        KnownNames(known_cells(), known_options()),
        repeats=options.repeats, steps=options.steps, limit_s=options.limit, options=options.rest,
    )  # fmt: skip
    if options.only:
        matrix = shorter(matrix, options.only)
    for cell in matrix.all_cells:
        if not (PLACE / cell.script).is_file() and (ROOT or cell.script not in (TORCH, ZERO)):
            raise MotleyError(f"cell {cell.name}: the script {cell.script} does not exist")
        check_options(cell, matrix.options)
    folder = BaselineFolder(options.out or Path("baselines") / Path(options.matrix).stem)
    todo = order(matrix, folder, options.retry)
    if options.prepare:
        if not options.dry_run:
            folder.claim(matrix).close()
        print(json.dumps(plan_tasks(matrix, folder, todo)))
        return 0
    if options.dry_run:
        show_plan(matrix, folder, todo)
        return 0
    launcher = CellLauncher.from_command(options.mpirun, bool(options.nodes))
    if todo:
        launcher.check()
    for number in (signal.SIGTERM, signal.SIGHUP):
        handle_end(number, lambda number, _: sys.exit(128 + number))
    if options.task is not None:
        return run_task(matrix, folder, launcher, options.task, todo)
    with folder.claim(matrix):
        run_all(matrix, folder, launcher, todo)
    return 0 if all(row.outcome == DONE for row in write_table(matrix, folder)) else 1


def write_table(matrix: Matrix, folder: BaselineFolder) -> list[Row]:
    """Write and print the table of all finished runs; return its rows."""
    with folder.writing_table():
        rows = read_rows(folder)
        paths = write_rows(folder, rows)
    print()
    print(table(HEAD, map(shown, rows)))
    for row in rows:
        if row.outcome != DONE:
            print(f"{row.name}: {row.outcome}{f' ({row.when})' if row.when else ''}: {row.error}")
    if remaining := dict.fromkeys(cell.name for cell, _ in order(matrix, folder, retry=False)):
        print(f"not measured yet: {', '.join(remaining)}")
    draw = typed_command("python plots/plot_baselines.py")
    print(f"\n{paths[0]}, {paths[1]}; pictures: {draw} {folder.path}")
    return rows


def plan_tasks(
    matrix: Matrix, folder: BaselineFolder, todo: Sequence[tuple[Cell, int]]
) -> dict[str, Any]:
    """Return the values that setup/slurm_job.sh needs to submit the matrix as a job array.

    The values are the numbers of the unfinished cells, the time limit of one cell in seconds, and
    the folder of the results. Each cell is one task of the array: ``{"tasks": [0, 2], "seconds":
    1860.0, "folder": "baselines/full"}``.
    """
    remaining = Counter(cell for cell, _ in todo)
    most = max(
        (runs * (cell.limit_s or matrix.limit_s) for cell, runs in remaining.items()), default=0
    )
    numbers = [number for number, cell in enumerate(matrix.all_cells) if cell in remaining]
    return {"tasks": numbers, "seconds": most + _TASK_S, "folder": str(folder.path)}


def run_task(
    matrix: Matrix,
    folder: BaselineFolder,
    launcher: CellLauncher,
    number: int,
    todo: Sequence[tuple[Cell, int]],
) -> int:
    """Measure one cell of the matrix, and write the table of finished runs.

    Return 0 if the cell is done, else 1.
    """
    folder.join(matrix)
    if number >= len(matrix.all_cells):
        raise MotleyError(f"--task {number}: the matrix has only {len(matrix.all_cells)} cells")
    own = matrix.all_cells[number]
    run_all(matrix, folder, launcher, [turn for turn in todo if turn[0] == own])
    ended = {row.name: row.outcome for row in write_table(matrix, folder)}
    return 0 if ended.get(own.name) == DONE else 1


def order(matrix: Matrix, folder: BaselineFolder, retry: bool) -> list[tuple[Cell, int]]:
    """Return the runs without a result, in their order. A run is a cell and a repeat's number.

    The cells of every other repeat are in reverse order.

    Args:
        matrix: the matrix.
        folder: folder of the results.
        retry: True: run failed cells again.
    """
    turns = [(cell, 0) for cell in matrix.references]
    for repeat in range(matrix.repeats):
        turns += [(cell, repeat) for cell in matrix.cells[:: -1 if repeat % 2 else 1]]
    ended = {turn: folder.outcome(*turn) for turn in turns}
    return [turn for turn, outcome in ended.items()
            if outcome is None or (retry and outcome.kind != DONE)]  # fmt: skip


def show_plan(matrix: Matrix, folder: BaselineFolder, todo: Sequence[tuple[Cell, int]]) -> None:
    """Print the cells of the matrix, and the expected time of all runs."""
    remaining = {cell: sum(turn[0] == cell for turn in todo) for cell in matrix.all_cells}
    print(table(
        ("cell", "hosts", "batch", "runs left", "what runs"),
        ((cell.name, cell.hosts, cell.batch, runs, typed_command(shlex.join(cell.words)))
         for cell, runs in remaining.items()),
    ))  # fmt: skip
    known = [outcome.seconds for cell in remaining for _, outcome in folder.repeats(cell)]
    each = sum(known) / len(known) if known else _START_S
    so_far = "as long as those that have ended" if known else "each, before its first step"
    print(
        f"\n{len(todo)} runs of {matrix.steps} steps: {clock(each * len(todo))}"
        f"{'' if known else ' or more'} ({each:.0f} s {so_far}), at most "
        f"{clock(sum(cell.limit_s or matrix.limit_s for cell, _ in todo))}"
    )


def run_all(
    matrix: Matrix, folder: BaselineFolder, launcher: CellLauncher, todo: Sequence[tuple[Cell, int]]
) -> None:
    """Run the cells that have no result yet, and print a line for each run."""
    started = time.monotonic()
    for number, (cell, repeat) in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {cell.name}, repeat {repeat + 1}: ", end="", flush=True)
        with folder.take_cell(cell):
            status, seconds = run_one(matrix, cell, repeat, folder, launcher)
            outcome = folder.end(cell, repeat, status, seconds)
        text = f"{outcome.seconds:.0f} s"
        if outcome.kind != DONE:
            text = f"{outcome.kind}, {text}: {outcome.error}"
        remaining = (time.monotonic() - started) / number * (len(todo) - number)
        print(text + (f"; {clock(remaining)} left" if number < len(todo) else ""), flush=True)


def run_one(
    matrix: Matrix, cell: Cell, repeat: int, folder: BaselineFolder, launcher: CellLauncher
) -> tuple[int | None, float]:
    """Run one cell once, and end all its processes if it takes too long.

    Returns:
        Two values. The first is the exit status of the launcher, or None if the run took too long.
        The second is the duration of the run in seconds.
    """
    hosts, _ = first_hosts(cell, matrix.hosts)
    attempt = folder.attempt(cell, repeat)
    if attempt.path.exists():  # left by an interrupted attempt
        shutil.rmtree(attempt.path)
    script, *words = cell.words
    command = [
        *launcher.line(hosts, folder.path / f"hosts.{cell.hosts}.txt"), *rank_words(script),
        "--eval-samples", str(_EVAL_IMAGES), *matrix.options, *words,
        "--max-steps", str(matrix.steps), "--seed", str(matrix.get_seed(repeat)),
        "--logs", str(folder.cells.absolute()), "--run", attempt.path.name,
    ]  # fmt: skip
    start = time.monotonic()
    with folder.output(cell, repeat).open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        job = subprocess.Popen(
            command, cwd=PLACE, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )  # fmt: skip
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = job.wait(cell.limit_s or matrix.limit_s)
        finally:
            _end(job)
    return status, time.monotonic() - start


def rank_words(script: str) -> list[str]:
    """Return the words that start one rank of a cell, before the options of the script."""
    if ROOT:
        return ["./entry_cn.sh", script]
    motley = str(Path(sys.executable).with_name("motley"))  # the same on all hosts
    return [motley, "train"] if script in (TORCH, ZERO) else [motley, RUN, script]


def _end(job: subprocess.Popen[bytes]) -> None:
    """Stop a job and all its processes on this host. Its ranks on other hosts end too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)
            return


def check_options(cell: Cell, shared: Sequence[str]) -> None:
    """Raise MotleyError if a cell's script does not accept an option, before any run starts.

    Args:
        cell: the cell.
        shared: options of all cells.
    """

    def wrong(message: str) -> NoReturn:
        raise MotleyError(message)

    def refuse(message: str) -> NoReturn:
        wrong(f"cell {cell.name}: {message}")

    strategies = known_strategies(known_cells()[cell.strategy][0])
    parser = training_parser(cell.script, strategies)
    parser.error = wrong  # type: ignore[method-assign]
    try:
        # A script may know more.
        config = read_config(parser, [*cell.words[1:], *shared], strict=False)
        traits = list_engines(config, strategies).traits
    except MotleyError as error:
        refuse(str(error))
    if config.wire is not None and not traits.can(config.wire):
        refuse(
            f"--wire {config.wire} works only with ddp, and the cell has {cell.strategy}; "
            "choose another one"
        )


def known_cells() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the script and the options of each strategy, by the strategy's name in a matrix."""
    return {
        name: (strategy.script, words)
        for strategy in known_strategies().values()
        for name, words in strategy.named_cells().items()
    }


def known_options() -> dict[str, str]:
    """Return the options that a matrix file sets by keys of its own, each with its key."""
    own = {group for strategy in known_strategies().values() for group in strategy.options}
    return {
        flag: declared.cell
        for group in (*GROUPS, StrategyOptions, *own)
        for declared in get_options(group).values() if declared.cell
        for flag in (get_flag(declared), declared.short) if flag
    }  # fmt: skip


def matrix_file(name: str) -> Path:
    """Return the path of a preset, or of the user's own matrix file.

    Raises:
        MotleyError: there is neither a preset nor a file of this name.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise MotleyError(
            f"--matrix {name} is neither a preset{did_you_mean(name, PRESETS)} nor a file; the "
            f"presets are {', '.join(PRESETS)}"
        )
    return path


def read_nodes(text: str) -> tuple[Host, ...]:
    """Return made-up hosts for ``NODESxRANKS``, such as two nodes of four ranks for ``2x4``.

    The real names of a cluster's nodes differ from job to job.
    """
    nodes, _, ranks = text.partition("x")
    if not all(word.isdecimal() and 0 < int(word[:5]) == int(word) for word in (nodes, ranks)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give the number of nodes and the ranks of each node, as in 2x4"
        )
    return tuple(Host(f"node{number}", int(ranks)) for number in range(1, int(nodes) + 1))


def arguments() -> argparse.Namespace:
    """Return the parsed command line. Its attribute ``rest`` has the words after ``--``."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=typed_command(str(__doc__)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = f"{', '.join(PRESETS)}, or a file"
    parser.add_argument("--matrix", required=True, metavar="PRESET|FILE.toml", help=named)
    parser.add_argument("--hostfile", default="hosts.txt", metavar="FILE", help="default hosts.txt")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: baselines/<matrix>")
    usual = "default: as the matrix says, or "
    parser.add_argument("--repeats", type=int, metavar="N", help=f"{usual}3")
    parser.add_argument("--steps", type=int, metavar="K", help=f"of each run, {usual}30")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"of each run, {usual}600")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help=("measure only cells whose name contains this")
    )
    with_options = "launcher with its own options, as in 'mpirun --mca btl_tcp_if_include eno1'"
    parser.add_argument("--mpirun", metavar="COMMAND", help=with_options)
    of_slurm = (
        "use this many nodes of the Slurm allocation, with so many ranks each, instead of a "
        "hostfile; starts ranks by srun"
    )
    parser.add_argument("--nodes", type=read_nodes, metavar="NODESxRANKS", help=of_slurm)
    parser.add_argument(
        "--task", type=int, metavar="K", help=("measure only the cell of this number")
    )
    ready = "prepare the folder for such tasks, and list them"
    parser.add_argument("--prepare", action="store_true", help=ready)
    parser.add_argument("--retry", action="store_true", help="repeat failed runs")
    parser.add_argument("--dry-run", action="store_true", help="list the cells, and run nothing")
    options = parser.parse_args(words[:at])
    options.rest = tuple(words[at + 1 :])
    for name, least in (("repeats", 1), ("steps", 6), ("limit", 1), ("task", 0)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            parser.error(f"--{name} {value}: give {least} or more")
    return options

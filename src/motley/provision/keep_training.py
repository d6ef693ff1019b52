"""Keep a training alive after the loss of a machine: run an mpirun line again.

After the loss of a machine, the next start uses the remaining machines.

  bash setup/keep_training.sh mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
  bash setup/keep_training.sh --restarts 3 mpirun -np 2 ./entry_cn.sh torch_dist/train.py --lr 1e-3
  bash setup/keep_training.sh --dry-run mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
  bash setup/keep_training.sh --polite mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh

The line is the command that you would type. Any training script and its options may follow
./entry_cn.sh. Before each start, the script asks all hosts at once by ssh. A host that does not
answer is left out: its ranks are removed from the line, and so are their values in --shares,
--precision and --micro-batch. If a lost rank or host has ended the run, the run continues from the
last finished step, which the surviving ranks have saved. The batches and samples stay the same.

Ranks can save, or continue, only if the launcher leaves them alive. This script sets environment
variables with that effect for Open MPI 4.1, Open MPI 5 and srun. Your own options and variables
override them. Before the first start, the script runs the line for some seconds with a small test
program, which kills one rank. If the launcher then ends the other ranks, the script prints the cost
of a lost rank. The run then saves every 50 s, unless the line has --save-every.

A host that another user needs leaves after its current step (setup/leave_cn.sh). The script asks
missing hosts, away or lost, again once a minute. A returned host is added at a step boundary if it
saves the run more time than the new start costs. The estimate uses the measured steps and starts of
this run. Otherwise the host is added at the next start. If all hosts are away, or no remaining host
can read the checkpoints, the script waits.

With --polite a host leaves automatically, as with leave_cn.sh, within seconds of
  a user at its console: a session at a local seat that logind calls active, not idle
    and not locked. Without logind, a text console typed on in the last 5 minutes,
    or a graphical login, counts. A user who comes by ssh is at no console
  a process of another user's that holds memory of one of its GPUs
and the host may come back after 5 minutes without either. A small process on each host watches for
other users, and ends with this script.

The script gives up, and prints the reason, if another start makes no sense: after a wrong option, a
loss that is not finite, or repeated faults without a step in between. Ctrl-C ends the script at
once. A SIGINT or SIGTERM to the script alone (kill PID) also ends it.

In an allocation of Slurm, the line may start with srun. The script then asks the nodes through
Slurm. Give --no-kill to salloc or sbatch, since a job without this option ends with its first node:
  salloc --no-kill -N 3 bash setup/keep_training.sh srun --mpi=pmix -n 3 ./entry_cn.sh

Options, before the line:
  --restarts N   give up after N faults in a row without progress. Default: 3
  --polite       hosts leave automatically while another user needs them
  --dry-run      print which line would be run, and on which hosts; run nothing

Exit status: that of the last run; 2 nothing was begun.
"""

import argparse
import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from motley.cluster.processes import ignores_hangup, is_in_foreground
from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.launch.process import die_with_parent
from motley.provision.keep_returns import (
    Figures,
    HostAnswers,
    Returns,
    ask,
    be_polite,
    print_now,
    progress,
    until_asked_s,
)
from motley.provision.launch_line import NODE_COUNTS, LaunchLine
from motley.provision.launch_trial import (
    SAVE_EVERY,
    Outcome,
    launcher_version,
    loss_warning,
    prepare,
)
from motley.provision.setup_command import Parser, run
from motley.records.run_folder import RunFolder, is_free, take_folder
from motley.text import plural

_LOOK_S = 0.5
# Seconds for srun to end after a fault, if rank 0 has ended, and if it has not. By Slurm's own
# settings srun waits for a lost node for minutes.
_SRUN_S, _SRUN_MOST_S = 3.0, 60.0
_STOP_S = 2.0  # seconds after Ctrl-C in which mpirun may end by itself
_NO_MACHINE = {  # faults that would happen again on any machines
    FaultKind.NOT_FINITE: (
        "the loss or gradient is not finite, which other machines would not change"
    ),
    FaultKind.REFUSED: "its message asks for a change that only you can make",
    FaultKind.STOPPED: "it was stopped on purpose",
}
_NO_FAULT = (FaultKind.LEFT, FaultKind.PAUSED)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Stop:
    """The user's request to stop, made by a signal.

    Attributes:
        number: number of the signal; 0: no request.
        at: time of the signal, in monotonic seconds.
        job: the process of the launcher while it runs.
        sent: True if this process has sent the signal to the launcher.
    """

    number: int = 0
    at: float = 0.0
    job: subprocess.Popen[bytes] | None = None
    sent: bool = False

    def __call__(self, number: int, _: object) -> None:
        """Store the signal. Send it to the launcher too, unless the launcher has received it."""
        self.number, self.at = number, time.monotonic()
        # A terminal sends Ctrl-C to mpirun too. A second signal would have mpirun kill the ranks
        # before they have saved their records.
        if number == signal.SIGTERM or ignores_hangup() or not is_in_foreground():
            self.pass_on()

    def pass_on(self) -> None:
        """Send the stored signal to the launcher."""
        if self.job is not None:
            self.sent = True
            self.job.send_signal(self.number)

    def look(self) -> None:
        """Send the launcher a signal that only this process has received, after a short wait."""
        if self.number and not self.sent and time.monotonic() > self.at + _STOP_S:
            self.pass_on()


class Keeper:
    """The loop that starts one run again after faults.

    Args:
        line: the line that starts the run.
        restarts: number of faults in a row without progress after which the loop gives up.
        stop: the user's request to stop.
    """

    def __init__(self, line: LaunchLine, restarts: int, stop: Stop) -> None:
        self._line, self._restarts, self._stop = line, restarts, stop
        self._figures = Figures(line.folder)
        self._missing = frozenset[str]()  # hosts that the job runs without
        self._back = frozenset[str]()  # hosts that have returned for this start
        self._unwanted = frozenset[str]()  # hosts that no step was taken with
        self._faults = 0
        self._asking = ThreadPoolExecutor(1)
        self._environ = dict[str, str]()

    def run(self) -> int:
        """Run the command line until it succeeds, or until another start makes no sense.

        Returns:
            The exit status.
        """
        answers = None
        for number in count():
            requested = self._wait_for_hosts(answers)
            if requested is None:
                return self._stopped()
            before, started = progress(self._line.folder), self._content().get("started")
            with tempfile.TemporaryDirectory(prefix="motley-keep-") as folder:
                now = self._line.with_hosts(requested.alive, Path(folder) / "hosts.txt")
                if not self._environ:
                    now = self._prepare(now)
                if self._stop.number:
                    return self._stopped()
                if number or before >= 0 or self._content():
                    now = now.resumed(before >= 0)
                code, early = self._start(now, requested, started)
            content = self._content()
            if self._stop.number:
                return self._stopped(begun=content.get("started") != started)
            if content.get("status") == "finished":
                if number:
                    print_now(f"finished, after {plural(number, 'restart')}")
                return 0
            answers = early.result() if early else self._ask()
            has_left = answers.away.keys() - self._missing
            if content.get("started") == started and has_left:
                continue
            if why := self._gives_up(content, before, answers):
                print_now(why)
                return code or 1
        return 1

    def _stopped(self, begun: bool = False) -> int:
        # The last line of a job that had begun says how to continue.
        if not begun or self._content().get("status") != "stopped":
            print_now(
                "stopped by you; to continue, run the same command with --run "
                f"{self._line.folder.name}"
            )
        return CODES[signal.Signals(self._stop.number)]

    # -- before the first start

    def _prepare(self, line: LaunchLine) -> LaunchLine:
        """Test if the launcher lets other ranks live on when a rank dies. If not, print a warning.

        Returns:
            The line to start. If the launcher ends all ranks, the line has an option to save often.
        """
        outcome, self._environ = prepare(line, self._variables(os.environ, line), self._stop)
        if self._stop.number or outcome is Outcome.LIVE:
            return line
        if warning := loss_warning(outcome, launcher_version(line.words[0]), line.save_every):
            print_now(warning)
        self._line = self._line.saving_every(SAVE_EVERY)
        return line.saving_every(SAVE_EVERY)

    def _variables(self, environ: Mapping[str, str], line: LaunchLine) -> dict[str, str]:
        """Return the environment for a line that may use fewer nodes than Slurm has allocated."""
        remaining = NODE_COUNTS if line != self._line else ()
        return {name: value for name, value in environ.items() if name not in remaining}

    # -- between two starts

    def _content(self) -> dict[str, Any]:
        """Return the contents of run.json, which a job writes when it starts."""
        return RunFolder(self._line.folder).read_run()

    def _has_failed(self, started: str | None) -> bool:
        """Return True if the running job has failed.

        The previous job, which started at ``started``, does not count.
        """
        content = self._content()
        return content.get("status") == "failed" and content.get("started") != started

    def _gives_up(self, content: dict[str, Any], before: int, asked: HostAnswers) -> str:
        """Return the reason not to start the line again; empty if the line is to start again.

        If the line is to start again, print the reason for the new start.

        Args:
            content: contents of run.json.
            before: step of the checkpoint from which the job continued.
            asked: answers of the hosts after the end of the job.
        """
        failure = content.get("failure") or {}
        kind = failure.get("kind", "")
        if content and kind in set(_NO_MACHINE):
            return f"does not start the training again: {_NO_MACHINE[FaultKind(kind)]}"
        done = progress(self._line.folder)
        where = self._figures.resume_point()
        if kind in set(_NO_FAULT):
            print_now(f"the training continues {where}")
            return ""
        self._faults = 1 if done > before else self._faults + 1
        if done <= before and self._back:
            self._unwanted, self._back = self._unwanted | self._back, frozenset()
        gone = asked.missing - self._missing
        if self._faults > self._restarts or (not content and not gone):
            return "gives up: " + (
                f"the training ended before it began, and {self._who_answers()}" if not content
                else f"{self._faults} faults in a row without a step between them" if self._restarts
                else "--restarts 0"
            )  # fmt: skip
        what = f"rank {failure['rank']} on {failure['host']}" if failure else "the launcher"
        print_now(
            f"{what} was lost ({kind or 'without a message'}); the training continues {where}"
        )
        return ""

    def _who_answers(self) -> str:
        """Return a phrase that says if all hosts answer, or if the line names no host to ask."""
        if self._line.hosts:
            return "all hosts answer"
        return "no host was asked, because the command names none (--hostfile FILE or -H HOSTS)"

    def _ask(self) -> HostAnswers:
        return ask(self._line.hosts, self._line.folder, self._unwanted)

    def _wait_for_hosts(self, answers: HostAnswers | None) -> HostAnswers | None:
        """Return the answers of the hosts for the next start; None if the user stopped the script.

        Args:
            answers: recent answers of the hosts, which are used first, because asking a dead host
                takes seconds. None: ask the hosts now.
        """
        line, text = self._line, ""
        if answers and self._unwanted.intersection(host.name for host in answers.alive):
            answers = None
        while True:
            requested, answers = answers or self._ask(), None
            if not line.hosts:
                return requested
            self._say_who(requested)
            why = self._cannot_start(requested)
            if not why:
                return requested
            if why != text:
                print_now(f"{why}; this command waits, and asks the hosts once a minute")
            text, until = why, time.monotonic() + until_asked_s(requested)
            while time.monotonic() < until:
                if self._stop.number:
                    return None
                time.sleep(0.2)

    def _cannot_start(self, asked: HostAnswers) -> str:
        """Return the reason why the next start has to wait; empty if it need not wait."""
        if not asked.alive:
            if not asked.away:
                raise MotleyError(
                    "no host answers; find the cause with: bash setup/test_cn_connection.sh"
                )
            return "all hosts are away"
        first = asked.alive[0].name
        if progress(self._line.folder) >= 0 and not asked.sees.get(first, True):
            return (
                f"the first rank would be on {first}, which cannot read the checkpoints in "
                f"{self._line.folder}; name a folder that all hosts share with --logs DIR"
            )
        return ""

    def _say_who(self, asked: HostAnswers) -> None:
        """Print which hosts were lost since the last start, and which are back."""
        used = self._line.hosts_with_ranks
        now = asked.missing & used
        on = f"continues with {len(used - now)} of {len(used)} hosts"
        part = self._figures.speed_without([asked.nodes.get(name, name) for name in now])
        speed = "" if part is None else f", about {part:.2f} of the speed"
        for host in sorted(now - self._missing):  # hosts without ranks are not reported
            why = f"away{asked.away[host]}" if host in asked.away else f"gone ({asked.lost[host]})"
            print_now(f"{host} is {why}; {on}{speed}")
        self._back = self._missing & used - now
        for host in sorted(self._back):
            print_now(f"{host} is back; {on}")
        self._missing = asked.missing

    # -- while a job runs

    def _has_ended(self, failed: float) -> bool:
        """Return True if a job that failed at ``failed`` (monotonic seconds) has ended.

        The launcher of the job may still run.
        """
        limit = _SRUN_S if is_free(self._line.folder) else _SRUN_MOST_S
        return time.monotonic() > failed + limit

    def _start(
        self, line: LaunchLine, asked: HostAnswers, started: str | None
    ) -> tuple[int, Future[HostAnswers] | None]:
        """Run a command line, which starts mpirun, to its end.

        Args:
            line: the command line.
            asked: answers of the hosts, from before this start.
            started: start time of the previous job, from run.json.

        Returns:
            Two values. The first is the exit status. After a fault, the second is a future with
            the hosts' new answers, else None. The hosts are asked while mpirun is still ending,
            because asking and ending both wait for a dead host.
        """
        early, failed = None, 0.0
        self._figures.launched()
        job = subprocess.Popen(
            line.words, env=self._variables(self._environ, line),
            start_new_session=ignores_hangup(),  # otherwise mpirun would end with the terminal
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )  # fmt: skip
        self._stop.job = job
        returns = Returns(self._line.folder, self._figures, asked, self._ask)
        try:
            while True:
                try:
                    code = job.wait(_LOOK_S)
                    returns.ended()
                    return code, early
                except subprocess.TimeoutExpired:
                    self._stop.look()
                    self._figures.look()
                    returns.look()
                    if early is None and self._has_failed(started):
                        early, failed = self._asking.submit(self._ask), time.monotonic()
                    if early and line.under_slurm and self._has_ended(failed):
                        job.kill()
        finally:
            self._stop.job = None
            self._figures.read()


def _append_output() -> None:
    """Make this process and the launcher append to a file to which the shell redirects output.

    A rank appends its last line while the launcher ends. The next line must not overwrite that
    line.
    """
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(number).st_mode):
                flags = fcntl.fcntl(number, fcntl.F_GETFL)
                fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_APPEND)


def main(words: Sequence[str]) -> int:
    """Run the given command line until it succeeds, or until another start makes no sense."""
    parser = Parser("keep_training", __doc__, visits=False)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--polite", action="store_true")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.restarts < 0:
        raise MotleyError(f"--restarts {options.restarts} is below 0; give 0 or more")
    line = LaunchLine.parse(options.line)
    if options.polite and not line.hosts:
        raise MotleyError(
            "--polite watches the hosts of a hostfile, and the command names no hostfile; add "
            "one, as in --hostfile hosts.txt, or leave out --polite"
        )
    line = line.named(time.strftime("%Y-%m-%d_%H-%M-%S"))
    if options.dry_run:
        requested = ask(line.hosts, line.folder)
        for host, why in requested.lost.items():
            print(f"{host} does not answer: {why}")
        for host, why in requested.away.items():
            print(f"{host} is away{why}")
        print(" ".join(line.with_hosts(requested.alive, Path("HOSTS")).words))
        return 0
    if RunFolder(line.folder).read_run().get("status") == "finished":
        print(f"{line.folder} is finished already; choose another --run NAME")
        return 0
    line.folder.parent.mkdir(parents=True, exist_ok=True)
    place = line.folder.parent / f".keep.{line.folder.name}"
    place.mkdir(exist_ok=True)
    busy = f"another keep_training.sh keeps {line.folder} running"
    with take_folder(place, busy, "stop that script first, or choose another --run NAME"):
        stop = Stop()
        _append_output()
        for each in CODES:
            signal.signal(each, stop)
        if options.polite:
            be_polite(line.hosts)
        try:
            return Keeper(line, options.restarts, stop).run()
        finally:
            (place / ".lock").unlink(missing_ok=True)
            place.rmdir()


if __name__ == "__main__":
    run(main)

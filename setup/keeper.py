"""What keep_training.py does: starts a line, and starts it again, with the hosts that there are."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from keep_figures import Figures, progress
from keep_hosts import Asked, ask, say
from keep_returns import Returns, until_asked_s
from keep_trial import SAVE_EVERY, Outcome, launcher_version, loss_warning, prepare
from launch_line import LaunchLine
from srun_line import NODE_COUNTS

from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.launch.process import die_with_parent
from motley.records.folder_lock import is_free
from motley.records.run_folder import RunFolder
from motley.signals import ignores_hangup

_LOOK_S = 0.5
# That srun has to end after a fault, once rank 0 has ended or not: it waits for a lost node, for
# minutes by Slurm's own settings.
_SRUN_S, _SRUN_MOST_S = 3.0, 60.0
_NO_MACHINE = {  # of faults that would come again with any machines
    FaultKind.NOT_FINITE: "the loss or gradient is not finite, which no machine is to blame for",
    FaultKind.REFUSED: "what it says is for you to change",
    FaultKind.STOPPED: "somebody has stopped it",
}
_NO_FAULT = (FaultKind.LEFT, FaultKind.PAUSED)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Stop:
    """What the user has asked for by a signal.

    Attributes:
        number: of it; 0: nothing.
    """

    number: int = 0
    job: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, _: object) -> None:
        self.number = number
        # Ctrl-C reaches mpirun from the terminal, if that has one; what is sent to this process
        # alone is passed on.
        if self.job is not None and (number == signal.SIGTERM or ignores_hangup()):
            self.job.send_signal(number)


class Keeper:
    """Keeps one run alive.

    Args:
        restarts: faults in a row without progress before it gives up.
    """

    def __init__(self, line: LaunchLine, restarts: int, stop: Stop) -> None:
        self._line, self._restarts, self._stop = line, restarts, stop
        self._figures = Figures(line.folder)
        self._missing = frozenset[str]()  # hosts that the job runs without
        self._back = frozenset[str]()  # hosts that this start has taken back
        self._unwanted = frozenset[str]()  # hosts that no step was taken with
        self._faults = 0
        self._asking = ThreadPoolExecutor(1)
        self._environ = dict[str, str]()

    def run(self) -> int:
        """Run the line until it has ended well, or going on makes no sense; its exit status."""
        answers = None
        for number in count():
            asked = self._wait_for_hosts(answers)
            if asked is None:
                return self._stopped()
            before, started = progress(self._line.folder), self._content().get("started")
            with tempfile.TemporaryDirectory(prefix="motley-keep-") as folder:
                now = self._line.with_hosts(asked.alive, Path(folder) / "hosts.txt")
                if not self._environ:
                    now = self._prepare(now)
                if self._stop.number:
                    return self._stopped()
                if number or before >= 0 or self._content():
                    now = now.resumed(before >= 0)
                code, early = self._start(now, asked, started)
            if self._stop.number:
                return self._stopped()
            content = self._content()
            if content.get("status") == "finished":
                if number:
                    say(f"finished, after {number} restart{'s' * (number != 1)}")
                return 0
            answers = early.result() if early else self._ask()
            has_left = answers.away.keys() - self._missing
            if content.get("started") == started and has_left:
                continue
            if why := self._gives_up(content, before, answers):
                say(why)
                return code or 1
        return 1

    def _stopped(self) -> int:
        say(f"stopped by you; go on with the same line and --run {self._line.folder.name}")
        return CODES[signal.Signals(self._stop.number)]

    # -- before the first start

    def _prepare(self, line: LaunchLine) -> LaunchLine:
        """Try whether ranks outlive one of them, and say what a lost rank costs where they do not.

        Returns:
            The line to start, which then saves often.
        """
        outcome, self._environ = prepare(line, self._variables(os.environ, line), self._stop)
        if self._stop.number or outcome is Outcome.LIVE:
            return line
        if warning := loss_warning(outcome, launcher_version(line.words[0]), line.save_every):
            say(warning)
        self._line = self._line.saving_every(SAVE_EVERY)
        return line.saving_every(SAVE_EVERY)

    def _variables(self, environ: Mapping[str, str], line: LaunchLine) -> dict[str, str]:
        """Return the environment for a line, which may be of fewer nodes than were granted."""
        left = NODE_COUNTS if line != self._line else ()
        return {name: value for name, value in environ.items() if name not in left}

    # -- between two starts

    def _content(self) -> dict[str, Any]:
        """Of run.json, which a job writes once it has begun."""
        return RunFolder(self._line.folder).read_run()

    def _has_failed(self, started: str | None) -> bool:
        """Whether the job that runs has; not the one before, which was started at a time."""
        content = self._content()
        return content.get("status") == "failed" and content.get("started") != started

    def _gives_up(self, content: dict[str, Any], before: int, asked: Asked) -> str:
        """Why the line is not started again; empty if it is, which is said.

        Args:
            content: of run.json. before: the step of the checkpoint that it went on from.
            asked: after its end.
        """
        failure = content.get("failure") or {}
        kind = failure.get("kind", "")
        if content and kind in set(_NO_MACHINE):
            return f"does not start it again: {_NO_MACHINE[FaultKind(kind)]}"
        done = progress(self._line.folder)
        where = self._figures.resume_point()
        if kind in set(_NO_FAULT):
            say(f"it goes on {where}")
            return ""
        self._faults = 1 if done > before else self._faults + 1
        if done <= before and self._back:
            self._unwanted, self._back = self._unwanted | self._back, frozenset()
        gone = asked.missing - self._missing
        if self._faults > self._restarts or (not content and not gone):
            return "gives up: " + (
                f"it ended before it had begun, and {self._who_answers()}" if not content
                else f"{self._faults} faults in a row, and no step in between" if self._restarts
                else "--restarts 0"
            )  # fmt: skip
        what = f"rank {failure['rank']} on {failure['host']}" if failure else "the launcher"
        say(f"{what} was lost ({kind or 'without a word'}); it goes on {where}")
        return ""

    def _who_answers(self) -> str:
        """Return what is known of the hosts once none of them is missing."""
        if self._line.hosts:
            return "all hosts answer"
        return "no host was asked, for the line names none (--hostfile FILE or -H HOSTS)"

    def _ask(self) -> Asked:
        return ask(self._line.hosts, self._line.folder, self._unwanted)

    def _wait_for_hosts(self, answers: Asked | None) -> Asked | None:
        """Who takes part in the next start; None if the user has stopped it meanwhile.

        Args:
            answers: of just now; the dead take their time not to answer.
        """
        line, said = self._line, ""
        if answers and self._unwanted.intersection(host.name for host in answers.alive):
            answers = None
        while True:
            asked, answers = answers or self._ask(), None
            if not line.hosts:
                return asked
            self._say_who(asked)
            why = self._cannot_start(asked)
            if not why:
                return asked
            if why != said:
                say(f"{why}; it waits, and asks once a minute")
            said, until = why, time.monotonic() + until_asked_s(asked)
            while time.monotonic() < until:
                if self._stop.number:
                    return None
                time.sleep(0.2)

    def _cannot_start(self, asked: Asked) -> str:
        """Why a start has to wait; empty if it need not."""
        if not asked.alive:
            if not asked.away:
                raise MotleyError("no host answers; see bash setup/test_cn_connection.sh")
            return "all hosts are away"
        first = asked.alive[0].name
        if progress(self._line.folder) >= 0 and not asked.sees.get(first, True):
            return (
                f"{first} would have the first rank, and does not see {self._line.folder}, where "
                "the checkpoints are (with --logs DIR on a disk that all hosts share it would)"
            )
        return ""

    def _say_who(self, asked: Asked) -> None:
        """Who has gone since the last start, and who is back."""
        used = self._line.hosts_with_ranks
        now = asked.missing & used
        on = f"on with {len(used - now)} of {len(used)} hosts"
        part = self._figures.speed_without([asked.nodes.get(name, name) for name in now])
        speed = "" if part is None else f", about {part:.2f} of the speed"
        for host in sorted(now - self._missing):  # a host without ranks is nobody's loss
            why = f"away{asked.away[host]}" if host in asked.away else f"gone ({asked.lost[host]})"
            say(f"{host} is {why}; {on}{speed}")
        self._back = self._missing & used - now
        for host in sorted(self._back):
            say(f"{host} is back; {on}")
        self._missing = asked.missing

    # -- while a job runs

    def _has_ended(self, failed: float) -> bool:
        """Whether a job that has failed at a time has ended, but for its launcher."""
        limit = _SRUN_S if is_free(self._line.folder) else _SRUN_MOST_S
        return time.monotonic() > failed + limit

    def _start(
        self, line: LaunchLine, asked: Asked, started: str | None
    ) -> tuple[int, Future[Asked] | None]:
        """Run a line to its end.

        Args:
            asked: whom it is started with. started: when the job before was, as run.json has it.

        Returns:
            Its status, and what the hosts answer after a fault: the dead take their time not to,
            and so does mpirun, which waits for them.
        """
        early, failed = None, 0.0
        self._figures.launched()
        job = subprocess.Popen(
            line.words, env=self._variables(self._environ, line),
            start_new_session=ignores_hangup(),  # else mpirun ends with the terminal all the same
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
                    self._figures.look()
                    returns.look()
                    if early is None and self._has_failed(started):
                        early, failed = self._asking.submit(self._ask), time.monotonic()
                    if early and line.under_slurm and self._has_ended(failed):
                        job.kill()
        finally:
            self._stop.job = None
            self._figures.read()

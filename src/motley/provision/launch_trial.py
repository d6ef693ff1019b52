"""A trial of a launch line, which shows if the other ranks live on after one rank is killed.

Each launcher has its own option that lets ranks live on when another rank dies. Any configuration
file, module or container may set this option differently. This module therefore sets the options of
all launchers, as environment variables. Then it starts the line once with a small program in place
of the training.
"""

import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Protocol

from motley.cluster.launcher import WITHOUT_MPI
from motley.cluster.processes import ignores_hangup
from motley.launch.process import die_with_parent
from motley.launch.ranks import SECRET_VARIABLE
from motley.membership.survivors import SURVIVE, SURVIVES
from motley.provision.launch_line import LaunchLine
from motley.text import parse_seconds

SAVE_EVERY = "50s"  # and some seconds to write it: a minute
_MINUTE_S = 60
_LIMIT_S = 60.0  # largest seconds of the trial, which usually takes 3 s
_END_S = 5.0  # seconds in which the launcher has to end its ranks
_VERSION_S = 10.0
# With these values a cut link is noticed in 30 s instead of 8 minutes, as with the environment's
# own configuration (setup/make_env.sh).
_KEEPALIVE = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("PRTE", "OMPI")
    for name, value in (("time", "10"), ("intvl", "5"), ("probes", "4"))
}
_SAID = re.compile(r"trial: rank (\d+) of (\d+) (began|lives on)")


class Outcome(Enum):
    """The result of a trial. The value of a member is a text for the user."""

    LIVE = "the other ranks live on"
    END = "ended all ranks of a trial when one of them was killed"
    ALONE = "starts one rank"
    SILENT = f"finished no trial within {_LIMIT_S:.0f} s"
    FAILED = "ended with an error before the trial began"


class Job(Protocol):
    """A protocol: an object that holds the running launcher, so that a signal handler can reach it.

    See motley.provision.keep_training.Stop.
    """

    number: int
    job: subprocess.Popen[bytes] | None


def survive_environment(line: LaunchLine, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that asks the launcher to let ranks live on when one dies.

    A value that the user has set stays.

    Args:
        line: the line, with its launcher.
        environ: this process's environment.
    """
    ours = {**_KEEPALIVE, **SURVIVE}
    if line.under_slurm:  # its ranks may not share a home, which would have the secret's file
        ours |= {WITHOUT_MPI: "1", SECRET_VARIABLE: secrets.token_hex(32)}
    return {**ours, **environ}


def try_line(line: LaunchLine, environ: Mapping[str, str], stop: Job) -> Outcome:
    """Start the ranks of a line, kill one rank, and return the outcome. The trial takes 3 s.

    Args:
        line: the line.
        environ: environment of the launcher.
        stop: holder of the launcher during the trial, for signals.
    """
    job = subprocess.Popen(
        line.trial(), env={**environ, "MOTLEY_START_TIMEOUT": f"{_LIMIT_S / 2:.0f}"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=ignores_hangup(),
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )  # fmt: skip
    stop.job = job
    try:
        output, _ = job.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(_END_S)
        job.kill()
        return Outcome.SILENT
    finally:
        stop.job = None
    return read_outcome(output.decode(errors="replace"), job.returncode)


def read_outcome(output: str, code: int) -> Outcome:
    """Return the outcome of a trial that has ended.

    Args:
        output: output of all ranks.
        code: exit status of the launcher.
    """
    lines = _SAID.findall(output)
    if not lines:
        return Outcome.FAILED if code else Outcome.SILENT
    size = int(lines[0][1])
    if size == 1:
        return Outcome.ALONE
    alive = {rank for rank, _, what in lines if what == "lives on"}
    return Outcome.LIVE if len(alive) == size - 1 else Outcome.END


def prepare(
    line: LaunchLine, environ: Mapping[str, str], stop: Job
) -> tuple[Outcome, dict[str, str]]:
    """Run a trial; return its outcome, and the environment in which to start the line.

    If ranks do not live on when one rank dies, the environment does not state that they do. After a
    loss, the ranks then save the last step if they have time before the launcher ends them.
    """
    own = survive_environment(line, environ)
    outcome = try_line(line, own, stop)
    if outcome is Outcome.FAILED and own.pop(WITHOUT_MPI, ""):  # for instance because of a firewall
        outcome = try_line(line, own, stop)
    if outcome is not Outcome.LIVE:
        own.pop(SURVIVES, None)
        own.pop(WITHOUT_MPI, None)
    return outcome, own


def launcher_version(launcher: str) -> str:
    """Return the first line of a launcher's --version, or its name if it prints none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [launcher, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_VERSION_S, check=False,
        )  # fmt: skip
        if version := done.stdout.partition("\n")[0].strip():
            return version
    return launcher


def loss_warning(outcome: Outcome, launcher: str, save_every: str | None) -> str:
    """Return a warning about the cost of a lost rank; empty if no finished step would be lost.

    Args:
        outcome: outcome of the trial.
        launcher: version of the launcher.
        save_every: value of ``--save-every`` in the user's line; None without this option.
    """
    if outcome in (Outcome.LIVE, Outcome.FAILED):  # the start itself reports its error
        return ""
    seconds = parse_seconds(save_every) if save_every else None
    if save_every is None:
        cost = f"up to a minute of steps, because this run saves every {SAVE_EVERY}"
    else:
        cost = f"the steps since the last checkpoint (your --save-every {save_every})"
    fix = "To lose no step, start several ranks with the mpirun of setup/make_env.sh"
    if save_every is not None and (seconds is None or seconds > _MINUTE_S):
        fix = f"To lose a minute at most, use --save-every {SAVE_EVERY}"
    return (
        f"{launcher} {outcome.value}, so no rank may be left to save the last step. A lost rank "
        f"costs {cost}. {fix}."
    )

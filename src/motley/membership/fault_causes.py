"""Faults that another rank or process reports, because the failed rank cannot report.

A failed rank has died, left or fallen silent. One fault often leads to other faults, and the first
fault is the cause. A consequence may be reported before its cause. All functions but
:func:`record_fault` are pure.
"""

import re
import time
from collections.abc import Sequence

from motley.faults import MOST_DETAILS, Fault, FaultKind
from motley.records.run_folder import RunFolder
from motley.text import typed_command

# A part of most advice, which docs/list_messages.py reads word by word below.
RESUME = "continue with --resume auto"
_STOPPED = (FaultKind.STOPPED, FaultKind.LEFT, FaultKind.PAUSED)


def record_fault(folder: RunFolder, fault: Fault) -> None:
    """Record the first cause of the job's end, if this process can read the run's folder."""
    if not (folder.path / "run.json").exists():
        return
    fields = {
        "rank": fault.rank, "host": fault.host, "step": fault.step, "kind": fault.kind,
        "phase": fault.phase, "error": fault.error,
    }  # fmt: skip
    status = "stopped" if fault.kind in _STOPPED else "failed"
    try:  # first the status, which other programs read, even if the rest fails
        folder.update_run(status=status, failure=fields, ended=time.time())
    finally:
        folder.event("fault", **fields, details=fault.details)


_CRASHES = (
    (FaultKind.SEGFAULT, "Segmentation fault|Bus error"),
    (FaultKind.ABORTED, "Aborted"),
    (FaultKind.ILLEGAL_INSTRUCTION, "Illegal instruction"),
)


def make_death_fault(rank: int, host: str, step: int | None, said: str = "") -> Fault:
    """Return the fault of a rank whose connection broke without a message about the cause.

    An abort may be the consequence of another fault. The C++ runtime aborts a process if one of its
    threads uses a connection that broke when another rank ended.

    Args:
        rank: number of the rank in the launch.
        host: host of the rank.
        step: step of the rank; None: before step 1.
        said: message that Python's fault handler wrote before the death; empty: none.
    """
    if crash := re.search(r"Fatal Python error: (.+)", said):
        kind = next((kind for kind, name in _CRASHES if re.search(name, crash[1])), FaultKind.ERROR)
        return Fault(
            rank, host, step, f"crashed in compiled code: {crash[1]}",
            "its traceback above names the call that crashed, and the library",
            said[:MOST_DETAILS], kind=kind, echo=kind is FaultKind.ABORTED,
        )  # fmt: skip
    return Fault(
        rank, host, step, "died without a message: the process was killed, or it exited early",
        f"see its output above, and the kernel's log on {host} (dmesg), which reports processes "
        "that the out-of-memory killer ended",
        kind=FaultKind.KILLED,
    )  # fmt: skip


def make_stop_fault(step: int | None, number: int, by: str, remedy: str) -> Fault:
    """Return the fault of a launcher that a signal stopped, and that then stopped the ranks.

    Args:
        step: step of the training; None: before step 1.
        number: number of the signal that came to the ranks.
        by: phrase that names the possible senders of the signal.
        remedy: instruction to the user on how to continue.
    """
    return Fault(
        0, "", step, f"stopped by {by}", remedy,
        kind=FaultKind.STOPPED, signal=number, echo=True,
    )  # fmt: skip


def make_leave_fault(rank: int, hosts: Sequence[str], step: int | None, who: str) -> Fault:
    """Return the fault of a job that saves its state and ends because hosts leave.

    Args:
        rank: number in the launch of a rank on the first of these hosts.
        hosts: names of the hosts.
        step: step of the training; None: before step 1.
        who: phrase that names the hosts and the reason, such as "b leaves as asked".
    """
    names = " and ".join(hosts)
    return Fault(
        rank, hosts[0], step, who,
        typed_command(
            f"continue with --resume auto after you remove {names} from hosts.txt, or after: bash "
            f"setup/join_cn.sh {' '.join(hosts)}"
        ),
        kind=FaultKind.LEFT,
    )  # fmt: skip


def make_pause_fault(step: int | None) -> Fault:
    """Return the fault of a job that ended at a step boundary after a signal from the user."""
    return Fault(
        0, "", step, "paused as asked (SIGUSR2)", "continue with --resume auto",
        kind=FaultKind.PAUSED,
    )  # fmt: skip


def make_launcher_fault(host: str, launcher: str, step: int | None) -> Fault:
    """Return the fault of ranks that ended because their launcher ended.

    An mpirun that loses a host also ends at once, with status 0. See :func:`make_daemon_fault`.

    Args:
        host: host of rank 0 and the launcher.
        launcher: name and process of the launcher.
        step: step of the training; None: before step 1.
    """
    return Fault(
        0, host, step,
        f"the launcher ({launcher} on {host}) was killed, or it ended because it lost a host that "
        "it names above", "continue with --resume auto", kind=FaultKind.LAUNCHER_LOST,
    )  # fmt: skip


def make_daemon_fault(rank: int, host: str, step: int | None) -> Fault:
    """Return the fault of a launcher that lost the connection to its daemon on ``host``.

    Args:
        rank: lowest rank on that host.
        host: name of the host.
        step: step of the training; None: before step 1.
    """
    return Fault(
        rank, host, step,
        f"the launcher lost {host}: its MPI daemon on {host} was killed, or the ssh session to "
        f"{host} ended", f"see the kernel's log on {host} (dmesg), and continue with --resume auto",
        kind=FaultKind.LAUNCHER_LOST,
    )  # fmt: skip


def make_silent_fault(
    rank: int, host: str, step: int | None, seconds: float, like: str = ""
) -> Fault:
    """Return the fault of a rank that has sent no message for ``seconds``.

    Args:
        rank: number of the rank in the launch.
        host: host of the rank.
        step: last step that the rank reported; None: before step 1.
        seconds: seconds since the last message of the rank.
        like: phrase that names other silent ranks, such as ", and so are ranks 4, 5". May be empty.
    """
    return Fault(
        rank, host, step,
        f"silent for {seconds:.0f} s{like}: the host is frozen, off or cut off from the network, "
        "or the process was stopped",
        f"continue with --resume auto, and remove {host} from hosts.txt if it stays away",
        kind=FaultKind.HOST_LOST,
    )  # fmt: skip


def make_alone_fault(rank: int, host: str, step: int | None, seconds: float, others: str) -> Fault:
    """Return the fault of a host that receives nothing from any other host.

    The fault may be of this host itself, or of the network.

    Args:
        rank: number of the rank in the launch.
        host: host of the rank.
        step: step of the rank; None: before step 1.
        seconds: seconds since the last message.
        others: names of the other hosts.
    """
    return Fault(
        rank, host, step,
        f"{host} has received nothing from any other host ({others}) for {seconds:.0f} s",
        f"check the network of {host}, and continue with --resume auto",
        kind=FaultKind.HOST_LOST,
    )  # fmt: skip


def make_link_fault(rank: int, host: str, step: int | None, other: str) -> Fault:
    """Return the fault of two hosts that cannot reach each other, though rank 0 reaches both."""
    return Fault(
        rank, host, step,
        f"{host} and {other} no longer reach each other, though rank 0 receives from both",
        typed_command(
            "test the cable, switch and firewall between them with bash setup/test_mpi.sh, and "
            "continue with --resume auto; if that fails, remove one of the two hosts from "
            "hosts.txt"
        ),
        kind=FaultKind.LINK_LOST,
    )  # fmt: skip


def make_hang_fault(rank: int, host: str, step: int | None, seconds: float, where: str) -> Fault:
    """Return the fault of a job whose ranks all live, but make no progress.

    Args:
        rank: number of the blamed rank in the launch.
        host: host of the blamed rank.
        step: step of the training; None: before step 1.
        seconds: seconds without progress.
        where: current phases of the ranks, in words.
    """
    return Fault(
        rank, host, step, f"no rank has made progress for {seconds:.0f} s: {where}",
        "continue with --resume auto", kind=FaultKind.HANG,
    )  # fmt: skip


class FirstCause:
    """The most probable cause of a job's end, and the time until which a better one may come.

    Attributes:
        fault: the most probable cause so far; None: no fault was reported.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._deadline = 0.0

    def suspect(self, fault: Fault, within_s: float) -> Fault:
        """Record ``fault`` as a possible cause, and return the most probable cause so far.

        Args:
            fault: the possible cause.
            within_s: seconds in which a better cause may still be reported.
        """
        deadline = time.monotonic() + within_s
        if self.fault is not None:
            fault = max(self.fault, fault, key=_weight)  # the first of equals
            deadline = min(deadline, self._deadline)
        self.fault, self._deadline = fault, deadline
        return fault

    def clear(self) -> None:
        """Drop the cause, because it is the consequence of another fault."""
        self.fault = None

    def due(self) -> Fault | None:
        """Return the cause if the time to report a better cause is over, else None."""
        return self.fault if time.monotonic() >= self._deadline else None

    def due_in(self, at_most: float) -> float:
        """Return the seconds until :meth:`due` returns the cause, at most ``at_most``."""
        remaining = at_most if self.fault is None else self._deadline - time.monotonic()
        return min(at_most, max(0.0, remaining))


def _weight(fault: Fault) -> int:
    """Return the weight of a fault. The fault with the largest weight is taken as the first cause.

    In order of weight, an abort comes before the error that follows it. Then come a stop of the
    launcher and a signal to one rank.
    """
    if fault.signal:
        return int(fault.kind is FaultKind.STOPPED)
    return 3 if fault.kind is FaultKind.ABORTED else 2

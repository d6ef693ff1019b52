"""How a rank failed: what kind of fault, at what, and in the words that a user reads."""

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

from motley.errors import DeviceError, MotleyError, NoMemoryError, NotFiniteError
from motley.text import step_in_words

_ECHO = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket|TCPStore|peer",
    re.IGNORECASE,
)
# Characters, of 12 bytes at most; see motley.launch.messages.
_MOST_DETAILS, _MOST_WORDS = 75_000, 10_000
_NO_MEMORY = (
    r"out of memory|can't allocate memory|_ALLOC_FAILED|cudaErrorMemoryAllocation|bad_alloc|"
    "MemoryError"
)


class FaultKind(StrEnum):
    """What kind of fault ended a rank, or a run."""

    OUT_OF_MEMORY = "out of memory"
    ILLEGAL_ACCESS = "illegal memory access"
    CUBLAS = "cuBLAS failed"
    DEVICE = "device error"
    NOT_FINITE = "not finite"
    SEGFAULT = "segfault"
    ABORTED = "aborted"
    ILLEGAL_INSTRUCTION = "illegal instruction"
    HOST_LOST = "host lost"
    LINK_LOST = "link lost"
    HANG = "hang"
    KILLED = "killed"
    LAUNCHER_LOST = "launcher lost"
    STOPPED = "stopped"  # by who started it, or who may stop it
    LEFT = "left"  # a host leaves, as it was asked to
    PAUSED = "paused"  # to go on with other hosts
    REFUSED = "refused"  # it is the user's to change
    ERROR = "error"

    @property
    def code(self) -> int:
        """Exit status of a job that it ends; of one that a signal ends: 128 and its number."""
        codes = {
            FaultKind.REFUSED: 2, FaultKind.NOT_FINITE: 2, FaultKind.OUT_OF_MEMORY: 3,
            FaultKind.PAUSED: 75,  # EX_TEMPFAIL of sysexits.h: try again
        }  # fmt: skip
        return codes.get(self, 1)


class Phase(Enum):
    """What a rank is at; the words follow on "rank 3 is"."""

    START = "start", "starting"
    PREPARE = "prepare", "preparing the data"
    BUILD = "build", "building the model"
    MEASURE = "measure", "measuring"
    DATA = "data", "loading images"
    FORWARD = "forward", "computing"
    BACKWARD = "backward", "computing"
    ALL_REDUCE = "all-reduce", "waiting for the others"
    OPTIMIZER = "optimizer", "taking the step"
    SAVE = "save", "saving a checkpoint"
    EVALUATE = "evaluate", "evaluating"
    LEAVE = "leave", "leaving"

    def __init__(self, key: str, words: str) -> None:
        self.key, self.words = key, words

    @classmethod
    def of(cls, key: str) -> "Phase":
        """The phase of a ``key``, as records have it."""
        return _PHASES[key]


_PHASES = {phase.key: phase for phase in Phase}
_NOBODYS = (FaultKind.STOPPED, FaultKind.LAUNCHER_LOST, FaultKind.LEFT, FaultKind.PAUSED)  # faults

# What the libraries below say of their failures, the first that fits. A library of CUDA's without
# memory says so in its own words, so memory comes before it.
_FOREIGN = (
    (FaultKind.OUT_OF_MEMORY, _NO_MEMORY),
    (FaultKind.ILLEGAL_ACCESS,
     r"illegal memory access|misaligned address|cudaErrorIllegalAddress"),
    (FaultKind.CUBLAS, r"CUBLAS_STATUS|cublas"),
    (FaultKind.DEVICE, r"CUDA error|device-side assert|NCCL error|cuDNN error|CUDNN_STATUS"),
    (FaultKind.SEGFAULT, r"Segmentation fault|signal 11\b|SIGSEGV"),
    (FaultKind.KILLED, r"signal 9\b|SIGKILL"),
)  # fmt: skip


def kind_of_text(text: str) -> FaultKind:
    """The kind of a failure that torch, CUDA, a launcher or the system tells."""
    for kind, pattern in _FOREIGN:
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return FaultKind.ERROR


@dataclass(frozen=True)
class Fault:
    """How a rank failed.

    Attributes:
        kind: for programs; the rest is for people.
        step: the step it was in, from 0; None before the first.
        error: cause and what was found, one line.
        advice: what to do, one line; may be empty.
        details: the traceback; empty for an error that the user is meant to read.
        echo: it may be the consequence of another rank's failure.
        signal: number of the one that ended it; 0: none did.
        phase: a :class:`Phase`'s key, what the rank last said that it was at.
    """

    rank: int
    host: str
    step: int | None
    error: str
    advice: str = ""
    details: str = ""
    echo: bool = False
    kind: FaultKind = FaultKind.ERROR
    signal: int = 0
    phase: str = ""

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Fault":
        """One that was sent, as dataclasses.asdict has it."""
        fault = cls(**message)
        return replace(fault, kind=FaultKind(fault.kind))

    @property
    def code(self) -> int:
        """Exit status of the job."""
        return 128 + self.signal if self.signal else self.kind.code

    def line(self) -> str:
        """The one line that a user reads."""
        if self.kind in _NOBODYS:
            at = " in the first step" if self.step == 0 else f" after step {self.step}"
            return f"{self.error}{'' if self.step is None else at}; {self.advice}"
        at = step_in_words(self.step)
        return "; ".join(
            part
            for part in (f"rank {self.rank} on {self.host}, {at}: {self.error}", self.advice)
            if part
        )


def fault_of(error: BaseException, rank: int, host: str, step: int | None) -> Fault:
    """Put an exception into words."""
    if isinstance(error, MotleyError):
        said = str(error)[:_MOST_WORDS]
        kind = (
            FaultKind.OUT_OF_MEMORY if isinstance(error, NoMemoryError)
            else FaultKind.NOT_FINITE if isinstance(error, NotFiniteError)
            else FaultKind.DEVICE if isinstance(error, DeviceError) else FaultKind.REFUSED
        )  # fmt: skip
        return Fault(rank, host, step, said, echo=_is_echo(error.__cause__), kind=kind)
    text = " ".join(str(error).split()) or "no message"
    details = "".join(traceback.format_exception(error))[-_MOST_DETAILS:]
    said = f"{type(error).__name__}: {text[:600]}"
    return Fault(
        rank, host, step, said, _advice(text), details, _is_echo(error), kind_of_text(said)
    )


def _is_echo(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError | OSError) and bool(_ECHO.search(str(error)))


def says_no_memory(text: str) -> bool:
    """Whether an error's text is that of an allocation which failed."""
    return kind_of_text(text) is FaultKind.OUT_OF_MEMORY


def _advice(text: str) -> str:
    lower = text.lower()
    if says_no_memory(text):
        return "lower --micro-batch (the result stays the same)"
    if "dataloader worker" in lower:
        return "see to the host's memory and /dev/shm, or take fewer with --workers (0: none)"
    if "too many open files" in lower:
        return "raise the limit with ulimit -n"
    if "no space left" in lower:
        return "free some disk, or choose another one with --logs DIR"
    return ""


_CRASHES = (
    (FaultKind.SEGFAULT, "Segmentation fault|Bus error"),
    (FaultKind.ABORTED, "Aborted"),
    (FaultKind.ILLEGAL_INSTRUCTION, "Illegal instruction"),
)


def died(rank: int, host: str, step: int | None, said: str = "") -> Fault:
    """The connection to a rank broke without a word of Motley's.

    Args:
        said: by Python's fault handler, if anything.
    """
    if crash := re.search(r"Fatal Python error: (.+)", said):
        kind = next((kind for kind, name in _CRASHES if re.search(name, crash[1])), FaultKind.ERROR)
        return Fault(
            rank, host, step, f"crashed in compiled code: {crash[1]}",
            "its traceback above names the call, and so the library, that crashed",
            said[:_MOST_DETAILS], kind=kind,
        )  # fmt: skip
    return Fault(
        rank, host, step, "died without a word (killed, or it left early)",
        f"see its output above, and the kernel's log (dmesg) on {host} for its out-of-memory "
        "killer",
        kind=FaultKind.KILLED,
    )  # fmt: skip


def stopped(step: int | None, number: int, by: str, remedy: str) -> Fault:
    """The launcher was told to end, and has told the ranks.

    Args:
        number: of the signal that came to the ranks; ``by``: its name, who may have sent it,
            and what the ranks were at. remedy: how to go on.
    """
    return Fault(
        0, "", step, f"stopped by {by}", remedy,
        kind=FaultKind.STOPPED, signal=number, echo=True,
    )  # fmt: skip


def left(rank: int, hosts: Sequence[str], step: int | None, who: str) -> Fault:
    """Hosts leave, and the job ends with all that it has trained saved.

    Args:
        rank: one of the first host's. who: leaves and why, as "b leaves as asked".
    """
    names = " and ".join(hosts)
    return Fault(
        rank, hosts[0], step, who,
        f"continue with --resume auto, without {names} in hosts.txt or after: bash "
        f"setup/join_cn.sh {' '.join(hosts)}", kind=FaultKind.LEFT,
    )  # fmt: skip


def paused(step: int | None) -> Fault:
    """Somebody who may send a signal to the ranks has asked for the end at a step boundary."""
    return Fault(
        0, "", step, "paused as asked (SIGUSR2)", "continue with --resume auto",
        kind=FaultKind.PAUSED,
    )  # fmt: skip


def launcher_gone(host: str, launcher: str, step: int | None) -> Fault:
    """The launcher ended before the ranks did, which end with it.

    mpirun also ends so, at once and with status 0, when it loses a host: see :func:`daemon_gone`.

    Args:
        launcher: its name and process.
    """
    return Fault(
        0, host, step, f"the launcher ({launcher} on {host}) was killed, or it gave up a host that "
        "it names above", "continue with --resume auto", kind=FaultKind.LAUNCHER_LOST,
    )  # fmt: skip


def daemon_gone(rank: int, host: str, step: int | None) -> Fault:
    """The launcher lost its daemon on ``host``, whose lowest rank is ``rank``."""
    return Fault(
        rank, host, step, f"the launcher lost {host}: its MPI daemon there was killed, or the ssh "
        "session to it", f"see the kernel's log (dmesg) on {host}; continue with --resume auto",
        kind=FaultKind.LAUNCHER_LOST,
    )  # fmt: skip


def silent(rank: int, host: str, step: int | None, seconds: float, like: str = "") -> Fault:
    """Nothing was heard of a rank for a while.

    Args:
        like: who else is silent, as ", and so are ranks 4, 5".
    """
    return Fault(
        rank, host, step,
        f"silent for {seconds:.0f} s{like}: the host is frozen, off or cut off, or the process "
        "was stopped",
        f"continue with --resume auto; if {host} stays away, without it in hosts.txt",
        kind=FaultKind.HOST_LOST,
    )  # fmt: skip


def alone(rank: int, host: str, step: int | None, seconds: float, others: str) -> Fault:
    """Nothing was heard of any other host, so this one may be to blame.

    Args:
        others: their names.
    """
    return Fault(
        rank, host, step, f"all other hosts are silent for {seconds:.0f} s ({others})",
        f"see whether {host} is off the network; continue with --resume auto",
        kind=FaultKind.HOST_LOST,
    )  # fmt: skip


def link_lost(rank: int, host: str, step: int | None, other: str) -> Fault:
    """Two hosts do not reach each other, and rank 0 hears both."""
    return Fault(
        rank, host, step,
        f"the link between {host} and {other} is dead, though the head hears both",
        "look for a cable, switch or firewall between them, with bash setup/test_mpi.sh; continue "
        "with --resume auto, if need be without one of them",
        kind=FaultKind.LINK_LOST,
    )  # fmt: skip


def stuck(rank: int, host: str, step: int | None, seconds: float, where: str) -> Fault:
    """All ranks live, and none of them moves.

    Args:
        where: what the ranks are doing.
    """
    return Fault(
        rank, host, step, f"no rank has moved for {seconds:.0f} s: {where}",
        "continue with --resume auto", kind=FaultKind.HANG,
    )  # fmt: skip

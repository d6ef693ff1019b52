"""Faults of ranks: their kinds, the phases in which they happen, and their texts for the user."""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

from motley.errors import DeviceError, MotleyError, NoMemoryError, NotFiniteError
from motley.text import format_step

_ECHO = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket|TCPStore|peer",
    re.IGNORECASE,
)
# Characters, of 12 bytes at most; see motley.membership.messages.
MOST_DETAILS, _MOST_WORDS = 75_000, 10_000
_NO_MEMORY = (
    r"out of memory|can't allocate memory|_ALLOC_FAILED|cudaErrorMemoryAllocation|bad_alloc|"
    "MemoryError"
)


class FaultKind(StrEnum):
    """The kind of a fault that ended a rank, or a run."""

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
    STOPPED = "stopped"  # stopped by the user or by Slurm
    LEFT = "left"  # a host leaves, as requested
    PAUSED = "paused"  # ended, to continue with other hosts
    REFUSED = "refused"  # an error that the user can correct
    ERROR = "error"

    @property
    def code(self) -> int:
        """Exit status of a job that this kind of fault ends; see also :attr:`Fault.code`."""
        codes = {
            FaultKind.REFUSED: 2, FaultKind.NOT_FINITE: 2, FaultKind.OUT_OF_MEMORY: 3,
            FaultKind.PAUSED: 75,  # EX_TEMPFAIL of sysexits.h: try again
        }  # fmt: skip
        return codes.get(self, 1)


class Phase(Enum):
    """A phase of a rank. The words of a phase complete the sentence "rank 3 is ..."."""

    START = "start", "starting"
    PREPARE = "prepare", "preparing the data"
    BUILD = "build", "building the model"
    MEASURE = "measure", "measuring"
    DATA = "data", "loading samples"
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
    def from_key(cls, key: str) -> "Phase":
        """Return the phase with this ``key``, as stored in records."""
        return _PHASES[key]


_PHASES = {phase.key: phase for phase in Phase}
_NOBODYS = (FaultKind.STOPPED, FaultKind.LAUNCHER_LOST, FaultKind.LEFT, FaultKind.PAUSED)  # faults

# Patterns of messages of libraries; the first that matches counts. A CUDA library reports a lack of
# memory with its own name, so memory comes first.
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
    """Return the kind of a failure from a message of torch, CUDA, a launcher or the system."""
    for kind, pattern in _FOREIGN:
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return FaultKind.ERROR


@dataclass(frozen=True)
class Fault:
    """A failure of a rank, with its texts for the user.

    Attributes:
        rank: number of the rank in the launch.
        host: host of the rank.
        step: number of the rank's step, from 0; None before the first step.
        error: the cause, and what was found, in one line.
        advice: the fix, in one line; may be empty.
        details: the traceback; empty for an error whose message is written for users.
        echo: True if the fault may be a consequence of another rank's failure.
        kind: kind of the fault, for programs.
        signal: number of the signal that ended the rank; 0: no signal ended it.
        phase: key of the :class:`Phase` that the rank last reported.
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
        """Return the fault from a message that dataclasses.asdict() has made."""
        fault = cls(**message)
        return replace(fault, kind=FaultKind(fault.kind))

    @property
    def code(self) -> int:
        """Exit status of a job that this fault ends."""
        return 128 + self.signal if self.signal else self.kind.code

    def last_words(self) -> str:
        """Return the text to print at the end: the traceback, if any, and the line for the user."""
        return "\n".join(filter(None, (self.details.rstrip("\n"), f"motley: {self.line()}")))

    def line(self) -> str:
        """Return the line that describes the fault to the user."""
        if self.kind in _NOBODYS:
            at = " in the first step" if self.step == 0 else f" after step {self.step}"
            return f"{self.error}{'' if self.step is None else at}; {self.advice}"
        at = format_step(self.step)
        return "; ".join(
            part
            for part in (f"rank {self.rank} on {self.host}, {at}: {self.error}", self.advice)
            if part
        )


def make_fault(error: BaseException, rank: int, host: str, step: int | None) -> Fault:
    """Return the fault of a rank that raised an exception."""
    if isinstance(error, MotleyError):
        message = str(error)[:_MOST_WORDS]
        kind = (
            FaultKind.OUT_OF_MEMORY if isinstance(error, NoMemoryError)
            else FaultKind.NOT_FINITE if isinstance(error, NotFiniteError)
            else FaultKind.DEVICE if isinstance(error, DeviceError) else FaultKind.REFUSED
        )  # fmt: skip
        return Fault(rank, host, step, message, echo=_is_echo(error.__cause__), kind=kind)
    text = " ".join(str(error).split()) or "no message"
    details = "".join(traceback.format_exception(error))[-MOST_DETAILS:]
    message = f"{type(error).__name__}: {text[:600]}"
    return Fault(
        rank, host, step, message, _advice(text), details, _is_echo(error), kind_of_text(message)
    )


def _is_echo(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError | OSError) and bool(_ECHO.search(str(error)))


def says_no_memory(text: str) -> bool:
    """Return True if the text of an error reports a failed memory allocation."""
    return kind_of_text(text) is FaultKind.OUT_OF_MEMORY


def _advice(text: str) -> str:
    lower = text.lower()
    if says_no_memory(text):
        return "lower --micro-batch (the result stays the same)"
    if "dataloader worker" in lower:
        return (
            "check the host's memory and /dev/shm, or start fewer loader processes with "
            "--workers (0: none)"
        )
    if "too many open files" in lower:
        return "raise the limit with ulimit -n"
    if "no space left" in lower:
        return "free some space, or choose another folder with --logs DIR"
    return ""

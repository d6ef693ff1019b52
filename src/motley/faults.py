"""How a rank failed: what kind of fault, at what, and in the words that a user reads."""

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
    """Kind of the fault that ended a rank, or a run."""

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
    """Phase of a rank; the words follow on "rank 3 is"."""

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
        """Return the phase of a ``key``, as records have it."""
        return _PHASES[key]


_PHASES = {phase.key: phase for phase in Phase}
_NOBODYS = (FaultKind.STOPPED, FaultKind.LAUNCHER_LOST, FaultKind.LEFT, FaultKind.PAUSED)  # faults

# Texts of failures in the libraries below; the first that fits counts. A library of CUDA's without
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
    """Return the kind of a failure from the text of torch, CUDA, a launcher or the system."""
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

    def last_words(self) -> str:
        """Return the traceback, if there is one, and below it the line for the user."""
        return "\n".join(filter(None, (self.details.rstrip("\n"), f"motley: {self.line()}")))

    def line(self) -> str:
        """Return the one line that a user reads."""
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
    """Put an exception into words."""
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
    """Return True if an error's text is that of an allocation which failed."""
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

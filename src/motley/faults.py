"""How a rank failed, in the words that a user reads."""

import re
import traceback
from dataclasses import dataclass

from motley.errors import MotleyError

_ECHO = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket|TCPStore|peer",
    re.IGNORECASE,
)
_MOST_DETAILS, _MOST_WORDS = 75_000, 10_000  # characters, of 12 bytes at most; motley.messages
NO_MEMORY = r"out of memory|can't allocate memory|_ALLOC_FAILED|cudaErrorMemoryAllocation|bad_alloc"


@dataclass(frozen=True)
class Fault:
    """How a rank failed.

    Attributes:
        step: the step it was in; None before the first.
        error: cause and what was found, one line.
        advice: what to do, one line; may be empty.
        details: the traceback; empty for an error that the user is meant to read.
        echo: it may be the consequence of another rank's failure.
        code: exit status of the job.
        doing: what the rank last said that it did, as "computing".
    """

    rank: int
    host: str
    step: int | None
    error: str
    advice: str = ""
    details: str = ""
    echo: bool = False
    code: int = 1
    doing: str = ""

    def line(self) -> str:
        """The one line that a user reads."""
        at = "before the first step" if self.step is None else f"step {self.step}"
        return "; ".join(
            part
            for part in (f"rank {self.rank} on {self.host}, {at}: {self.error}", self.advice)
            if part
        )


def fault_of(error: BaseException, rank: int, host: str, step: int | None) -> Fault:
    """Put an exception into words."""
    if isinstance(error, MotleyError):
        said = str(error)[:_MOST_WORDS]
        return Fault(rank, host, step, said, echo=_is_echo(error.__cause__), code=2)
    text = " ".join(str(error).split()) or "no message"
    details = "".join(traceback.format_exception(error))[-_MOST_DETAILS:]
    return Fault(
        rank, host, step, f"{type(error).__name__}: {text[:600]}", _advice(text), details,
        _is_echo(error),
    )  # fmt: skip


def _is_echo(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError | OSError) and bool(_ECHO.search(str(error)))


def says_no_memory(text: str) -> bool:
    """Whether an error's text is that of an allocation which failed."""
    return bool(re.search(NO_MEMORY, text, re.IGNORECASE))


def _advice(text: str) -> str:
    lower = text.lower()
    if says_no_memory(text):
        return "lower --micro-batch (the result stays the same)"
    if "no space left" in lower:
        return "free some disk, or choose another one with --logs DIR"
    return ""


def died(rank: int, host: str, step: int | None) -> Fault:
    """The connection to a rank broke without a word."""
    return Fault(
        rank, host, step, "died without a word (killed, or it left early)",
        f"see the kernel's log (dmesg) on {host} for its out-of-memory killer",
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
    )  # fmt: skip


def alone(rank: int, host: str, step: int | None, seconds: float, others: str) -> Fault:
    """Nothing was heard of any other host, so this one may be to blame.

    Args:
        others: their names.
    """
    return Fault(
        rank, host, step, f"all other hosts are silent for {seconds:.0f} s ({others})",
        f"see whether {host} is off the network; continue with --resume auto",
    )  # fmt: skip


def stuck(rank: int, host: str, step: int | None, seconds: float, where: str) -> Fault:
    """All ranks live, and none of them moves.

    Args:
        where: what the ranks are doing.
    """
    return Fault(
        rank, host, step, f"no rank has moved for {seconds:.0f} s: {where}",
        "continue with --resume auto",
    )  # fmt: skip

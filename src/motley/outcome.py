"""What became of a run, from what it left behind: done, or how, where and when it failed. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.faults import NO_MEMORY

DONE = "done"
# Of what an error says, the first that fits. A library of CUDA's without memory says so in its
# own words, so memory comes before it.
_KINDS = (
    ("out of memory", rf"{NO_MEMORY}|MemoryError|has no room for"),
    ("illegal memory access", r"illegal memory access|misaligned address|cudaErrorIllegalAddress"),
    ("cuBLAS failed", r"CUBLAS_STATUS|cublas"),
    ("device error", r"CUDA error|device-side assert|NCCL error|cuDNN error|CUDNN_STATUS"),
    ("not finite", r"not finite|\bnan\b|\binf\b"),
    ("segfault", r"Segmentation fault|signal 11\b|SIGSEGV"),
    ("host lost", r"silent for"),
    ("hang", r"no rank has moved|still running after"),
    ("killed", r"died without a word|signal 9\b|SIGKILL|stopped by SIG"),
)
_DIED = re.compile(r"died without a word")
_SIGNAL = re.compile(r"(?:exited on|by) signal (\d+)")
_SIGNALS = {"11": "segfault", "7": "segfault", "6": "aborted", "4": "illegal instruction"}
_REFUSED = 2  # exit status of what is the user's to change
# Frames of a traceback, the innermost that is known; what the rank said it did where none is.
_PHASES = (
    ("all-reduce", r"all_reduce|allreduce|all_gather|reduce_scatter|broadcast|future\.wait"),
    ("optimizer", r"optimizer\.step|/optim/"),
    ("backward", r"\.backward\(|autograd/__init__|_engine_run_backward"),
    ("data", r"dataloader|motley/sampler|motley/data"),
    ("forward", r"_call_impl|motley/model|in forward"),
)
_DOES = {
    "computing": "forward or backward", "loading images": "data", "taking the step": "optimizer",
    "waiting for the others": "all-reduce",
}  # fmt: skip
_NOISE = re.compile(r"^[-\s]*$|prterun|mpirun|Process name:|Exit code:|thus causing")
_LONGEST = 400


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``done``, or a word for how it failed.
        error: in words; never empty where it failed.
        host, rank, epoch, step, phase: where and when, as far as known. phase: data, forward,
            backward, all-reduce, optimizer, or what the rank said that it did.
        seconds: from its launch to its end.
    """

    kind: str
    error: str = ""
    host: str | None = None
    rank: int | None = None
    epoch: int | None = None
    step: int | None = None
    phase: str | None = None
    seconds: float = 0.0

    @property
    def when(self) -> str:
        """``epoch 0, step 3, backward``, as far as known."""
        parts = [
            None if self.epoch is None else f"epoch {self.epoch}",
            None if self.step is None else f"step {self.step}", self.phase,
        ]  # fmt: skip
        return ", ".join(filter(None, parts))


def judge(
    status: int | None,
    output: str,
    run: Mapping[str, Any],
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    events: Sequence[Mapping[str, Any]],
    seconds: float = 0.0,
) -> Outcome:
    """Tell how a run ended.

    Args:
        status: of mpirun; None: it was ended, for it took too long. Its 0 proves nothing: a lost
            host's daemon ends with it, so a run is done when it says so itself.
        output: all that it printed.
        run, steps, events: its records; empty where it left none.
    """
    failure: Mapping[str, Any] = run.get("failure") or {}
    epoch = max((line[-1]["epoch"] for line in steps.values() if line), default=None)
    if status is not None and run.get("status") == "finished":
        return Outcome(DONE, epoch=epoch, step=_last_step(steps), seconds=seconds)
    details = next((str(e.get("details", "")) for e in events if e.get("event") == "fault"), "")
    error = str(failure.get("error", "")) or _last_words(output)
    if status is None:
        kind = "hang"
        error = f"still running after {seconds:.0f} s" + (f"; {error}" if error else "")
    else:
        kind = _kind(error, output)
        if status == _REFUSED and (kind == "error" or not failure):  # before it began
            kind = "out of memory" if kind == "out of memory" else "refused"
    step, doing = failure.get("step"), str(failure.get("doing") or "")
    if step is None and (taken := _last_step(steps)) is not None:
        step, doing = taken + 1, ""  # what was last heard of a rank can be half a second old
    known = status is not None  # who was told to stop is not who is to blame
    return Outcome(
        kind, error[:_LONGEST] or f"ended with status {status} and said nothing",
        failure.get("host") if known else None, failure.get("rank") if known else None,
        epoch, step, _phase(details, doing) if known else None, seconds,
    )  # fmt: skip


def _last_step(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> int | None:
    return max((line[-1]["step"] for line in steps.values() if line), default=None)


def _kind(error: str, output: str) -> str:
    if _DIED.search(error) and (found := _SIGNAL.search(output)):
        return _SIGNALS.get(found[1], "killed")
    for kind, pattern in _KINDS:
        if re.search(pattern, error, re.IGNORECASE):
            return kind
    return "error"


def _phase(details: str, doing: str) -> str | None:
    frames = [line for line in details.splitlines() if line.strip()]
    for line in reversed(frames):
        for phase, pattern in _PHASES:
            if re.search(pattern, line):
                return phase
    return _DOES.get(doing, doing) or None


def _last_words(output: str) -> str:
    """What Motley said of the failure; else the last line that is not the launcher's."""
    lines = [line.strip() for line in output.splitlines()]
    ours = [line.removeprefix("motley: ") for line in lines if line.startswith("motley: ")]
    rest = [line for line in lines if not _NOISE.search(line)]
    return (ours or rest or lines or [""])[-1]

"""What became of a run, from what it left behind: done, or how, where and when it failed. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.faults import FaultKind, kind_of_text
from motley.text import step_in_words

DONE = "done"
_SIGNAL = re.compile(r"(?:exited on|by) signal (\d+)")  # mpirun says it
_SIGNALS = {
    11: FaultKind.SEGFAULT, 7: FaultKind.SEGFAULT, 6: FaultKind.ABORTED,
    4: FaultKind.ILLEGAL_INSTRUCTION,
}  # fmt: skip
_NOISE = re.compile(r"^[-\s]*$|prterun|mpirun|Process name:|Exit code:|thus causing")
_LONGEST = 400


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``done``, or a :class:`motley.faults.FaultKind`.
        error: in words; never empty where it failed.
        host, rank, epoch, step, phase: where and when, as far as known. phase: the key of a
            :class:`motley.faults.Phase`.
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
        """``epoch 0, step 4, backward``, as far as known, of ``step`` 3."""
        parts = [
            None if self.epoch is None else f"epoch {self.epoch}",
            None if self.step is None else step_in_words(self.step), self.phase,
        ]  # fmt: skip
        return ", ".join(filter(None, parts))


def judge(
    status: int | None,
    output: str,
    run: Mapping[str, Any],
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    seconds: float = 0.0,
) -> Outcome:
    """Tell how a run ended.

    Args:
        status: of mpirun; None: it was ended, for it took too long. Its 0 proves nothing: a lost
            host's daemon ends with it, so a run is done when it says so itself.
        output: all that it printed.
        run, steps: its records; empty where it left none.
    """
    failure: Mapping[str, Any] = run.get("failure") or {}
    epoch = max((line[-1]["epoch"] for line in steps.values() if line), default=None)
    if status is not None and run.get("status") == "finished":
        return Outcome(DONE, epoch=epoch, step=_last_step(steps), seconds=seconds)
    error = str(failure.get("error", "")) or _last_words(output)
    if status is None:
        kind = FaultKind.HANG
        error = f"still running after {seconds:.0f} s" + (f"; {error}" if error else "")
    else:
        kind = _kind(failure, status, output, error)
    step, phase = failure.get("step"), failure.get("phase")
    if step is None and (taken := _last_step(steps)) is not None:
        step, phase = taken + 1, None  # what was last heard of a rank can be half a second old
    known = status is not None  # who was told to stop is not who is to blame
    return Outcome(
        kind, error[:_LONGEST] or f"ended with status {status} and said nothing",
        failure.get("host") if known else None, failure.get("rank") if known else None,
        epoch, step, (phase or None) if known else None, seconds,
    )  # fmt: skip


def _last_step(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> int | None:
    return max((line[-1]["step"] for line in steps.values() if line), default=None)


def _kind(failure: Mapping[str, Any], status: int, output: str, error: str) -> FaultKind:
    """As the run has it; of one that ended before it had records, by its exit status."""
    if not failure:
        by_status = {kind.code: kind for kind in (FaultKind.REFUSED, FaultKind.OUT_OF_MEMORY)}
        return by_status.get(status) or kind_of_text(error)
    kind = FaultKind(failure["kind"])
    if kind is FaultKind.KILLED and (found := _SIGNAL.search(output)):
        return _SIGNALS.get(int(found[1]), kind)
    return kind


def _last_words(output: str) -> str:
    """What Motley said of the failure; else the last line that is not the launcher's."""
    lines = [line.strip() for line in output.splitlines()]
    ours = [line.removeprefix("motley: ") for line in lines if line.startswith("motley: ")]
    rest = [line for line in lines if not _NOISE.search(line)]
    return (ours or rest or lines or [""])[-1]

"""A row of the fault matrix: what is done, what is right, and what was seen."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fault_places import Place


@dataclass
class Seen:
    """What a row saw; what it did not look at is None.

    Attributes:
        line: what the user read: the last line of ours, or where the run goes on by itself the
            first after the fault. said: all of them.
        first_word_s, end_s, next_step_s: seconds since the fault.
        steps_lost: finished steps that were taken again.
        left: processes, and files in temporary folders, 12 s after the end.
        status: of run.json, with the kind of fault.
        next_launch: what came of the same line with ``--resume auto``.
        wrong: what is not as it should be.
    """

    line: str = ""
    said: list[str] = field(default_factory=list)
    first_word_s: float | None = None
    end_s: float | None = None
    next_step_s: float | None = None
    steps_lost: int | None = None
    left: list[str] | None = None
    status: str | None = None
    next_launch: str | None = None
    wrong: list[str] = field(default_factory=list)

    def expect(self, right: bool, otherwise: str) -> bool:
        """Note what is wrong unless it is right; the same back."""
        if not right:
            self.wrong.append(otherwise)
        return right


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        name: for ``--only``. fault: what is done. right: what should come of it.
        lab: hosts of a lab that it needs; 0: this machine.
        quick: a matter of seconds.
        limit_s: that it may take, whatever happens.
        play: does it, and judges what it sees.
    """

    name: str
    fault: str
    right: str
    lab: int
    quick: bool
    limit_s: int
    play: Callable[["Place", Seen], None]

    def as_json(self, seen: Seen) -> dict[str, Any]:
        """Of the result's rows."""
        verdict = "; ".join(seen.wrong) or "ok"
        return {"row": self.name, "fault": self.fault, "right": self.right,
                "where": f"lab of {self.lab}" if self.lab else "one machine",
                **vars(seen), "verdict": verdict}  # fmt: skip


ROWS: dict[str, Row] = {}


def row(
    fault: str, right: str, *, lab: int = 0, quick: bool = False, limit_s: int = 240
) -> Callable[[Callable[["Place", Seen], None]], Callable[["Place", Seen], None]]:
    """Make a function a row of the matrix; its name is the row's, with dashes."""

    def add(play: Callable[["Place", Seen], None]) -> Callable[["Place", Seen], None]:
        name = play.__name__.replace("_", "-")
        assert name not in ROWS, name
        ROWS[name] = Row(name, fault, right, lab, quick, limit_s, play)
        return play

    return add

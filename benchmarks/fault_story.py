"""One run, what is done to it, and what comes of it: what most rows of the matrix are made of."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from fault_job import Line, until
from fault_places import DDP, Place
from fault_row import Seen

from motley.faults import FaultKind
from motley.records.run_folder import RunFolder

LOSSES = 2e-6  # relative, between runs of other ranks
BEGIN_S = 90.0  # that a start may take on a busy machine
# Of a rescue: they follow on the line that names the fault.
RESCUE = ("motley: saved as of", "motley: the last step could not be saved")


class Story:
    """See above.

    Args:
        words: of the training. driver: of the script that fails, once.
        start: see :meth:`fault_places.Place.start`.
    """

    def __init__(
        self, place: Place, seen: Seen, ranks: int, *words: object, run: str = "x",
        driver: tuple[object, ...] = (), **start: Any,
    ) -> None:  # fmt: skip
        self.place, self.seen, self.ranks, self.run = place, seen, ranks, run
        self._words, self._start = words, start
        self.folder = RunFolder(place.logs / run)
        self.harmed = time.time()
        self.before: dict[int, float] = {}  # when each step was recorded, before the fault
        self.job = place.start(run, ranks, *driver, *words, **start)

    def reach(self, step: int) -> "Story":
        """Wait until so many steps are recorded; AssertionError where it does not come so far."""
        until(lambda: len(self.steps()) > step or self.job.process.poll() is not None, BEGIN_S)
        if len(self.steps()) <= step:
            self.seen.said = [self.place.tidy(line.text) for line in self.job.lines[-20:]]
        assert len(self.steps()) > step, f"it did not reach step {step}"
        self.place.remember_segments()
        return self

    def steps(self) -> dict[int, dict[str, Any]]:
        """What the lowest rank that has it tells of each step: a killed one lacks its last."""
        result: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.path.glob("steps.rank*.jsonl")):
            with suppress(OSError):  # it may be removed
                for line in path.read_text(errors="replace").splitlines():
                    with suppress(ValueError):  # torn by a full disk, or just being written
                        step = json.loads(line)
                        result.setdefault(step["step"], step)
        return result

    def harm(self, do: Callable[[], object]) -> "Story":
        """Do it; seconds are counted from here."""
        do()
        self.harmed = time.time()
        return self

    def kill(self, rank: int, number: int = signal.SIGKILL) -> "Story":
        """Send a signal to a rank."""
        pid = self.place.ranks()[rank]
        return self.harm(lambda: os.kill(pid, number))

    # -- the end

    def end(self, limit_s: float) -> int | None:
        """Wait for the end, and note what was seen; its status, None: it had to be killed."""
        until(lambda: self.job.process.poll() is not None or self._words_after(), limit_s)
        self.before = {number: step["time"] for number, step in self.steps().items()}
        code = self.job.wait(max(1.0, self.harmed + limit_s - time.time()))
        seen = self.seen
        if seen.expect(code is not None, f"no end within {limit_s:.0f} s"):
            seen.end_s = (self.job.ended or time.time()) - self.harmed
        if words := self._words_after():
            seen.first_word_s = words[0].time - self.harmed
        seen.said = [self.place.tidy(line.text) for line in self.job.said()]
        seen.line = seen.said[-1] if seen.said else ""
        return code

    def _words_after(self) -> list[Line]:
        return self.job.said(self.harmed - 0.05)

    def ended(self, limit_s: float, *says: str, kind: FaultKind | None = None,
              status: str = "failed", word_s: float = 0.0, next_launch: bool = True,
              last: bool = False, may_be_0: bool = False, **failure: Any) -> "Story":  # fmt: skip
        """Judge a run that should end by the fault.

        Args:
            limit_s: seconds to the end. says: patterns of our last line, a rescue's aside.
            kind, status, failure: of run.json. word_s: seconds to our first word, if they matter.
            next_launch: try it. last: nobody else may speak after us.
            may_be_0: mpirun's own exit status, where it gives up a host.
        """
        seen = self.seen
        code = self.end(limit_s)
        seen.expect(code != 0 or may_be_0, "exit status 0")
        self.judge_line(says, last)
        if word_s and seen.first_word_s is not None:
            seen.expect(seen.first_word_s <= word_s, f"the first word took over {word_s:.0f} s")
        self.place.restore()
        self.judge_records(kind, status, failure)
        self.judge_left()
        if next_launch:
            self.launch_again()
        return self

    def judge_line(self, says: tuple[str, ...], last: bool) -> None:
        """Our last line, a rescue's aside."""
        seen = self.seen
        ours = [line for line in self.job.said() if not line.text.startswith(RESCUE)]
        if not seen.expect(bool(ours), "no line of ours"):
            seen.line = ""
            return
        seen.line = self.place.tidy(ours[-1].text)
        for pattern in says:
            seen.expect(bool(re.search(pattern, seen.line)), f"the line lacks {pattern!r}")
        tail = self.job.lines[self.job.lines.index(ours[-1]) + 1 :]
        other = [line.text for line in tail if line.text.strip() and line not in self.job.said()]
        text = self.place.tidy(" / ".join(other))[:160]
        seen.expect(not (last and other), f"another's words after ours: {text}")

    def judge_records(self, kind: FaultKind | None, status: str, failure: dict[str, Any]) -> None:
        """Of run.json: its status, and the kind, rank and host of the fault."""
        content = self.folder.read_run() if self.folder.path.is_dir() else {}
        result = content.get("failure") or {}
        self.seen.status = f"{content.get('status')}"
        if kind is None and not failure:
            return
        self.seen.status += f" ({result.get('kind')})"
        self.seen.expect(content.get("status") == status, f"status is {content.get('status')}")
        for name, value in (failure if kind is None else {"kind": kind, **failure}).items():
            text = f"run.json says {name} {result.get(name)}, not {value}"
            self.seen.expect(result.get(name) == value, text)

    def judge_left(self, limit_s: float = 12.0) -> None:
        """Processes and files."""
        self.seen.left = self.place.left(limit_s)
        self.seen.expect(not self.seen.left, "left behind: " + ", ".join(self.seen.left)[:160])

    def launch_again(self) -> None:
        """The same line with --resume auto must end with the losses of an unbroken run."""
        names = (path.name.removeprefix("step_") for path in self.folder.checkpoints.glob("step_*"))
        saved = max((int(name) for name in names if name.isdigit()), default=0)
        self.seen.steps_lost = max(0, len(self.steps()) - saved)
        start = {**self._start, "script": DDP, "into": "", "keep": False}
        again = self.place.start(self.run, self.ranks, *self._words, "--resume", "auto", **start)
        code = again.wait(BEGIN_S + 60)
        if self.seen.expect(code == 0, f"the next launch ended with {code}"):
            self.seen.next_launch = "goes on"
            self.judge_losses()
        else:
            self.seen.next_launch = self.place.tidy(([*again.said()] or again.lines)[-1].text)

    def judge_losses(self) -> None:
        """Each step once, with the losses of a run that nothing happened to."""
        steps = self.steps()
        right = reference(self.place, len(steps))
        result = [steps[n]["loss"] for n in sorted(steps)]
        self.seen.expect(
            bool(result) and sorted(steps) == [*range(len(steps))], "steps are missing"
        )
        worst = max((abs(a / b - 1) for a, b in zip(result, right, strict=False)), default=0.0)
        self.seen.expect(worst <= LOSSES, f"losses differ by {worst:.1e}")

    # -- going on

    def went_on(self, limit_s: float, *names: str, steps: int, next_s: float) -> "Story":
        """Judge a run that should go on by itself.

        Args:
            limit_s: seconds to its end. names: patterns of the first line after the fault; none:
                nobody should notice.
            steps: that it has in the end. next_s: seconds to the next step.
        """
        code = self.end(limit_s)
        seen = self.seen
        seen.expect(code == 0, f"exit status {code}")
        after = [self.place.tidy(line.text) for line in self._words_after()]
        if not names:
            seen.expect(not after, f"a word: {after[:1]}")
        elif seen.expect(bool(after), "no line of ours"):
            seen.line = after[0]
            for name in names:
                seen.expect(bool(re.search(name, after[0])), f"the line lacks {name!r}")
        self.place.restore()
        self.judge_records(None, "finished", {})
        result = self.steps()
        seen.expect(len(result) == steps, f"{len(result)} of {steps} steps")
        self._judge_pause(result, next_s)
        self.judge_losses()
        self.judge_left()
        seen.next_launch = "not needed"
        return self

    def _judge_pause(self, found: dict[int, dict[str, Any]], next_s: float) -> None:
        times = sorted(step["time"] for step in found.values())
        gaps = [(b - a, b) for a, b in pairwise(times) if b > self.harmed]
        if self.seen.expect(bool(gaps), "no step after the fault"):
            self.seen.next_step_s = max(gaps)[1] - self.harmed
            text = f"the next step took over {next_s:.0f} s"
            self.seen.expect(self.seen.next_step_s <= next_s, text)
        lost = [n for n, at in self.before.items() if n in found and found[n]["time"] > at + 1]
        self.seen.steps_lost = len(lost)
        self.seen.expect(not lost, f"{len(lost)} finished steps were taken again")


_UNBROKEN: list[float] = []


def reference(place: Place, steps: int, words: tuple[object, ...] = ()) -> list[float]:
    """Losses of an unbroken run of so many steps or more, on one rank of this machine.

    Args:
        words: of the training, for whoever asks first.
    """
    if len(_UNBROKEN) < steps:
        here = Place(place.folder.with_name(f"{place.folder.name}-one"))
        job = here.start("one", 1, "--max-steps", max(steps, 60 if steps <= 60 else 240), *words)
        assert job.wait(BEGIN_S + steps) == 0, job.output
        text = (here.logs / "one" / "steps.rank0.jsonl").read_text()
        _UNBROKEN[:] = [json.loads(line)["loss"] for line in text.splitlines()]
        here.end()
    return _UNBROKEN


def refused(place: Place, seen: Seen, *says: str, limit_s: float = 60, ranks: int = 2,
            last: bool = True, again: bool = True, words: tuple[object, ...] = (),
            **start: Any) -> None:  # fmt: skip
    """Judge a launch that should end with our line, last, and not with 0.

    Args:
        limit_s: seconds to its end. says: patterns of the line. words: of the training.
        again: once hosts are healed, the same should train.
    """
    began = time.time()
    story = Story(place, seen, ranks, "--max-steps", 8, *words, **start)
    story.harmed = began
    code = story.end(limit_s)
    seen.expect(code != 0, "exit status 0")
    story.judge_line(says, last)
    place.restore()
    story.judge_left()
    if again:
        job = place.start("x", ranks, "--max-steps", 8, *words)
        code = job.wait(BEGIN_S)
        seen.next_launch = "trains" if code == 0 else f"ended with {code}"
        seen.expect(code == 0, f"the next launch ended with {code}")

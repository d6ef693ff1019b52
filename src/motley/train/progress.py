"""What rank 0 prints while training: a bar on a terminal, plain lines in a log."""

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from motley.records.training import EMA, EpochRecord, StepRecord
from motley.tasks.task import Task
from motley.text import rate_in_words


class Reporter:
    """Prints the state of one run.

    Args:
        task: whose unit and metrics are told.
        total_steps: of the whole run.
        interval: seconds between plain lines.
        silent: print nothing (every rank but 0).
    """

    def __init__(
        self, task: Task, total_steps: int, done_steps: int, interval: float, silent: bool
    ) -> None:
        self._about = task
        self._total, self._interval, self._silent = total_steps, interval, silent
        self._next_line = 0.0
        self.begin(done_steps)
        self._loss = ""  # the last that is known
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), console=console(), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=total_steps, completed=done_steps)
        self._on_terminal = not silent and on_terminal()
        if self._on_terminal:
            self._bar.start()

    def begin(self, done_steps: int) -> None:
        """Go on, or go back, to where so many steps are taken."""
        self._first, self._started = done_steps, time.monotonic()

    def step(self, record: StepRecord) -> None:
        """Report a step."""
        done = record.step + 1
        if record.loss is not None:
            self._loss = f"loss {record.loss:.4f}  "
        rate = record.samples_per_s * record.weight / record.n_global
        text = f"epoch {record.epoch}  {self._loss}{rate_in_words(rate)} {self._about.unit}/s"
        if self._on_terminal:
            self._bar.update(self._task, completed=done, description=text)
            return
        now = time.monotonic()
        if self._silent or (now < self._next_line and done < self._total):
            return
        self._next_line = now + self._interval
        left = (now - self._started) / (done - self._first) * (self._total - done)
        print(f"  step {done}/{self._total}  {text}  {clock(left)} left", flush=True)

    def epoch(self, record: EpochRecord) -> None:
        """Report an evaluation."""
        own = {name: value for name, value in record.metrics.items() if not name.startswith(EMA)}
        averaged = {name.removeprefix(EMA): value for name, value in record.metrics.items()
                    if name.startswith(EMA)}  # fmt: skip
        also = f" (averaged: {self._about.words(averaged)})" if averaged else ""
        self.say(
            f"epoch {record.epoch}: {self._about.words(own)}{also}, of {record.samples} held-out "
            f"{self._about.noun}s"
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._on_terminal:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._silent:
            print(text, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._on_terminal:
            self._bar.stop()


def console() -> Console:
    """Where tables go: styled and as wide as a person's terminal, plain and 140 wide in a log."""
    if on_terminal():
        return Console()
    return Console(force_terminal=False, no_color=True, width=140)


def on_terminal() -> bool:
    """Somebody watches: standard output is a terminal, and not one that mpirun only made up.

    Open MPI 5 gives ranks a pseudo-terminal and copies it to its own output, wherever
    that goes; its own says whether a person is there.
    """
    if not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return True
    try:
        output = str(Path(f"/proc/{os.getppid()}/fd/1").readlink())
    except OSError:
        return False
    return output.startswith(("/dev/pts/", "/dev/tty"))


def clock(seconds: float) -> str:
    """As in 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

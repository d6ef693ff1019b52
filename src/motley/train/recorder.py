"""The recorder of a run's steps, and the report of the run's progress.

Each step has a record. Rank 0 reports progress as a bar on a terminal, and as plain lines in a log.
The first steps are compared with the plan.
"""

import contextlib
import dataclasses
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import rich.progress
import torch
from rich.console import Console

from motley.checkpoint.run import Run
from motley.comm.collectives import all_gather_floats, all_gather_object
from motley.config.options import Config
from motley.engines.protocol import StepResult
from motley.engines.step_timer import HOST, LAPS, Laps
from motley.measure.process_group import ProcessGroup
from motley.measure.speed_cache import WireMemory
from motley.membership.detector import PROGRESS_TIMEOUT_S, step_timeout_s
from motley.plan.forecast import Forecast
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.records.gpu_logger import Progress
from motley.records.json_files import JsonDict
from motley.records.training import MOST_WRITERS, EpochRecord, StepRecord, others_ready
from motley.tasks.task import Task
from motley.text import clock, format_rate

_WARM_UP = 2  # steps that are not compared
_STEPS = 8  # steps whose median is compared
_CHANGED = 1.5  # factor in the time of a step, caused by the wire, that shows that the wire changed
_WRONG = 3.0  # factor of error that shows that the figures were disturbed while being measured


class FirstSteps:
    """A comparison of the time of a run's first steps with the forecast.

    If the times agree, the link speeds that the forecast uses are stored for the next start.

    Args:
        memory: store of the measured link speeds; None: nothing is compared.
        forecast: the forecast; None: nothing is compared.
    """

    def __init__(self, memory: WireMemory | None = None, forecast: Forecast | None = None) -> None:
        self._memory, self._forecast = memory, forecast
        self._seen = 0
        self._took_s: list[float] = []  # seconds of steps with the present wire

    def step(self, record: StepRecord) -> str:
        """Add a step of the first rank that trains.

        Returns:
            A note for the user. The note is empty unless the links have changed.
        """
        if self._memory is None or self._forecast is None:
            return ""
        if record.n_global != self._forecast.global_batch:
            return ""  # a smaller batch
        self._seen += 1
        if self._seen > _WARM_UP:
            self._took_s.append(_took_s(record, self._forecast))
        return self.end() if len(self._took_s) == _STEPS else ""

    def end(self) -> str:
        """Finish the comparison when enough steps were added, or when the run ends.

        Returns:
            A note for the user. The note is empty unless the links have changed.
        """
        memory, self._memory = self._memory, None
        if memory is None or self._forecast is None:
            return ""
        expected = self._forecast.step_s
        took = median(self._took_s) if self._took_s else expected * memory.figures.steps_took
        if not memory.is_old:
            if expected / _WRONG < took < expected * _WRONG:
                memory.keep(took / expected)
            return ""
        # The figures still hold if they are off by as much as when they were measured.
        before = memory.figures.steps_took
        expected *= before
        if expected / _CHANGED < took < expected * _CHANGED:
            memory.keep(before)
            return ""
        when = datetime.fromtimestamp(memory.figures.measured)
        return (
            f"the links have changed since {when:%Y-%m-%d %H:%M}: with their present speeds a "
            f"step takes {took:.3g} s, and {expected:.3g} s was expected; the next start "
            "measures them again"
        )


def _took_s(record: StepRecord, forecast: Forecast) -> float:
    """Return the seconds of a step, for a comparison with the forecast.

    The result is the forecast compute time plus the measured time of sending. If an engine cannot
    separate computing from sending, the result is the measured time of the whole step.
    """
    if record.t_comm is None:
        return record.n_global / record.samples_per_s
    return forecast.step_s - forecast.exposed_s + record.t_comm


class Reporter:
    """A printer of one run's progress.

    Args:
        task: the task, with the unit and the metrics that are printed.
        total_steps: number of steps of the whole run.
        done_steps: number of steps that are done already.
        interval: seconds between two plain lines.
        silent: True: print nothing. Every rank except rank 0 is silent.
        by_epoch: True: print the epoch of an evaluation. False: print the step.
    """

    def __init__(
        self,
        task: Task,
        total_steps: int,
        done_steps: int,
        interval: float,
        silent: bool,
        by_epoch: bool = True,
    ) -> None:
        self._about, self._by_epoch = task, by_epoch
        self._total, self._interval, self._silent = total_steps, interval, silent
        self._next_line = 0.0
        self.begin(done_steps)
        self._loss = ""  # the last that is known
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(), rich.progress.TimeRemainingColumn(),
            console=console(), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=total_steps, completed=done_steps)
        self._on_terminal = not silent and on_terminal()
        if self._on_terminal:
            self._bar.start()

    def begin(self, done_steps: int) -> None:
        """Start to report progress, with ``done_steps`` steps as finished."""
        self._first, self._started = done_steps, time.monotonic()

    def step(self, record: StepRecord) -> None:
        """Report a finished step in the progress bar or in a line."""
        done = record.step + 1
        if record.loss is not None:
            self._loss = f"loss {record.loss:.4f}  "
        rate = record.samples_per_s * record.weight / record.n_global
        text = f"epoch {record.epoch}  {self._loss}{format_rate(rate)} {self._about.unit}/s"
        if self._on_terminal:
            self._bar.update(self._task, completed=done, description=text)
            return
        now = time.monotonic()
        if self._silent or (now < self._next_line and done < self._total):
            return
        self._next_line = now + self._interval
        remaining = (now - self._started) / (done - self._first) * (self._total - done)
        print(f"  step {done}/{self._total}  {text}  {clock(remaining)} left", flush=True)

    def epoch(self, record: EpochRecord) -> None:
        """Print a line with the metrics of an evaluation."""
        is_epoch = self._by_epoch and record.step > 0
        when = f"epoch {record.epoch}" if is_epoch else f"step {record.step}"
        for name, samples, own, averaged in record.list_parts():
            also = f" (averaged: {self._about.words(averaged)})" if averaged else ""
            part = f", {name}" if name else ""
            self.print_line(
                f"{when}{part}: {self._about.words(own)}{also}, of {samples} held-out "
                f"{self._about.noun}s"
            )

    def print_line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._on_terminal:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._silent:
            print(text, flush=True)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._on_terminal:
            self._bar.stop()


def console() -> Console:
    """Return the console for tables: styled on a terminal, plain and 140 columns wide in a log."""
    if on_terminal():
        return Console()
    return Console(force_terminal=False, no_color=True, width=140)


def on_terminal(number: int = 1) -> bool:
    """Return True if an output of this process is a user's terminal.

    Open MPI 5 gives ranks a pseudo-terminal and copies it to its own output. A rank therefore tests
    the output of its parent process.

    Args:
        number: file descriptor to test: 1 for standard output, 2 for standard error.
    """
    if number == 1 and not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return os.isatty(number)
    try:
        output = str(Path(f"/proc/{os.getppid()}/fd/{number}").readlink())
    except OSError:
        return False
    return output.startswith(("/dev/pts/", "/dev/tty"))


_LAST_WORDS_S = 2.0  # limit for a pending write when the job has to end


@dataclass(frozen=True)
class Timed:
    """A step for which all ranks know the time that each rank took.

    Attributes:
        plan: plan of the step's batch.
        ready_s: for each rank, the seconds that reading and computing took until the rank's own
            gradient was ready.
    """

    plan: Plan
    ready_s: tuple[float, ...]


@dataclass(frozen=True)
class _Taken:
    """A step whose times the host has not read yet.

    Attributes:
        record: the step's record, without times.
        laps: measured times of the parts of the step on this rank's device.
        plan: plan of the step's batch.
        unsound: ranks, numbered as launched, whose own gradient was not finite.
    """

    record: StepRecord
    laps: Laps
    plan: Plan
    unsound: list[int]


class Recorder:
    """The writer of this rank's step records. Rank 0 also writes evaluations, events and progress.

    In a large group, only rank 0 writes steps, because the losses on all ranks are the same.

    Attributes:
        progress: progress of the training, for the GPU log.
        at_once: True if no rank has a GPU. The times of a step are then known as soon as it ends.
        last: record of this rank's last step with known times; None before the first such step.
    """

    last: StepRecord | None = None

    def __init__(
        self,
        run: Run,
        task: Task,
        group: ProcessGroup,
        config: Config,
        tells_sync: bool,
        done: int,
        total: int,
        compiles: bool,
        first_steps: FirstSteps | None = None,
        most_writers: int = MOST_WRITERS,
        diverges: bool = False,
        silent: bool = False,
    ) -> None:
        """Create a recorder that starts after ``done`` of ``total`` steps.

        Args:
            run: the run, whose folder gets the records.
            task: the task.
            group: process group of the ranks that train.
            config: the options.
            tells_sync: True if the engine can measure compute and communication separately.
            done: number of steps that are taken already.
            total: number of steps of the whole run.
            compiles: True if a step may include the time of compiling the model.
            first_steps: comparison of the first steps with the forecast; None: nothing is compared.
            most_writers: largest number of ranks for which every rank writes its steps. In a larger
                group, only rank 0 does.
            diverges: True if each rank takes steps of its own, as in Local SGD.
            silent: True: print nothing, because the script prints its own progress.
        """
        assert group.rank is not None
        rank, launched = group.rank, group.workers[group.rank].rank
        self._run, self._rank, self._device = run, rank, group.device
        self.at_once = not group.has_gpus
        self._launched, self._ranks = launched, [worker.rank for worker in group.workers]
        self._many, self._diverges = len(self._ranks) > most_writers, diverges
        self._open(done)
        self._writing = threading.RLock()
        self._task = task
        self._reporter = Reporter(
            task, total, done, config.log_interval, silent or rank != 0, config.eval_every is None
        )
        if group.device.type == "cuda":  # the measurements for the plan do not count
            torch.cuda.reset_peak_memory_stats(group.device)
        self._tells_sync = tells_sync
        self._pending: _Taken | None = None
        self._due: tuple[_Taken, tuple[float, ...]] | None = None
        run.trains_since = run.trains_since or time.monotonic()
        self._scale: float | None = None  # loss scale of the last step
        self._compiles = compiles
        self._first_steps = first_steps or FirstSteps()
        self._local = False  # True if ranks take some steps alone between two all-reduces
        self._seconds: deque[float] = deque(maxlen=32)
        self.progress = Progress()

    def __enter__(self) -> "Recorder":
        return self

    @property
    def timeout_s(self) -> float:
        """Seconds after which a step without progress on any rank counts as stuck."""
        # First steps build kernels, and a compiled model is built again for each batch size. The
        # time of a local step does not predict that of a step with an all-reduce.
        if self._compiles or self._local or len(self._seconds) < 3:
            return PROGRESS_TIMEOUT_S
        return step_timeout_s(median(self._seconds))

    def step(self, state: TrainState, lr: float, plan: Plan, result: StepResult) -> Timed | None:
        """Add a step that was just launched on the device, and complete the previous step.

        The record of a step is completed when the next step is added. By then the device has
        finished the step, so reading the times of the step does not block. The times of other ranks
        have arrived with the exchange of the next step. :meth:`write` writes the record later. A
        rank on a CPU writes the record at once, because its next backward pass may wait for a slow
        rank. If no rank has a GPU, the added step itself is completed at once.

        Args:
            state: position before the step.
            lr: learning rate of the step.
            plan: plan of the step's batch.
            result: outcome of the step.

        Returns:
            The step that was completed, with the times of all ranks. None: no step was completed.
        """
        timed = None if self.at_once else self._complete(result.ready_s)
        self._local |= result.loss_sum is None
        weight = result.weight or plan.global_batch * self._task.weight
        record = StepRecord(
            step=state.step, epoch=state.epoch, lr=lr,
            loss=None if result.loss_sum is None else result.loss_sum / weight,
            loss_scale=result.loss_scale, overflow=result.overflow, grad_norm=result.grad_norm,
            n_local=plan.counts[self._rank], n_global=plan.global_batch,
            t_data=0.0, t_compute=0.0, t_wait=None, t_comm=None, t_opt=0.0,
            mem_peak_mib=0.0, samples_per_s=0.0, weight=weight,
            time=time.time(),
        )  # fmt: skip
        unsound = [self._ranks[rank] for rank in result.unsound]
        self._pending = _Taken(record, result.laps, plan, unsound)
        if self.at_once:
            timed = self._complete(result.ready_s)
        if self._device.type == "cpu":
            self.write()
        return timed

    def flush(self) -> None:
        """Complete and write the record of the last step. All ranks call it."""
        own = self._pending.laps.ready_s if self._pending else 0.0
        self._complete(tuple(ready for (ready,) in all_gather_floats([own])))
        self.write()

    def last_words(self) -> None:
        """Write all steps so far when the run ends abnormally, without the times of other ranks.

        Another thread calls this method, while the training thread may be writing or be blocked by
        a disk.
        """
        if self._writing.acquire(timeout=_LAST_WORDS_S):
            try:
                self._complete(())
                self.write()
            finally:
                self._writing.release()

    def _complete(self, ready_s: tuple[float, ...]) -> Timed | None:
        """Complete the pending step with each rank's ``ready_s``, and return the step.

        None: no step is pending, or some times are unknown.
        """
        with self._writing:
            self.write()
            if self._pending is None:
                return None
            taken, self._pending = self._pending, None
            self._due = taken, ready_s
            return Timed(taken.plan, ready_s) if ready_s and all(ready_s) else None

    def write(self) -> None:
        """Write the record of the completed step.

        The caller calls this method while the device still computes queued work.
        """
        with self._writing:
            self._write()

    def _write(self) -> None:
        if self._due is None:
            return
        (taken, ready_s), self._due = self._due, None
        record, laps, plan = taken.record, taken.laps, taken.plan
        sync, opt = laps.seconds("sync"), laps.seconds("opt")
        wait = comm = None
        if self._tells_sync:
            if ready_s:
                wait = min(sync, max(ready_s) - ready_s[self._rank])
            comm = sync - (wait or 0.0)
        else:
            opt += sync
        seconds = laps.seconds(*LAPS)
        self._seconds.append(seconds)
        record = dataclasses.replace(
            record, t_data=laps.seconds("data"), t_compute=laps.seconds("compute"), t_wait=wait,
            t_comm=comm, t_opt=opt, t_host=laps.seconds(HOST),
            mem_peak_mib=memory_peak(self._device), samples_per_s=record.n_global / seconds,
        )  # fmt: skip
        self.last = record
        if self._steps is not None:
            others = others_ready(ready_s, plan.counts, self._ranks) if self._many else None
            self._steps.write(dataclasses.replace(record, others_ready=others))
        self._run.samples += record.n_global
        self._say_links(self._first_steps.step(record))
        self._reporter.step(record)
        self.progress = Progress(record.epoch, record.step, record.t_compute)
        if self._rank == 0:  # all ranks have the same values
            if record.overflow:
                self._run.event("overflow", step=record.step, loss_scale=record.loss_scale,
                                ranks=taken.unsound)  # fmt: skip
            elif self._scale is not None and record.loss_scale > self._scale:
                self._run.event("loss_scale", step=record.step, value=record.loss_scale)
        self._scale = record.loss_scale

    def epoch(self, record: EpochRecord) -> None:
        """Record and report an evaluation."""
        if self._epochs is not None:
            self._epochs.write(record.as_json())
        self._reporter.epoch(record)

    def evaluation_at(self, step: int) -> EpochRecord | None:
        """Return the recorded evaluation after ``step`` steps, or None. All ranks call it.

        The record may come from the run that this run continues.
        """
        here = self.evaluations(step) if self._rank == 0 else []
        result = next((record for record in reversed(here) if record["step"] == step), None)
        known = all_gather_object(result)[0]
        return known and EpochRecord.from_json(known)

    def evaluations(self, step: int) -> list[JsonDict]:
        """Return the recorded evaluations up to a step.

        The result includes the evaluations of the run that this run continues.
        """
        return [record for record in self._run.read_evaluations() if record["step"] <= step]

    def _open(self, done: int) -> None:
        """Open the record files, and remove the records after the first ``done`` steps.

        The run repeats the removed steps.
        """
        folder = self._run.folder
        folder.drop_after(done, self._launched, self._ranks, self._diverges)
        writes = self._rank == 0 or not self._many
        self._steps = folder.steps(self._launched) if writes else None
        self._epochs = folder.epochs() if self._rank == 0 else None

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        if self._epochs is not None:
            self._epochs.close()

    def go_back(self, done: int) -> None:
        """Remove the records after the first ``done`` steps, and continue after these steps."""
        self._close()
        self._open(done)
        self._reporter.begin(done)

    def note(self, kind: str, text: str, **content: Any) -> None:
        """Record and print a note that is the same on all ranks. Only rank 0 writes it."""
        if self._rank == 0:
            self._run.event(kind, text=text, **content)
            self._reporter.print_line(text)

    def note_own(self, kind: str, text: str, **content: Any) -> None:
        """Record and print a note about this rank alone."""
        words = f"rank {self._launched} on {socket.gethostname()}: {text}"
        self._run.event(kind, text=words, **content)
        self._reporter.print_line(words)

    def _say_links(self, text: str) -> None:
        if text:
            self.note("links_changed", text)

    def result(
        self, evaluated: EpochRecord, epoch_samples: int, peaks: Sequence[float] = ()
    ) -> dict[str, Any]:
        """Return the result of a finished run, for run.json.

        Args:
            evaluated: the last evaluation.
            epoch_samples: number of training samples in an epoch.
            peaks: peak memory of each rank in MiB; empty if no peak was predicted.
        """
        seconds = time.monotonic() - self._run.trains_since
        return {
            **evaluated.metrics, "steps": evaluated.step,
            "seconds": seconds, "samples_per_s": self._run.samples / seconds,
            "epoch_samples": epoch_samples,
            **({"memory_peak_mib": list(peaks)} if peaks else {}),
        }  # fmt: skip

    def __exit__(self, failed: object, *_: object) -> None:
        """Close all files and remove the progress bar."""
        with contextlib.suppress(RuntimeError):  # a failing device was reported already
            self.last_words()
        if failed is None:
            self._say_links(self._first_steps.end())
        self._reporter.close()
        self._close()


def memory_peak(device: torch.device) -> float:
    """Return the peak memory in MiB: of the GPU's allocations, or of this process for a CPU."""
    if device.type == "cuda":
        # max_memory_allocated returns the same, but first makes a flat table of all statistics.
        known = torch.cuda.memory_stats_as_nested_dict(device)
        return float(known["allocated_bytes"]["all"]["peak"]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

"""The option ``--profile``: torch's profiler on some ranks in some steps.

The traces of all profiled ranks can be shown on one time axis, although the clocks of ranks differ.
An all-gather ends on no rank before it has begun on every other rank. The start and end times of an
all-gather therefore bound the offset between two clocks from both sides. Shorter exchanges give
tighter bounds.
"""

import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType

from torch.profiler import ProfilerActivity, profile, record_function

from motley.comm.collectives import all_gather_floats
from motley.config.option import ALL, SLOWEST, StepSpan
from motley.config.options import Config
from motley.errors import MotleyError
from motley.faults import Phase
from motley.measure.process_group import ProcessGroup
from motley.plan.plan import Rank
from motley.records.run_folder import RunFolder
from motley.records.trace import TraceClock, step_span_name, write_trace
from motley.text import typed_command
from motley.train.recorder import Recorder, Timed

_EXCHANGES = 40
_JUDGED_BY = 20  # steps whose median finds the slowest rank, even if one step is disturbed


def check_profile(config: Config, workers: Sequence[Rank], last: int) -> None:
    """Raise MotleyError if ``--profile`` or ``--profile-ranks`` names an unknown step or rank.

    Args:
        config: the options.
        workers: the ranks that train.
        last: number of steps of the run.
    """
    if config.profile is None:
        return
    if config.profile.first >= last:
        raise MotleyError(
            f"--profile {config.profile}: the run ends with step {last}; profile earlier ones, "
            "or train for longer"
        )
    ranks = [worker.rank for worker in workers]
    if isinstance(config.profile_ranks, tuple) and (odd := set(config.profile_ranks) - set(ranks)):
        raise MotleyError(
            f"--profile-ranks {','.join(map(str, sorted(odd)))}: these ranks do not train; the "
            f"ranks that train are {', '.join(map(str, ranks))}"
        )


class StepProfiler:
    """A context manager that profiles chosen ranks in chosen steps. All ranks enter it.

    Args:
        config: the options.
        group: process group of the ranks that train.
        folder: folder of the run.
        machines: number of each rank's machine.
        recorder: the recorder of the run.
        say: function that reports the phase of this rank to the other ranks.
    """

    def __init__(
        self,
        config: Config,
        group: ProcessGroup,
        folder: RunFolder,
        machines: Sequence[int],
        recorder: Recorder,
        say: Callable[[Phase], None],
    ) -> None:
        self._steps: StepSpan | None = config.profile
        self._asked, self._ranks = config.profile_ranks, [each.rank for each in group.workers]
        self._group, self._folder, self._recorder, self._say = group, folder, recorder, say
        self._beside_first = group.rank is not None and machines[group.rank] == machines[0]
        self._ready: deque[tuple[float, ...]] = deque(maxlen=_JUDGED_BY)
        self._chosen: list[int] = []  # numbers in the group, while they are profiled
        self._disturbed = False  # True if profiling has slowed the previous step
        self._running: profile | None = None  # None if this rank does not profile now
        self._step, self._phase = ExitStack(), ExitStack()  # spans that are open
        self._clock, self._base_ns = TraceClock(0.0, 0.0), 0

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end()
        elif self._running is not None:
            self._close()

    def before(self, step: int) -> None:
        """Mark the beginning of a step in the trace. All ranks call it."""
        steps = self._steps
        if steps is None:
            return
        if self._chosen and step >= steps.end:
            self._end()
        elif step >= steps.first:
            if not self._chosen and step < steps.end:
                self._begin()
            if self._running is not None:
                self._step.enter_context(record_function(step_span_name(step)))

    def enter(self, phase: Phase) -> None:
        """Mark the beginning of a new phase of this rank in the trace."""
        if self._running is not None:
            self._phase.close()
            self._phase.enter_context(record_function(phase.key))

    def after(self, timed: Timed | None) -> Timed | None:
        """Mark the end of a step in the trace, and discard times that profiling has disturbed.

        Args:
            timed: the previous step, with the times of all ranks; None: the times are not known.

        Returns:
            ``timed``, or None if profiling has made some ranks slower in the previous step.
        """
        self._close_spans()
        disturbed, self._disturbed = self._disturbed, bool(self._chosen)
        if disturbed or self._disturbed:
            return None
        if timed is not None:
            self._ready.append(timed.ready_s)
        return timed

    def _begin(self) -> None:
        ranks = range(self._group.size)
        if self._asked == ALL:
            self._chosen = list(ranks)
        elif self._asked == SLOWEST:
            usual = [median(times) for times in zip(*self._ready, strict=True)] or [0.0]
            self._chosen = [usual.index(max(usual))]
        else:
            self._chosen = [rank for rank in ranks if self._ranks[rank] in self._asked]
        self._clock, self._base_ns = compare_clocks()
        if self._beside_first:
            self._clock = TraceClock(0.0, 0.0)  # one clock
        if self._group.rank in self._chosen:
            os.environ.setdefault(
                "KINETO_LOG_LEVEL", "99"
            )  # otherwise kineto logs its start and end
            kinds = [ProfilerActivity.CPU]
            if self._group.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._running = profile(
                activities=kinds, acc_events=True
            )  # without acc_events it warns about cycles
            self._running.start()

    def _close_spans(self) -> None:
        self._phase.close()
        self._step.close()

    def _end(self) -> None:
        """Write the traces, and report where they are. All ranks call it."""
        if not self._chosen or self._steps is None:
            return
        first, last = self._steps.first + 1, self._steps.end  # users count steps from 1
        chosen = [self._ranks[rank] for rank in self._chosen]
        self._steps, self._chosen = None, []
        if self._running is not None:
            self._say(Phase.SAVE)  # a large trace takes longer than a step
            self._write(self._close())
        names = f"rank{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"
        if self._asked == SLOWEST:
            names += ", the slowest"
        join = typed_command("python plots/traces.py")
        self._recorder.note(
            "profile",
            f"profiled steps {first} to {last} of {names}; for a summary, and one trace of all "
            f"ranks, run: {join} {self._folder.path}",
            ranks=chosen,
        )

    def _close(self) -> profile:
        running, self._running = self._running, None
        assert running is not None
        self._close_spans()
        running.stop()
        return running

    def _write(self, profiled: profile) -> None:
        worker = self._group.workers[self._group.rank or 0]
        try:
            with tempfile.TemporaryDirectory(dir=self._folder.path) as folder:
                raw, made = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
                profiled.export_chrome_trace(str(raw))
                text = raw.read_text(encoding="utf-8", errors="replace")
                write_trace(
                    made, json.loads(text), worker.rank, worker.host, self._clock, self._base_ns
                )
                made.replace(self._folder.trace(worker.rank))
        except (OSError, ValueError) as error:  # a full disk ends no training for a picture
            print(
                f"motley: the trace of rank {worker.rank} on {worker.host} could not be written: "
                f"{error}", file=sys.stderr, flush=True,
            )  # fmt: skip


def compare_clocks() -> tuple[TraceClock, int]:
    """Estimate the offset of this rank's clock from rank 0's. All ranks call it.

    Returns:
        The offset with its error, and the zero point of all times in the traces. The zero point is
        a whole second of rank 0's clock, in nanoseconds.
    """
    base_ns = int(all_gather_floats([time.time_ns() // 10**9])[0][0]) * 10**9
    own: list[tuple[float, float]] = []
    for _ in range(_EXCHANGES):
        begin = time.time_ns()
        all_gather_floats([0.0])
        own.append(((begin - base_ns) / 1e9, (time.time_ns() - base_ns) / 1e9))
    received = all_gather_floats([each for pair in own for each in pair])[0]
    return estimate_offset(list(zip(received[::2], received[1::2], strict=True)), own), base_ns


def estimate_offset(
    first: Sequence[tuple[float, float]], own: Sequence[tuple[float, float]]
) -> TraceClock:
    """Return the offset between two clocks, from the start and end of exchanges on both.

    An exchange cannot end on one rank before it has started on the other rank. Source: Cristian,
    "Probabilistic clock synchronization", 1989.

    Args:
        first: start and end of each exchange by rank 0's clock, in seconds.
        own: start and end of the same exchanges by this rank's clock, in seconds.
    """
    least = max(mine[0] - theirs[1] for theirs, mine in zip(first, own, strict=True))
    most = min(mine[1] - theirs[0] for theirs, mine in zip(first, own, strict=True))
    return TraceClock((least + most) / 2, (most - least) / 2)

"""The records of a user's own loop, in the same files as the records of ``motley train``."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from motley.checkpoint.run import Run
from motley.config.options import Config
from motley.engines.protocol import StepResult
from motley.errors import MotleyError
from motley.launch.world import World
from motley.library.step_gate import FinishedStep
from motley.measure.process_group import ProcessGroup, gpu_logger
from motley.plan.forecast import Forecast
from motley.plan.length import TrainState
from motley.plan.plan import Plan, limit_s
from motley.plan.speeds import SpeedTable
from motley.records.run_folder import RunFolder
from motley.tasks.task import Task
from motley.train.recorder import Recorder
from motley.train.summary import print_verdict


@dataclass
class LoopTask(Task):
    """A placeholder task that gives a user's own loop a name in the records."""

    noun = "row"
    unit = "rows"

    def title(self) -> str:
        """Return a description of the run."""
        return f"the loop of {Path(sys.argv[0]).name}"


def make_config(logs: str, name: str | None, resume: str | None = None) -> Config:
    """Return the options of a run of a user's own loop, as its records contain them.

    Args:
        logs: folder of all runs.
        name: name of the run's folder; None: the time of the start.
        resume: a run or a checkpoint to continue from; auto: the newest unfinished run of this
            script. None: a new run.
    """
    return Config(task=sys.argv[0], logs=logs, run=name, resume=resume, own=(LoopTask(),))


class LoopRecords:
    """The writer of the records of a user's own loop, from its first step on.

    Args:
        world: the ranks.
        group: process group of the ranks that train.
        logs: folder of all runs.
        name: name of the run's folder; None: the time of the start.
        strategy: ``ddp`` or ``fsdp``.

    Attributes:
        full_batch: number of rows of a full global batch; 0 before :meth:`start`.
        advice: part of an error message that explains how to continue.
    """

    def __init__(
        self, world: World, group: ProcessGroup, logs: str, name: str | None, strategy: str
    ) -> None:
        self._world, self._group = world, group
        self.config, self._strategy = make_config(logs, name), strategy
        self._run: Run | None = None
        self._open = ExitStack()
        self._recorder: Recorder | None = None
        self._content: dict[str, Any] = {}  # content of run.json
        self._steps = 0
        self._wire_s: deque[float] = deque(maxlen=8)  # seconds on the wire in the last steps
        self.full_batch = 0
        self.advice = "lab.resume() continues from the last lab.save()"
        again = "start the script again"
        world.supervisor.before_end(lambda: None, lambda _: again, clear_line="", if_lost=again)

    @property
    def run(self) -> Run:
        """The run that :meth:`resume` continues, or else a new run.

        The first access is a collective, so that all ranks read this attribute at the same point.
        """
        if self._run is None:
            self._world.from_first(self._check_new)
            self._run = Run.find(self._world, self.config)
        return self._run

    def _check_new(self) -> None:
        """Raise MotleyError if the folder of the new run belongs to an earlier run."""
        folder = RunFolder(Path(self.config.logs) / str(self.config.run))
        if self.config.run is not None and (folder.path / "run.json").exists():
            raise MotleyError(
                f"the run folder {folder.path} exists: call lab.resume() before the first loop to "
                "continue it, or choose another name with motley.join(run=...) or MOTLEY_RUN"
            )

    def resume(self, path: str) -> list[Path]:
        """Continue a run; return its checkpoints, the newest first. All ranks call it.

        Args:
            path: a run or a checkpoint; auto: the newest unfinished run of this script.
        """
        if self._run is not None:
            raise MotleyError(
                "lab.resume() was called after the training had begun: call it before the first "
                "loop over lab.loader(...)"
            )
        self._run = Run.find(self._world, replace(self.config, resume=path), explains=False)
        return self._run.resume_from

    @property
    def has_started(self) -> bool:
        """True once run.json is written."""
        return self._recorder is not None

    def start(self, plan: Plan, numbers: int, trained: int, step: int, total: int) -> None:
        """Write run.json; all ranks call it before a loop's first step in this group.

        Args:
            plan: shares of the first global batch.
            numbers: number of elements in the parameters and buffers of all models.
            trained: number of elements that are trained.
            step: number of steps that are done.
            total: expected number of steps of the whole run.
        """
        config, group, self.full_batch = self.config, self._group, plan.global_batch
        self._content = {
            "config": {
                **config.as_json(), "batch_size": plan.global_batch, "own_loop": True,
                "strategy": self._strategy,
            },
            "task": {"name": config.task, "unit": LoopTask.unit, "weight": 1.0,
                     "title": LoopTask().title()},
            "model": {"numbers": numbers, "trained": trained, "gradient_bytes": 4 * trained},
            "last_step": total,
            "ranks": [worker.as_json() for worker in group.workers],
            "left_out": [entry.as_json() for entry in group.left_out],
            "plan": _describe(plan, ()),
            "memory": None, "advice": [], "links": None, "links_of_earlier_run": None,
            "start": self._world.clock.as_json(), "backend": group.backend,
        }  # fmt: skip
        self._record(step)

    def _record(self, step: int) -> None:
        """Write run.json, and open the files that record the next steps; all ranks call it."""
        run, group, total = self.run, self._group, self._content["last_step"]
        run.start(self._content, step)
        self._open = ExitStack()
        self._open.enter_context(gpu_logger(self._world, group, run.folder, self._progress))
        recorder = Recorder(
            run, LoopTask(), group, self.config, tells_sync=True, done=step, total=total,
            compiles=True, silent=True,
        )  # fmt: skip
        self._recorder = self._open.enter_context(recorder)
        again = f"start it again; {self.advice}"
        self._world.supervisor.before_end(
            recorder.last_words, lambda step: again, clear_line="", if_lost=again
        )

    def continue_with(
        self, world: World, group: ProcessGroup, plan: Plan, step: int, lost: str
    ) -> None:
        """Continue without a lost rank; all surviving ranks call it.

        Args:
            world: the survivors.
            group: process group of the ranks that train.
            plan: shares of a full global batch.
            step: number of steps that are done.
            lost: sentence that describes the lost rank, for the record.
        """
        assert self._run is not None
        self._open.close()
        self._world, self._group = world, group
        self._run.for_survivors(world)
        self._content = {
            **self._content, "ranks": [worker.as_json() for worker in group.workers],
            "left_out": [entry.as_json() for entry in group.left_out],
            "plan": _describe(plan, ()), "backend": group.backend,
        }  # fmt: skip
        self._record(step)
        self.note("regroup", f"{lost}; the other ranks continue with step {step}", step=step)

    def step(self, step: FinishedStep, plan: Plan) -> None:
        """Record a finished step.

        Args:
            step: the step.
            plan: shares of its global batch.
        """
        if self._recorder is None:
            return
        result = StepResult(
            loss_sum=step.loss * plan.global_batch, grad_norm=step.norm, overflow=step.overflow,
            loss_scale=step.loss_scale, ready_s=tuple(each.own_s for each in step.numbers),
            laps=step.laps,
        )  # fmt: skip
        state = TrainState(step.piece.step, step.piece.epoch, step.piece.batch * plan.global_batch)
        self._recorder.step(state, step.rate, plan, result)
        if self._recorder.last is not None and self._recorder.last.t_comm is not None:
            self._wire_s.append(self._recorder.last.t_comm)
        self._steps = step.piece.step + 1

    def note(self, kind: str, text: str, **content: Any) -> None:
        """Record and print an event on rank 0; all ranks may call it. See Recorder.note."""
        if self._recorder is not None:
            self._recorder.note(kind, text, **content)

    def record_shares(self, plan: Plan, tables: Sequence[SpeedTable]) -> None:
        """Write the present shares, and the speeds behind them, to run.json on rank 0."""
        if self._group.rank == 0 and self._recorder is not None:
            wire_s = median(self._wire_s) if self._wire_s else 0.0
            self.run.folder.update_run(plan=_describe(plan, tables, wire_s))

    def end(self) -> None:
        """Close the records at the end of this rank's script; rank 0 writes the result."""
        if self._recorder is None:
            return
        seconds = time.monotonic() - self.run.trains_since
        self._open.close()
        if self._group.rank == 0:
            self.run.record_result(
                {"steps": self._steps, "seconds": seconds,
                 "samples_per_s": self.run.samples / seconds}
            )  # fmt: skip

    def finish(self) -> None:
        """Mark the run as finished, once all ranks are done; all ranks call it."""
        if self._recorder is None:
            self._world.supervisor.finish()
            return
        if self._world.rank == 0:
            print_verdict(self.run)
        self.run.finish()

    def _progress(self) -> Any:
        assert self._recorder is not None
        return self._recorder.progress


def _describe(plan: Plan, tables: Sequence[SpeedTable], wire_s: float = 0.0) -> dict[str, Any]:
    """Return the entry ``plan`` of run.json.

    Args:
        plan: the shares.
        tables: speed of each rank; empty if no speed is measured yet.
        wire_s: seconds of a step in which the ranks exchange gradients.
    """
    expected = None
    if tables:
        pairs = zip(plan.counts, tables, strict=True)
        compute_s = tuple(table.compute_seconds(count) if count else 0.0 for count, table in pairs)
        limit = limit_s(plan.global_batch, tables)
        expected = Forecast(plan.global_batch, compute_s, wire_s, 1, wire_s, limit).as_json()
    return {
        **asdict(plan), "counts": plan.counts, "micro_batches": plan.micro_batches,
        "wire": str(plan.wire), "overlaps": len(plan.shares) > 1, "sends": [],
        "speeds": [table.as_json() for table in tables], "forecast": expected,
    }  # fmt: skip

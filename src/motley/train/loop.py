"""The training loop: epochs of global batches, with any engine.

Every rank computes its part of a batch in micro-batches, and an optimizer step of all ranks
finishes the batch. Each step is recorded. By default, an evaluation and a checkpoint follow every
epoch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from motley.checkpoint.store import BEST, parse_step, save
from motley.comm.collectives import all_gather_floats, mark_now
from motley.config.option import Duration
from motley.data.loader_memory import LoaderGrowth, explain_workers
from motley.data.source import Batch, make_seed
from motley.engines.named_state import seed_random
from motley.engines.protocol import LaunchedStep, StepResult
from motley.engines.schedule import get_rate, set_rate
from motley.engines.step_timer import HOST
from motley.faults import Phase
from motley.launch.world import World
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.plan.replan import Proposal
from motley.records.json_files import JsonDict
from motley.records.training import EpochRecord
from motley.tasks.model import TaskModel
from motley.tasks.task import acts_after_evaluation
from motley.train.agreement import (
    Agreement,
    check_numbers,
    readable,
    rebalance,
    shrink_micro_batches,
)
from motley.train.best import BestEvaluation
from motley.train.evaluation import evaluate, write_last_evaluation
from motley.train.profiler import StepProfiler
from motley.train.recorder import Recorder, Timed
from motley.train.rescue import Rescue, pause
from motley.train.setup import Job


class ClockTimer:
    """A timer of checkpoints or evaluations, which all ranks make at a time of rank 0's clock.

    Between two checkpoints, the ranks receive the time of rank 0's clock about ten times. Each
    exchange takes place when half of the remaining time should have passed.

    Args:
        every: a Duration between two checkpoints or evaluations. An object of another type turns
            the timer off.
        step: step of the last checkpoint or evaluation.
    """

    def __init__(self, every: object, step: int) -> None:
        self._every_s = every.seconds if isinstance(every, Duration) else None
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restart the timer after a checkpoint or an evaluation of this step."""
        self._step, self._time, self._ask_at = step, time.monotonic(), step + 1

    def asks(self, step: int) -> bool:
        """Return True if :meth:`due` exchanges the time with the other ranks at this step."""
        return self._every_s is not None and step >= self._ask_at

    def due(self, step: int) -> bool:
        """Return True if a checkpoint or an evaluation is due.

        All ranks call this method after the same step.
        """
        if not self.asks(step):
            return False
        assert self._every_s is not None
        ((passed_s,), *_) = all_gather_floats([time.monotonic() - self._time])
        steps = max(1, step - self._step)
        remaining = (self._every_s - passed_s) / (passed_s / steps) if passed_s else 1.0
        self._ask_at = step + max(1, int(remaining / 2))
        return remaining < 1


@contextmanager
def _evaluating(model: TaskModel) -> Iterator[None]:
    """Set the model to evaluation mode without gradients in a ``with`` block."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


@dataclass(frozen=True)
class _Unread:
    """A step that was launched on the device, and whose outcome the host has not read yet.

    Attributes:
        batch: plan of the step's batch: its division among ranks and micro-batches.
        launched: the step on the device.
        indices: indices of this rank's samples.
        before: position of the training before the step.
        rate: learning rate of the step.
    """

    batch: Plan
    launched: LaunchedStep
    indices: list[int]
    before: TrainState
    rate: float


class Loop:
    """The loop that trains a job from its state to its last step.

    Args:
        world: the ranks.
        job: the objects of the training.
        recorder: the recorder of the run.
        state: position of the training at the start.
        rescue: object that can save or copy the state after a rank is lost. The loop informs this
            object of each change of the state.
        profiler: profiler of the steps.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        recorder: Recorder,
        state: TrainState,
        rescue: Rescue,
        profiler: StepProfiler,
    ) -> None:
        self._world, self._job, self._recorder = world, job, recorder
        self._agreement = Agreement(job, recorder)
        self._state, self._rescue = state, rescue
        self._save_timer = ClockTimer(job.config.save_every, state.step)
        self._evaluation_timer = ClockTimer(job.config.eval_every, state.step)
        self._action_timer = ClockTimer(job.model.task.acts_every, state.step)
        self._evaluation_due = False  # True if the last step makes an evaluation due
        self._saved_at: int | None = None  # step of the last checkpoint of this loop
        self.best = self._restore_best()
        self._plan = job.plan  # plan of a full batch; the last batch of an epoch may be smaller
        self._timed: Timed | None = None  # the last step with known times, until it is judged
        self._proposal: Proposal | None = None  # a proposed split
        self._unread: _Unread | None = None  # the last step, until its outcome is read
        self._growth = LoaderGrowth(job.loader.workers, job.loader.most_workers)
        self._profiler = profiler
        job.engine.clock.on_phase, job.engine.clock.at_once = self._enter, recorder.at_once

    def run(self) -> EpochRecord:
        """Train to the end, and return the last evaluation."""
        with explain_workers(self._job.loader.workers):
            evaluated = self._evaluation_before()
            while not self._ended():
                if self._epoch():
                    evaluated = self._evaluate()
        write_last_evaluation(self._job)
        assert evaluated is not None  # no run is shorter than a step
        return evaluated

    def _ended(self) -> bool:
        """Return True if the run is complete, or if its evaluations no longer improve."""
        return self._job.length.ended(self._state) or (self.best is not None and self.best.stops)

    def _epoch(self) -> bool:
        """Train until the epoch ends, or until an evaluation or a new plan interrupts the epoch.

        Returns:
            True if an evaluation is due.
        """
        job, self._evaluation_due = self._job, False
        epoch = self._state.epoch
        job.engine.clock.restart()
        self._report_phase(Phase.DATA)
        for batch, micro_batches in job.loader.steps(epoch, self._state.consumed, self._plan):
            if not self._world.supervisor.begin_step(self._state.step):
                if self._read():
                    pause(self._world, job, self._state, partial(self._save, asked=True))
                break  # all ranks have returned to a checkpoint
            indices = self._accumulate(batch, micro_batches)
            if not self._read():
                job.engine.drop_gradients()
                break
            late = self._launch(batch, indices)
            if not late and not self._read():
                break
        self._recorder.flush()
        return self._evaluation_due

    def _accumulate(self, batch: Plan, micro_batches: Iterator[tuple[Batch, bool]]) -> list[int]:
        """Compute this rank's gradient of one global batch.

        Return the indices of this rank's samples.
        """
        job, indices = self._job, list[int]()
        self._profiler.before(self._state.step)
        if self._unread is None:
            self._rescue.mark_consistent(self._state, self._plan)
        self._world.supervisor.step = self._state.step
        # Drop-out differs between ranks and steps. A repeated step has the same drop-out again.
        seed_random(
            make_seed(job.config.seed, dist.get_rank(), self._state.step), job.engine.device
        )
        clock = job.engine.clock
        clock.lap(HOST)
        for micro_batch, last in micro_batches:
            clock.lap("data")
            job.engine.accumulate(micro_batch, batch.global_batch, last)
            indices += readable(micro_batch, job.config, job.run)
        clock.lap("data")  # without loader processes, the next micro-batch is read now
        return indices

    def _launch(self, batch: Plan, indices: list[int]) -> bool:
        """Do the host's pending work, and then launch one step of all ranks on the device.

        Returns:
            True if the host may queue the next forward and backward pass before it reads the
            outcome of this step. False: the host must read the outcome first.
        """
        job, before = self._job, self._state
        # The host has time: the device is still computing.
        self._recorder.write()
        self._judge()
        length = job.length
        set_rate(job.schedule, length.updates(before), length.full_batch(before), job.config)
        job.engine.clock.lap(HOST)
        self._state = length.after(before, batch.global_batch)
        late = self._may_read_late()
        launched = job.engine.launch_step(late)
        if late:
            self._rescue.launched(self._state, launched)
        self._unread = _Unread(batch, launched, indices, before, get_rate(job.engine.optimizer))
        return late

    def _may_read_late(self) -> bool:
        """Return True if the host may start the next step before it reads this step's outcome.

        The value is False if an evaluation, a checkpoint or a new split comes before the next step.
        All ranks return the same value.
        """
        job, state = self._job, self._state
        between = (
            self._proposal or job.config.profile or job.length.ended(state)
            or job.length.evaluates(state) or job.length.saves(state)
            or self._save_timer.asks(state.step) or self._evaluation_timer.asks(state.step)
            or self._acts_after(state.step) or self._action_timer.asks(state.step)
        )  # fmt: skip
        return job.engine.reads_late and not between

    def _read(self) -> bool:
        """Read the outcome of the launched step, and act on the outcome. Do nothing without a step.

        The method reacts to exhausted memory and to values that are not finite, writes the record,
        saves a checkpoint if one is due, and changes the split if another split is better.

        Returns:
            True if the epoch continues with the same batches. False: the loop must read the batches
            again.
        """
        if (unread := self._unread) is None:
            return True
        self._unread = None
        job, before, batch = self._job, unread.before, unread.batch
        result = unread.launched.read()
        self._world.supervisor.check_group()  # the outcome in a broken group is undefined
        if result.oom_ranks:
            if result.retry:
                self._state = before
            self._shrink(batch, result, before.step)
            if result.retry:
                return False  # the same samples again, split by the new plan
        check_numbers(job, self._plan, before, result, unread.indices)
        self._timed = self._profiler.after(self._recorder.step(before, unread.rate, batch, result))
        self._rescue.mark_consistent(self._state, self._plan, unread.launched.wait)
        if not self._save():
            return False  # all ranks have returned to a checkpoint
        if self._acts_after(self._state.step) or self._action_timer.due(self._state.step):
            self._act_between()
        self._evaluation_due = job.length.evaluates(self._state) or self._evaluation_timer.due(
            self._state.step
        )
        self._add_loaders()
        changed = self._replan() or bool(result.oom_ranks) or self._evaluation_due
        return not job.length.ended(self._state) and not (
            changed and self._state.epoch == before.epoch
        )

    def _shrink(self, batch: Plan, result: StepResult, step: int) -> None:
        """Change the plan to smaller micro-batches on the ranks whose memory ran out."""
        # Local SGD reports this late: the batch may have changed since.
        tried = batch if result.retry else self._plan
        less = shrink_micro_batches(tried, self._job, result, self._recorder, step)
        self._plan = replace(self._plan, max_micro_batch=less.max_micro_batch)
        self._job.engine.reconfigure(self._plan)
        self._job.watch.limit(self._plan.max_micro_batch)
        self._proposal = None  # it assumed larger micro-batches

    def _judge(self) -> None:
        """Propose another split if the ranks' times in the last step show that it is faster."""
        timed, self._timed, self._proposal = self._timed, None, None
        if timed is None or timed.plan.global_batch not in self._job.length.full_batches:
            return  # a smaller batch cannot be compared
        self._proposal = self._job.watch.step(timed.ready_s, timed.plan.counts, self._plan.counts)

    def _replan(self) -> bool:
        """Change the split if another split was proposed, and return True if it changed."""
        if self._proposal is None:
            return False
        self._plan = rebalance(self._plan, self._proposal, self._recorder, self._state)
        self._job.engine.reconfigure(self._plan)
        self._job.watch.reset()
        return True

    def _add_loaders(self) -> None:
        """Add loader processes if this rank waits for its samples and has cores for more.

        Each rank decides this on its own.
        """
        record, loader = self._recorder.last, self._job.loader
        growth = self._growth.step(record) if record else None
        if growth is None:
            return
        before = loader.workers
        loader.set_workers(growth.workers)
        self._growth.take(loader.workers, growth.waited)
        if loader.workers == before:
            return
        self._recorder.note_own(
            "loader_processes",
            f"{loader.workers} loader processes instead of {before}: this rank waited for its "
            f"samples in {growth.waited:.0%} of the time",
            before=before, now=loader.workers, waited=growth.waited,
        )  # fmt: skip

    def _save(self, asked: bool = False) -> bool:
        """Compare the state of all ranks, and save a checkpoint if one is due.

        A checkpoint is due by its interval, or if ``asked`` is True. The state is also compared at
        the end of the run.

        Returns:
            False if all ranks have returned to an earlier checkpoint.
        """
        job, state = self._job, self._state
        job.checkpoints.check()
        saves = asked or job.length.saves(state) or self._save_timer.due(state.step)
        if not saves and not job.length.ended(state):
            return True
        self._report_phase(Phase.SAVE)
        self._recorder.flush()
        job.engine.sync_parameters()
        self._state = self._agreement.check(state)
        self._rescue.mark_consistent(self._state, self._plan, mark_now(job.engine.device))
        if self._state != state:
            self.best = self._restore_best()
            return False
        if saves:
            save(job.engine, job.checkpoints, state, job.saved_config)
            self._agreement.saved(state)
            self._save_timer.restart(state.step)
            self._saved_at = state.step
        job.engine.clock.restart()
        return True

    def _evaluation_before(self) -> EpochRecord | None:
        """Return the evaluation at the position from which the run continues.

        If the run was stopped between the checkpoint and its evaluation, the evaluation runs now.
        With ``--eval-at-start`` a finished run is evaluated again, as the user may want other
        metrics. The result is None if no evaluation is due at this position.
        """
        config, ended = self._job.config, self._ended()
        is_asked = config.eval_at_start and "eval_at_start" not in config.continued_names
        again = is_asked and (ended or self._job.run.continues_finished)
        if not (ended or again or self._job.length.evaluates(self._state)):
            return None
        known = None if again else self._recorder.evaluation_at(self._state.step)
        if known is not None and self.best is not None:
            self._keep_best(self.best, known.step)  # a rank may have been lost before
        return known or self._evaluate()

    def _evaluate(self) -> EpochRecord:
        evaluated = evaluate(self._world, self._job, self._plan, self._state)
        self._recorder.epoch(evaluated)
        self._act(self._job.model)
        self._evaluation_timer.restart(evaluated.step)
        if self.best is not None:
            self.best.add(evaluated)
            self._keep_best(self.best, evaluated.step)
        return evaluated

    def _act(self, model: TaskModel) -> None:
        """Call the task's :meth:`after_evaluation` on rank 0, if the task defines this method."""
        if dist.get_rank() > 0 or not acts_after_evaluation(model.task):
            return
        with _evaluating(model):
            model.task.after_evaluation(model.net, self._job.run.folder.path)

    def _acts_after(self, step: int) -> bool:
        """Return True if the task's :meth:`during_training` is due after this step.

        The result is False if the interval ``acts_every`` of the task is not a number of steps.
        """
        every = self._job.model.task.acts_every
        return isinstance(every, int) and step % every == 0

    def _act_between(self) -> None:
        """Call the task's :meth:`during_training` on rank 0, outside of the measured step time."""
        job, step = self._job, self._state.step
        self._report_phase(Phase.EVALUATE)
        self._recorder.flush()
        if dist.get_rank() == 0:
            with _evaluating(job.model):
                text = job.model.task.during_training(job.model.net, job.run.folder.path, step)
            self._recorder.note("sample", text, step=step)
        self._action_timer.restart(step)
        job.engine.clock.restart()

    def _keep_best(self, best: BestEvaluation, step: int) -> None:
        """Keep the checkpoint of the best evaluation. Save a checkpoint if the run stops early.

        Args:
            best: the best evaluation. The evaluation at ``step`` was added last.
            step: number of finished steps.
        """
        job = self._job
        gains = best.is_to_be_saved and job.config.keep_best is not None and step > 0
        stops = best.stops and not job.length.ended(self._state) and job.length.save_every != 0
        if (gains or stops) and self._saved_at != step and not self._save(asked=True):
            return  # all ranks have returned to a checkpoint
        if gains:
            best.mark_saved()
            if dist.get_rank() == 0:
                job.checkpoints.mark_best_behind(step)
            self._recorder.note(
                "best", f"  {best.metric.name} {best.saved:.6g} is the best so far: its checkpoint "
                f"is kept as {job.checkpoints.path / BEST}",
                step=step, metric=best.metric.name, score=best.saved,
            )  # fmt: skip

    def _restore_best(self) -> BestEvaluation | None:
        """Return the best recorded evaluation, and link its checkpoint. All ranks call it.

        The result is None if no option needs the best evaluation.
        """
        job = self._job
        if job.metric is None:
            return None
        checkpoints, records, steps = job.checkpoints, list[JsonDict](), list[int]()
        if dist.get_rank() == 0:
            checkpoints.wait()
            records = self._recorder.evaluations(self._state.step)
            folders = checkpoints.list_folders(self._state.step)
            steps = [step for each in folders if (step := parse_step(each)) is not None]
        best = BestEvaluation.restore(job.metric, job.config.stop_after, records, steps)
        is_saved = self._state.step in best.found_steps
        self._saved_at = self._state.step if is_saved else None
        if dist.get_rank() == 0 and job.config.keep_best is not None:
            checkpoints.mark_best(best.saved_step)
        return best

    def closing_line(self) -> str:
        """Return a line that explains an early end of the run.

        The line is empty if the run did not end early.
        """
        if self.best is None or not self.best.stops or self._job.length.ended(self._state):
            return ""
        link = self._job.checkpoints.path / BEST
        is_kept = self._job.config.keep_best and self.best.saved_step == self.best.step
        kept = f" (checkpoint {link})" if is_kept else ""
        since = self.best.since
        later = "the evaluation" if since == 1 else f"the {since} evaluations"
        verb = "was" if since == 1 else "were"
        return (
            f"stopped early after step {self._state.step:,}: {self.best.describe()}{kept}, and "
            f"{later} since then {verb} no better. To continue, add --resume "
            f"auto --run {self._job.run.folder.path.name} --stop-after none, or a larger number"
        )

    def _enter(self, phase: Phase) -> None:
        self._profiler.enter(phase)
        self._report_phase(phase, self._recorder.timeout_s)

    def _report_phase(self, phase: Phase, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        self._world.supervisor.set_status(phase, timeout_s)

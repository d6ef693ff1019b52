"""The setup of the objects that training needs.

These objects are the loader, the length of the run, the budget of time and disk space, the model,
the engine and the schedule.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motley.checkpoint.resume import find_state, resume
from motley.checkpoint.run import Run
from motley.checkpoint.store import Checkpoints, KeptState, free_bytes, go_on
from motley.comm.collectives import all_gather_object
from motley.config.option import Duration, Metric
from motley.config.options import Config
from motley.data.loader import Loader
from motley.engines.optimizer import kept_numbers
from motley.engines.out_of_memory import release
from motley.engines.protocol import Engine, EngineContext, EngineFactory
from motley.engines.schedule import Schedule, explain_early_end, make_schedule
from motley.errors import MotleyError
from motley.measure.measured_plan import Planned
from motley.measure.process_group import ProcessGroup
from motley.plan.length import Length, TrainState, make_ramp
from motley.plan.plan import Plan, Rank
from motley.plan.precision import start_scale
from motley.plan.replan import ReplanMonitor, list_devices
from motley.plan.speeds import SpeedTable
from motley.tasks.builtin import CLASS_NAMES, SAMPLES, get_identity, get_task
from motley.tasks.model import TaskModel
from motley.tasks.task import name_action
from motley.text import clock, name_some
from motley.train.best import find_metric
from motley.train.command_line import options_to_save
from motley.train.profiler import check_profile
from motley.train.recorder import FirstSteps
from motley.train.scale_search import search_scale

Note = tuple[str, str, dict[str, Any]]  # an event's kind, its text, and its content


@dataclass(frozen=True)
class Budget:
    """The time and disk space of a run.

    Attributes:
        steps: number of steps left.
        step_s: forecast seconds per step; None if nothing was measured.
        checkpoint: bytes of one checkpoint.
        saves: number of checkpoints that the rest of the run will save.
        keep: number of checkpoints to keep on the disk.
        there: number of checkpoints on the disk that new checkpoints will replace.
        free: free space of the disk in bytes.
        folder: folder of the checkpoints.
    """

    steps: int
    step_s: float | None
    checkpoint: float
    saves: int
    keep: int
    there: int
    free: float
    folder: Path

    @property
    def needed(self) -> float:
        """Largest number of bytes that new checkpoints need on the disk.

        The number includes one more checkpoint than the number to keep, because a new checkpoint is
        complete before the oldest one is removed.
        """
        return self.checkpoint * min(self.saves, max(1, self.keep + 1 - self.there))

    def check(self) -> None:
        """Raise MotleyError if the free space of the disk is too small for the checkpoints."""
        if self.needed <= self.free:
            return
        fewer = replace(self, keep=1).needed < self.needed
        raise MotleyError(
            f"the checkpoints, of {_size(self.checkpoint)} each, will take {_size(self.needed)}, "
            f"and {_size(self.free)} are free in {self.folder}. Free some space, "
            f"{('keep fewer with --keep 1, ' if fewer else '')}or choose another folder with "
            "--logs DIR (there, --resume PATH continues a run)"
        )

    def sentence(self) -> str:
        """Return a sentence on the remaining time and the needed disk space, for the log."""
        if not self.steps:
            return (
                "all steps are done; for more, give a larger --epochs or --max-steps, or evaluate "
                "again with --eval-at-start"
            )
        taken = f"{self.steps:,} steps"
        if self.step_s is not None:
            taken += f" should take {clock(self.steps * self.step_s)}, and evaluations"
        if not self.saves:
            return f"{taken}; no checkpoints"
        return (
            f"{taken}; checkpoints take up to {_size(self.needed)} of the {_size(self.free)} that "
            f"are free in {self.folder}"
        )


def make_budget(
    checkpoints: Checkpoints,
    length: Length,
    state: TrainState,
    checkpoint: float,
    keep: int,
    step_s: float | None,
    keeps_best: bool = False,
) -> Budget:
    """Return the budget of the rest of a run, from ``state``.

    The rank that writes checkpoints calls this function.

    Args:
        checkpoints: checkpoints of the run.
        length: length of the run.
        state: position of the training.
        checkpoint: bytes of a checkpoint.
        keep: number of checkpoints to keep.
        step_s: forecast seconds per step; None if nothing was measured.
        keeps_best: True: the best checkpoint is kept in addition.
    """
    checkpoints.sweep()
    saves = length.saves_left(state) + (length.evaluations_left(state) if keeps_best else 0)
    return Budget(
        length.last_step(state) - state.step, step_s, checkpoint, saves, keep + keeps_best,
        there=len(checkpoints.list_folders(state.step)), free=free_bytes(checkpoints.path),
        folder=checkpoints.path,
    )  # fmt: skip


def checkpoint_bytes(numbers: int, trained: int, config: Config, plan: Plan) -> float:
    """Estimate the size of one checkpoint in bytes.

    A checkpoint has parameters, buffers, optimizer state, the average of the parameters, and the
    state of the wire mode on each rank.

    Args:
        numbers: number of elements in the model's parameters and buffers.
        trained: number of elements that are trained. Only these have optimizer state.
        config: the options.
        plan: the plan, whose wire mode may keep copies on each rank.
    """
    copies = kept_numbers(config) + plan.wire.kept_copies * len(plan.counts)
    copies += config.model_ema
    return float(4 * (numbers + copies * trained))


def _size(number: float) -> str:
    unit = 0
    while number >= 999.5 and unit < 4:
        number, unit = number / 1024, unit + 1
    return f"{number:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model before an engine shards it.

    Attributes:
        numbers: number of elements in parameters and buffers.
        parameters: number of elements in parameters, trained or not.
        trained: number of elements that are trained.
        gradient_bytes: bytes of the whole gradient in the format in which it is sent.
    """

    numbers: int
    parameters: int
    trained: int
    gradient_bytes: int

    @classmethod
    def from_plan(cls, model: TaskModel, plan: Plan) -> "Sizes":
        """Return the sizes of a model, with the gradient bytes of a plan's wire mode."""
        parameters = model.every_parameter()
        shapes = [tuple(each.shape) for each in parameters if each.requires_grad]
        return cls(
            sum(value.numel() for value in model.net.state_dict().values()),
            sum(each.numel() for each in parameters), sum(map(math.prod, shapes)),
            plan.wire.count_bytes(shapes),
        )  # fmt: skip

    def notes(self) -> list[Note]:
        """Return a list with a note on frozen parameters; empty if no parameter is frozen."""
        if self.trained == self.parameters:
            return []
        text = (
            f"{self.trained:,} of {self.parameters:,} parameters are trained: a gradient of "
            f"{self.gradient_bytes / 1e6:.3g} MB"
        )
        return [("frozen", text, {"trained": self.trained, "parameters": self.parameters})]


@dataclass(frozen=True)
class JobParts:
    """The parts of a job that are made before its engine. See :class:`Job` for their meaning."""

    config: Config
    plan: Plan
    loader: Loader
    length: Length
    checkpoints: Checkpoints
    sizes: Sizes
    notes: list[Note]
    metric: Metric | None

    def state(self, folders: list[Path]) -> TrainState | None:
        """Return the position at which the run will start; None if no checkpoint is readable.

        Args:
            folders: checkpoints to continue from, the newest first.
        """
        result = find_state(folders)
        return result and self.length.at(result)

    def budget(self, state: TrainState, planned: Planned) -> Budget:
        """Return the budget of the rest of the run. The rank that writes checkpoints calls it.

        Raises:
            MotleyError: the disk is too small.
        """
        size = checkpoint_bytes(self.sizes.numbers, self.sizes.trained, self.config, self.plan)
        step_s = planned.forecast.step_s if planned.forecast else None
        result = make_budget(
            self.checkpoints, self.length, state, size, self.config.keep, step_s,
            self.config.keep_best is not None,
        )  # fmt: skip
        result.check()
        return result


def make_ready(
    run: Run, group: ProcessGroup, planned: Planned, config: Config, model: TaskModel
) -> JobParts:
    """Make the parts of a job that need no engine. Every rank that trains calls it."""
    assert group.rank is not None
    plan = planned.plan
    most = max(plan.micro_batches[group.rank], default=0)
    readers = planned.speeds[group.rank].readers if planned.speeds else None
    loader = Loader(model.task, config, group.rank, group.device, model.example, most, readers)
    return JobParts(
        config, plan, loader, _length(config, plan, loader, keeps=model.task.keeps),
        Checkpoints(run.folder.checkpoints, config.keep), Sizes.from_plan(model, plan),
        _loader_notes(loader, group), find_metric(config, model),
    )  # fmt: skip


def _length(config: Config, plan: Plan, loader: Loader, keeps: bool) -> Length:
    """Return the length of the run, and the steps of its checkpoints.

    Args:
        config: the options.
        plan: the plan.
        loader: the loader, which has the number of samples in an epoch.
        keeps: True: the task saves checkpoints. False: save only if the user sets an interval.
    """
    every = config.save_every or (None if keeps or config.keep_best else 0)
    evaluates = config.eval_every
    return Length(
        config.epochs, loader.order.epoch_samples, plan.global_batch, config.max_steps,
        save_every=None if isinstance(every, Duration) else every,
        by_clock=isinstance(every, Duration), ramp=make_ramp(config.batch_size),
        eval_every=None if isinstance(evaluates, Duration) else evaluates,
        eval_by_clock=isinstance(evaluates, Duration), eval_at_start=config.eval_at_start,
    )  # fmt: skip


def _loader_notes(loader: Loader, group: ProcessGroup) -> list[Note]:
    """Return the notes of all ranks' loaders on the number of loader processes."""
    message = zip(group.workers, all_gather_object(loader.note), strict=True)
    return [
        ("loader_memory", f"rank {worker.rank} on {worker.host}: {text}", {"rank": worker.rank})
        for worker, text in message if text
    ]  # fmt: skip


# A function that makes a monitor from the speeds and the kinds of all ranks.
MonitorFactory = Callable[[Sequence[SpeedTable], Sequence[Hashable]], ReplanMonitor]


@dataclass(frozen=True)
class Job:
    """All objects that training needs, made by :func:`assemble`.

    Attributes:
        config: the options.
        run: the run.
        plan: plan of a full batch.
        loader: loader of samples.
        model: the model.
        engine: the engine.
        schedule: schedule of the learning rate.
        checkpoints: checkpoints of the run.
        numbers: number of elements in the model's parameters and buffers.
        trained: number of elements that are trained.
        gradient_bytes: bytes of the whole gradient in the format in which it is sent.
        length: end of this run, and steps at which it saves.
        saved_config: options in the form that a checkpoint stores.
        notes: notes on the setup, for the records.
        workers: the ranks that train.
        watch: monitor that proposes another split when ranks become slower or faster.
        metric: metric that selects the best evaluation; None if no option needs a metric.
    """

    config: Config
    run: Run
    plan: Plan
    loader: Loader
    model: TaskModel
    engine: Engine
    schedule: Schedule
    checkpoints: Checkpoints
    numbers: int
    trained: int
    gradient_bytes: int
    length: Length
    saved_config: dict[str, Any]
    notes: list[Note]
    workers: tuple[Rank, ...]
    watch: ReplanMonitor
    metric: Metric | None = None

    def resume(self, folders: list[Path]) -> tuple[TrainState, list[str]]:
        """Continue from the first intact checkpoint of ``folders``. All ranks call it.

        Returns:
            The position of the training, and notes for the user.
        """
        position, notes = resume(
            self.engine, folders, self.config, self.saved_config, self.engine.device
        )
        return self.length.at(position), notes  # the data set may have become smaller


@dataclass(frozen=True)
class StartedJob:
    """A job, and the position at which it continues.

    Attributes:
        job: the job.
        state: position of the training.
        notes: notes on the resume and on the setup.
        budget: time and disk space of the rest of the run; None on ranks that write no checkpoints.
        first_steps: comparison of the first steps with the forecast.
    """

    job: Job
    state: TrainState
    notes: list[Note]
    budget: Budget | None
    first_steps: FirstSteps

    def take_over(self, shared: bool) -> None:
        """Use the run's folder for checkpoints, and rename its checkpoints of later steps.

        Args:
            shared: True if all ranks see the disk of the folder.
        """
        self.job.checkpoints.in_parts = shared and self.job.model.by_blocks is not None
        place = self.job.checkpoints.path = (
            self.job.run.folder.checkpoints
        )  # its name is fixed since the start
        if self.budget is not None:
            print(f"  {dataclasses.replace(self.budget, folder=place).sentence()}", flush=True)
            self.job.checkpoints.set_aside_after(self.state.step)


def begin(
    run: Run,
    group: ProcessGroup,
    planned: Planned,
    config: Config,
    engine_factory: EngineFactory,
    model: TaskModel | None,
    monitor: MonitorFactory,
    initial: Sequence[str],
    kept: KeptState | None = None,
) -> StartedJob | None:
    """Make the job, and load the state from which the job continues.

    The result is None on a rank that takes no part in training.

    Args:
        run: the run.
        group: process group of the ranks that train.
        planned: the plan.
        config: the options.
        engine_factory: factory of the engine.
        model: the model; None on a rank that takes no part in training.
        monitor: factory of the monitor that proposes another split.
        initial: notes for the user on the initial weights.
        kept: state that this rank has kept from the group before a rank was lost; None: no rank was
            lost.
    """
    if group.rank is None or model is None:
        return None
    check_samples(config, group.workers)
    fresh, took_s = not run.resume_from and kept is None, 0.0
    ready = make_ready(run, group, planned, config, model)
    writes = group.rank == 0 and kept is None
    foreseen = ready.state(run.resume_from) if writes else None
    # The disk is checked before the engine is built, which may take minutes.
    budget = ready.budget(foreseen, planned) if foreseen else None
    job = assemble(ready, run, group, planned, engine_factory, model, monitor, fresh)
    if kept is not None:
        state, notes = go_on(job.engine, kept)
    else:
        began = time.monotonic()
        state, notes = job.resume(run.resume_from)
        took_s = time.monotonic() - began
    check_profile(config, group.workers, job.length.last_step(state))
    if writes and state != foreseen:  # the foreseen checkpoint was damaged
        budget = ready.budget(state, planned)
    new_notes: list[Note] = [("resume", note, {"seconds": took_s}) for note in notes]
    new_notes += [("initial", note, {}) for note in initial]
    if note := explain_early_end(config, job.length, state):
        new_notes.append(("schedule", note, {}))
    notes_of_all = [*new_notes, *job.notes]
    watched = FirstSteps(planned.memory, planned.forecast) if group.rank == 0 else FirstSteps()
    return StartedJob(job, state, notes_of_all, budget, watched)


def check_samples(config: Config, workers: Sequence[Rank]) -> None:
    """Raise MotleyError unless the fingerprint of the task's data is equal on all ranks."""
    task = get_task(config)
    sets = {name: len(source) for name, source in task.held_out_sets().items()}
    own = {CLASS_NAMES: task.class_names, SAMPLES: task.sample_list, "held-out sets": sets}
    first, *others = all_gather_object(get_identity(config) | own)
    for worker, other in zip(workers[1:], others, strict=True):
        unlike = [name for name in first if other.get(name) != first[name]]
        if unlike:
            raise MotleyError(
                f"rank {worker.rank} on {worker.host} has other data than rank {workers[0].rank} "
                f"on {workers[0].host}: their {', '.join(unlike)} differ; copy the same files to "
                "all hosts"
            )


def assemble(
    ready: JobParts,
    run: Run,
    group: ProcessGroup,
    planned: Planned,
    engine_factory: EngineFactory,
    model: TaskModel,
    monitor: MonitorFactory,
    fresh: bool,
) -> Job:
    """Wrap the model in an engine, and make the other objects of the training.

    Args:
        ready: the parts of the job that need no engine.
        run: the run.
        group: process group of the ranks that train.
        planned: the plan.
        engine_factory: factory of the engine.
        model: the model.
        monitor: factory of the monitor that proposes another split.
        fresh: True if the run continues no earlier state. The loss scale is then searched.
    """
    assert group.rank is not None
    config, plan, loader, sizes = ready.config, ready.plan, ready.loader, ready.sizes
    if planned.is_compiled(group.rank, config.compile):
        is_equal = len(set(plan.counts)) == 1  # a plan that need not change
        model.compile_task(set(plan.micro_batches[group.rank]) if is_equal else ())
    scale = start_scale(config.loss_scale, (*group.precisions, plan.wire.dtype))
    notes = list(ready.notes)
    if some := model.sometimes_unused:
        text = (
            f"{name_some(some)} have no gradient for some samples; such a parameter stays as it "
            "is in a step in which no rank has a gradient for it"
        )
        notes.append(("sometimes_unused", text, {"parameters": list(some)}))
    if config.loss_scale == "auto" and scale.dynamic and fresh:
        scale.value = search_scale(group, loader, model, plan)
        text = f"the loss scale starts at {scale.value:g}, found on the first batches"
        notes.append(("loss_scale", text, {"value": scale.value}))
    if model.by_blocks:
        model.by_blocks.unfold()
        release()
    if not engine_factory.traits.fills_model:
        model.fill(model.net)
    engine = engine_factory(  # afterwards a rank may hold no whole parameter
        model,
        EngineContext(config, group.rank, group.size, group.device, group.precisions, scale, plan),
    )
    if (action := name_action(model.task)) and not engine.replicated:
        raise MotleyError(
            f"{action} needs the whole model on rank 0, and this strategy gives each rank a part "
            f"of the model; take --strategy ddp, or leave out {action}"
        )
    plan = dataclasses.replace(plan, equal_micro_steps=engine.equal_micro_steps)
    engine.reconfigure(plan)
    return Job(
        config, run, plan, loader, model, engine,
        schedule=make_schedule(engine.optimizer, config, ready.length),
        checkpoints=ready.checkpoints, numbers=sizes.numbers,
        trained=sizes.trained, gradient_bytes=sizes.gradient_bytes, length=ready.length,
        saved_config=options_to_save(config), notes=[*notes, *sizes.notes()],
        workers=group.workers, watch=_watch(monitor, planned, config, engine, group.workers),
        metric=ready.metric,
    )  # fmt: skip


def _watch(
    monitor: MonitorFactory,
    planned: Planned,
    config: Config,
    engine: Engine,
    workers: Sequence[Rank],
) -> ReplanMonitor:
    # If every pass waits for all ranks, each rank seems to take as long as the slowest.
    watches = config.replan == "auto" and not engine.equal_micro_steps
    devices = list_devices(workers, planned.plan.max_micro_batch)
    return monitor(planned.speeds if watches else (), devices)

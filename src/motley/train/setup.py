"""What training needs: data, model, engine, schedule and checkpoints, put together once."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.checkpoint.resume import resume
from motley.checkpoint.run import Run
from motley.checkpoint.store import Checkpoints
from motley.checkpoint.transfer import Kept, go_on
from motley.comm.collectives import all_gather_object
from motley.config.options import Config
from motley.data.import_timm import Scheduler
from motley.data.loader import Loader
from motley.engines.memory import release
from motley.engines.protocol import Engine, EngineContext, EngineFactory
from motley.errors import MotleyError
from motley.plan.length import Length, TrainState
from motley.plan.plan import Plan
from motley.plan.precision import start_scale
from motley.plan.replan import Device, ReplanMonitor
from motley.plan.speed_table import SpeedTable
from motley.planner.measured_plan import Planned
from motley.planner.process_group import ProcessGroup
from motley.planner.worker import Worker
from motley.tasks.find import CLASS_NAMES, SAMPLES, identity_of, task_of
from motley.tasks.model import TaskModel
from motley.text import name_some
from motley.train.budget import Budget
from motley.train.command_line import options_to_save
from motley.train.first_steps import FirstSteps
from motley.train.loss_scale import search_scale
from motley.train.profiler import check_profile
from motley.train.ready import Note, Ready, make_ready
from motley.train.schedule import explain_early_end, make_schedule

# Of the speeds and the kinds of all ranks.
MonitorFactory = Callable[[Sequence[SpeedTable], Sequence[Hashable]], ReplanMonitor]


@dataclass(frozen=True)
class Job:
    """Everything that training needs, made once by :func:`assemble`.

    Attributes:
        numbers: in the model, its buffers included. trained: of these.
        gradient_bytes: what a gradient takes on the wire, each time that it is sent.
        length: where this run ends, and when it saves.
        saved_config: what a checkpoint keeps of the options.
        notes: what was found while it was made, for the records.
        watch: proposes another split when this one fits no more.
    """

    config: Config
    run: Run
    plan: Plan
    loader: Loader
    model: TaskModel
    engine: Engine
    schedule: Scheduler
    checkpoints: Checkpoints
    numbers: int
    trained: int
    gradient_bytes: int
    length: Length
    saved_config: dict[str, Any]
    notes: list[Note]
    workers: tuple[Worker, ...]
    watch: ReplanMonitor

    def resume(self, folders: list[Path]) -> tuple[TrainState, list[str]]:
        """Continue from the first whole checkpoint of ``folders``; all ranks call it.

        Returns:
            As motley.checkpoint.resume.resume.
        """
        position, notes = resume(
            self.engine, folders, self.config, self.saved_config, self.engine.device
        )
        return self.length.at(position), notes  # the data set may have become smaller


@dataclass(frozen=True)
class Begun:
    """A job, and where it goes on.

    Attributes:
        notes: of the resume, and of the job. budget: on the rank that writes.
        first_steps: what the wire is held against, there.
    """

    job: Job
    state: TrainState
    notes: list[Note]
    budget: Budget | None
    first_steps: FirstSteps

    def take_over(self, shared: bool) -> None:
        """Make the run's folder this run's, on the rank that writes.

        Args:
            shared: all ranks see its disk.
        """
        self.job.checkpoints.in_parts = shared and self.job.model.by_blocks is not None
        place = self.job.checkpoints.path = self.job.run.folder.checkpoints  # since it has begun
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
    kept: Kept | None = None,
) -> Begun | None:
    """Put a job together and load what it continues; None on a rank that is left out.

    Args:
        initial: what is to be said of the weights that it begins with.
        kept: what this rank holds of a group that was larger.
    """
    if group.rank is None or model is None:
        return None
    check_samples(config, group.workers)
    fresh, took_s = not run.resume_from and kept is None, 0.0
    ready = make_ready(run, group, planned, config, model)
    writes = group.rank == 0 and kept is None
    foreseen = ready.state(run.resume_from) if writes else None
    # Before the engine is built, which may take minutes.
    budget = ready.budget(foreseen, planned) if foreseen else None
    job = assemble(ready, run, group, planned, engine_factory, model, monitor, fresh)
    if kept is not None:
        state, notes = go_on(job.engine, kept)
    else:
        began = time.monotonic()
        state, notes = job.resume(run.resume_from)
        took_s = time.monotonic() - began
    check_profile(config, group.workers, job.length.last_step(state))
    if writes and state != foreseen:  # that checkpoint was damaged
        budget = ready.budget(state, planned)
    said: list[Note] = [("resume", note, {"seconds": took_s}) for note in notes]
    said += [("initial", note, {}) for note in initial]
    if note := explain_early_end(config, job.length, state):
        said.append(("schedule", note, {}))
    notes_of_all = [*said, *job.notes]
    watched = FirstSteps(planned.memory, planned.forecast) if group.rank == 0 else FirstSteps()
    return Begun(job, state, notes_of_all, budget, watched)


def check_samples(config: Config, workers: Sequence[Worker]) -> None:
    """Raise MotleyError unless all ranks learn from the same, as far as their task can tell."""
    task = task_of(config)
    own = {CLASS_NAMES: task.class_names, SAMPLES: task.sample_list}
    first, *others = all_gather_object(identity_of(config) | own)
    for worker, other in zip(workers[1:], others, strict=True):
        unlike = [name for name in first if other.get(name) != first[name]]
        if unlike:
            raise MotleyError(
                f"rank {worker.rank} on {worker.host} has other data than rank {workers[0].rank} "
                f"on {workers[0].host}: their {', '.join(unlike)} differ; bring the same files to "
                "all hosts"
            )


def assemble(
    ready: Ready,
    run: Run,
    group: ProcessGroup,
    planned: Planned,
    engine_factory: EngineFactory,
    model: TaskModel,
    monitor: MonitorFactory,
    fresh: bool,
) -> Job:
    """Set an engine on the model, and make what else training needs.

    Args:
        fresh: nothing is known of it yet, as a loss scale.
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
            f"{name_some(some)} have no gradient for some samples: a step in which no rank has one "
            "leaves a parameter as it is"
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
    engine = engine_factory(  # some leave no rank a whole parameter
        model,
        EngineContext(config, group.rank, group.size, group.device, group.precisions, scale, plan),
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
    )  # fmt: skip


def _watch(
    monitor: MonitorFactory,
    planned: Planned,
    config: Config,
    engine: Engine,
    workers: Sequence[Worker],
) -> ReplanMonitor:
    # Where every pass waits for all ranks, each seems to take as long as the slowest.
    watches = config.replan == "auto" and not engine.equal_micro_steps
    most = planned.plan.max_micro_batch
    devices = [
        Device(
            worker.uuid or worker.host,
            # The device's name without its number: cuda:1 NVIDIA H200.
            (worker.host, worker.device.partition(" ")[2], worker.precision, size),
        )
        for worker, size in zip(workers, most, strict=True)
    ]  # fmt: skip
    return monitor(planned.speeds if watches else (), devices)

"""A run, from the launched ranks to the last record. The main function is :func:`train`.

:func:`train` chooses the ranks that take part, opens the data and the model, makes a plan, runs the
loop, and records the result. If a rank is lost and the other ranks can continue, the other ranks
repeat these steps.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from motley.checkpoint.resume import load_initial, read_saved_options
from motley.checkpoint.run import Run
from motley.checkpoint.store import Checkpoints, parse_step
from motley.cluster.hostfile import idle_nodes
from motley.comm.collectives import all_gather_floats, release_groups
from motley.config.options import CLIP_MODES, Config
from motley.engines.optimizer import check_optimizer
from motley.engines.out_of_memory import release, set_aside
from motley.engines.protocol import EngineFactory
from motley.engines.schedule import check_schedule
from motley.engines.strategies import Strategy, list_engines
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.world import World
from motley.measure.planner import ModelFactory, open_model, plan_batch
from motley.measure.process_group import (
    ProcessGroup,
    gpu_logger,
    join_process_group,
    leave_process_group,
)
from motley.membership.detector import DATA, PROGRESS_TIMEOUT_S
from motley.membership.survivors import Survivors
from motley.plan.replan import ReplanMonitor
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel
from motley.text import CLEAR_LINE
from motley.train.command_line import (
    list_different_options,
    make_resume_line,
    restore_options,
)
from motley.train.compile_archive import CompileKeeper
from motley.train.loop import Loop
from motley.train.profiler import StepProfiler
from motley.train.recorder import Recorder, memory_peak, on_terminal
from motley.train.rescue import JobRebuild, Rescue, arm_rescue
from motley.train.setup import Job, MonitorFactory, StartedJob, begin
from motley.train.summary import make_records, print_summary, print_verdict


def train_or_continue(world: World, given: Config, strategies: Mapping[str, Strategy]) -> Path:
    """Train, or continue from a checkpoint, and return the folder of the records.

    A continued run has the checkpoint's options, except for options that the user typed.

    Args:
        world: the ranks.
        given: the options of this launch.
        strategies: strategies of the script, by name.
    """
    result, config = Run.find(world, given), given
    saved = world.from_first(lambda: read_saved_options(result.resume_from))
    if saved is not None:
        config = restore_options(given, saved)
        taken = ", ".join(list_different_options(config, given))
        if taken and world.rank == 0:
            print(f"options of the checkpoint: {taken}", flush=True)
    train(world, config, list_engines(config, strategies), run=result)
    return result.folder.path


def check_options(config: Config) -> None:
    """Raise MotleyError if options contradict each other or have no effect."""
    get_task(config).check_options()
    check_optimizer(config)
    check_schedule(config)
    typed = config.typed_names - config.continued_names
    if "clip_mode" in typed and config.clip_mode != CLIP_MODES[0] and config.clip_grad is None:
        raise MotleyError(
            f"--clip-mode {config.clip_mode} has no effect without --clip-grad; add --clip-grad "
            f"{'0.01' if config.clip_mode == 'agc' else '1.0'}, or leave out --clip-mode"
        )


_NEARLY_S = 0.1  # limit for a last checkpoint; a stopped mpirun leaves 0.3 s
_LAST_SAVE_S = 5.0  # limit for a pending checkpoint when the job has to end


def train(
    world: World,
    config: Config,
    engine_factory: EngineFactory,
    make_model: ModelFactory = TaskModel,
    monitor: MonitorFactory = ReplanMonitor,
    run: Run | None = None,
) -> None:
    """Train one model on all ranks of ``world``. Every rank calls it with the same config.

    Args:
        world: the ranks.
        config: the options.
        engine_factory: factory of the engine.
        make_model: factory of the module that wraps the network.
        monitor: factory of the monitor that proposes another split.
        run: the run; None: create the run that the options describe.
    """
    check_options(config)
    run = run or Run.find(world, config)
    world.supervisor.set_status(Phase.PREPARE, DATA)
    world.once_per_node(get_task(config).prepare)
    keeper = CompileKeeper(world, config)
    keeper.take(world)
    world.clock.lap("prepare")
    survivor, survivors = JobRebuild(world, config), None
    while True:
        try:
            return train_with(survivor, survivors, run, keeper, engine_factory, make_model, monitor)
        except Exception as error:
            survivors = survivor.get_survivors(error)


def train_with(
    survivor: JobRebuild,
    survivors: Survivors | None,
    run: Run,
    keeper: CompileKeeper,
    engine_factory: EngineFactory,
    make_model: ModelFactory,
    monitor: MonitorFactory,
) -> None:
    """Train to the end with all present ranks.

    Args:
        survivor: the object by which this rank continues after another rank is lost.
        survivors: the surviving ranks of the previous process group; None: no rank is lost.
        run: the run.
        keeper: keeper of compiled code.
        engine_factory: factory of the engine.
        make_model: factory of the module that wraps the network.
        monitor: factory of the monitor that proposes another split.
    """
    continuation = survivor.go_on(survivors) if survivors else None
    world, config, traits = survivor.world, survivor.config, engine_factory.traits
    world.supervisor.set_status(Phase.BUILD, PROGRESS_TIMEOUT_S)
    if continuation is not None:
        run.for_survivors(world)
        group = continuation.group
    else:
        run.divert_nccl()
        group = join_process_group(world, config.precision, config.hosts, config.bind)
    world.clock.lap("group")

    # Every error in the options is raised before the run's records are changed.
    model = open_model(group, config, make_model, traits)
    notes, saved = list[str](), None
    if continuation is not None:
        planned, saved = continuation.planned, continuation.state
    else:
        notes = [] if run.resume_from else load_initial(model, config)
        world.clock.lap("model")
        group, planned = plan_batch(world, run, group, model, config, traits)
        world.clock.lap("plan")
    run.check_leader(group.ranks(world)[0])
    begun = begin(run, group, planned, config, engine_factory, model, monitor, notes, saved)
    plan = begun.job.plan if begun else planned.plan
    job = begun.job if begun else None
    own = (begun.job.length.last_step(begun.state), begun.state.step) if begun else (0, 0)
    last_step, step = map(max, zip(*world.allgather(own), strict=True))
    world.clock.lap("engine")
    records = make_records(world, config, group, plan, planned, traits, job, last_step)
    run.start(records, step, trains=step < last_step)
    if world.rank == 0 and not run.keeps_records:
        run.folder.write_config(config.as_toml())
    shared = run.is_shared()
    if continuation is None:
        print_summary(world, run, group, planned, plan, config)
    if begun is not None:
        begun.take_over(shared)
        rescue = arm_rescue(world, begun, shared)
        survivor.ready(group, planned, rescue, shared)
        train_begun(world, run, keeper, group, begun, rescue)
    else:  # this rank is left out, and waits for the others
        model = None  # frees its memory for other programs
        release()
        survivor.ready(group, planned, None, shared)
        with gpu_logger(world, group, run.folder, interval=config.gpu_log_interval):
            run.finish()


def train_begun(
    world: World,
    run: Run,
    keeper: CompileKeeper,
    group: ProcessGroup,
    begun: StartedJob,
    rescue: Rescue,
) -> None:
    """Train a job to its end, and record it. Every rank that trains calls it."""
    release_groups()  # groups that were used for measurements
    job = begun.job
    recorder, interval = record_from(begun, run, group), job.config.gpu_log_interval
    line = make_resume_line(run.folder)
    world.supervisor.before_end(
        partial(last_words, recorder, job.checkpoints),
        partial(how_to_continue, line, job.checkpoints, job.length.save_every),
        CLEAR_LINE if on_terminal() and on_terminal(2) else "",
    )
    say = partial(world.supervisor.set_status, timeout_s=PROGRESS_TIMEOUT_S)
    profiler = StepProfiler(job.config, group, run.folder, group.machines(world), recorder, say)
    gpus = gpu_logger(world, group, run.folder, lambda: recorder.progress, interval)
    keeper.begin(run, group, lambda: recorder.progress.step)
    for text in keeper.take_notes():
        recorder.note("compile_archive", text)
    if idle := idle_nodes(len(set(world.machines))):
        recorder.note("idle_nodes", idle)
    set_aside()
    with gpus, recorder, profiler:
        loop = Loop(world, job, recorder, begun.state, rescue, profiler)
        evaluated = loop.run()
    world.supervisor.set_status(Phase.LEAVE, PROGRESS_TIMEOUT_S)
    peaks = memory_peaks(job)
    leave_process_group()
    job.checkpoints.wait()
    keeper.end()
    if group.rank == 0:
        result = recorder.result(evaluated, job.loader.order.epoch_samples, peaks)
        run.record_result({**result, **(loop.best.as_json() if loop.best else {})})
        print_verdict(run)
        if text := loop.closing_line():
            run.event("stopped_early", text=text, step=evaluated.step)
            print(text, flush=True)
    run.finish()


def memory_peaks(job: Job) -> list[float]:
    """Return the peak memory of each rank in MiB. All ranks that train call it.

    The result is empty if no peak was predicted.
    """
    if job.model.by_blocks is None:
        return []
    return [peak for (peak,) in all_gather_floats([memory_peak(job.engine.device)])]


def last_words(recorder: Recorder, checkpoints: Checkpoints) -> None:
    """Write the records and the checkpoint of this rank that are not on the disk yet."""
    try:
        recorder.last_words()
    finally:
        checkpoints.wait(_LAST_SAVE_S)


def how_to_continue(
    line: str, checkpoints: Checkpoints, save_every: int | None, step: int | None
) -> str:
    """Return a sentence on the saved state of a stopped run, and the line that continues it.

    Args:
        line: command line that continues the run.
        checkpoints: the run's checkpoints.
        save_every: number of steps between two checkpoints; 0: the task saves no checkpoints.
        step: number of finished steps; None: before step 1.
    """
    if save_every == 0:
        return "nothing of this run is saved, because this task keeps no checkpoints"
    with contextlib.suppress(MotleyError, TimeoutError):  # one that is nearly written counts
        checkpoints.wait(_NEARLY_S)
    result = checkpoints.list_folders()
    saved = parse_step(result[0]) if result else None
    if saved is None:
        return "nothing of this run is saved yet; --save-every N saves it every N steps"
    behind = 0 if step is None else step - saved
    steps = (
        f"step {step}"
        if behind == 1
        else (f"steps {saved + 1} {'and' if behind == 2 else 'to'} {step}")
    )
    # A checkpoint may be of a later step than the last one that the ranks have reported.
    repeated = f", and {steps} will be repeated" if behind > 0 else ", so no step will be repeated"
    return f"the last checkpoint is of step {saved}{repeated}; continue with: {line}"


def record_from(begun: StartedJob, run: Run, group: ProcessGroup) -> Recorder:
    """Make the recorder of the steps to come, and record the notes of the setup."""
    job, state = begun.job, begun.state
    recorder = Recorder(
        run, job.model.task, group, job.config, tells_sync=not job.engine.equal_micro_steps,
        done=state.step, total=job.length.last_step(state), compiles=job.model.is_compiled,
        first_steps=begun.first_steps, diverges=job.engine.diverges,
    )  # fmt: skip
    for kind, text, content in begun.notes:
        recorder.note(kind, text, **content)
    return recorder

"""The one training loop. Read :func:`train` from top to bottom; engines plug in.

A run is: who takes part, the data, the model, the plan; then epochs of global batches,
each computed in micro-batches by every rank and finished by one step; a record after
every step, an evaluation and a checkpoint after every epoch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from motley.checkpoint.initial import load_initial
from motley.checkpoint.run import Run
from motley.checkpoint.store import Checkpoints
from motley.checkpoint.transfer import save
from motley.comm.collectives import release_groups
from motley.config.options import Config
from motley.data.batch import Batch
from motley.data.order import seed_of
from motley.engines.memory import collect, release, set_aside
from motley.engines.named_state import seed_random
from motley.engines.protocol import EngineFactory, StepResult
from motley.faults import Phase
from motley.launch.survivors import Survivors
from motley.launch.watchdog import DATA, PROGRESS_TIMEOUT_S
from motley.launch.world import World
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.plan.replan import ReplanMonitor
from motley.planner.open_model import ModelFactory, open_model
from motley.planner.planner import plan_batch
from motley.planner.process_group import (
    ProcessGroup,
    gpu_logger,
    join_process_group,
    leave_process_group,
)
from motley.records.training import EpochRecord
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel
from motley.train.agreement import Agreement
from motley.train.compile_keeper import CompileKeeper
from motley.train.evaluate import evaluate
from motley.train.profiler import StepProfiler
from motley.train.recorder import Recorder, Timed
from motley.train.recovery import (
    check_numbers,
    readable,
    rebalance,
    shrink_micro_batches,
)
from motley.train.rescue import Rescue, arm_rescue, pause
from motley.train.save_timer import SaveTimer
from motley.train.schedule import rate_of, set_rate
from motley.train.setup import Begun, Job, MonitorFactory, begin
from motley.train.summary import print_summary, print_verdict, records_of
from motley.train.survivor import Survivor

_LAST_SAVE_S = 5.0  # that a checkpoint may take which is being written when the job has to end


def train(
    world: World,
    config: Config,
    engine_factory: EngineFactory,
    make_model: ModelFactory = TaskModel,
    monitor: MonitorFactory = ReplanMonitor,
) -> None:
    """Train one model on all ranks of ``world``; every rank calls it with the same config.

    Args:
        engine_factory: what the user has chosen, or an engine of one's own.
        make_model: a class of one's own, which wraps the network.
        monitor: decides when another split is proposed.
    """
    run = Run.find(world, config)
    world.supervisor.set_status(Phase.PREPARE, DATA)
    world.once_per_node(task_of(config).prepare)
    keeper = CompileKeeper(world, config)
    keeper.take(world)
    world.clock.lap("prepare")
    survivor, survivors = Survivor(world, config), None
    while True:
        try:
            return train_with(survivor, survivors, run, keeper, engine_factory, make_model, monitor)
        except Exception as error:
            survivors = survivor.survivors_of(error)


def train_with(
    survivor: Survivor,
    survivors: Survivors | None,
    run: Run,
    keeper: CompileKeeper,
    engine_factory: EngineFactory,
    make_model: ModelFactory,
    monitor: MonitorFactory,
) -> None:
    """Train to the end with all who are there.

    Args:
        survivors: of those that trained before; None: nobody is lost.
    """
    continuation = survivor.go_on(survivors) if survivors else None
    world, config, traits = survivor.world, survivor.config, engine_factory.traits
    world.supervisor.set_status(Phase.BUILD, PROGRESS_TIMEOUT_S)
    if continuation is not None:
        run.of_survivors(world)
        collect()  # what trained before was set aside
        group = continuation.group
    else:
        run.divert_nccl()
        group = join_process_group(world, config.precision, config.hosts, config.bind)
    world.clock.lap("group")

    # All that can be wrong with the options is said before the run's records are touched.
    model = open_model(group, config, make_model)
    notes, kept = list[str](), None
    if continuation is not None:
        planned, kept = continuation.planned, continuation.kept
    else:
        notes = [] if run.resume_from else load_initial(model, config)
        world.clock.lap("model")
        group, planned = plan_batch(world, run, group, model, config, traits)
        world.clock.lap("plan")
    run.check_leader(group.workers[0].rank)
    begun = begin(run, group, planned, config, engine_factory, model, monitor, notes, kept)
    plan = begun.job.plan if begun else planned.plan
    job = begun.job if begun else None
    last_step = max(world.allgather(begun.job.length.last_step(begun.state) if begun else 0))
    world.clock.lap("engine")
    run.start(records_of(world, config, group, plan, planned, traits, job, last_step))
    shared = run.is_shared()
    if continuation is None:
        print_summary(world, run, group, planned, plan, config)
    if begun is not None:
        begun.take_over()
        rescue = arm_rescue(world, begun, shared)
        survivor.ready(group, planned, rescue, shared)
        train_begun(world, run, keeper, group, begun, rescue)
    else:  # this rank is left out, and waits for the others
        model = None  # its memory is of use to others
        release()
        survivor.ready(group, planned, None, shared)
        with gpu_logger(world, group, run.folder, interval=config.gpu_log_interval):
            run.finish()


def train_begun(
    world: World,
    run: Run,
    keeper: CompileKeeper,
    group: ProcessGroup,
    begun: Begun,
    rescue: Rescue,
) -> None:
    """Train a job to its end, and record it; every rank that trains calls it."""
    release_groups()  # those that were measured
    job = begun.job
    recorder, interval = record_from(begun, run, group), job.config.gpu_log_interval
    world.supervisor.before_end(partial(last_words, recorder, job.checkpoints))
    say = partial(world.supervisor.set_status, timeout_s=PROGRESS_TIMEOUT_S)
    profiler = StepProfiler(job.config, group, run.folder, group.machines(world), recorder, say)
    gpus = gpu_logger(world, group, run.folder, lambda: recorder.progress, interval)
    keeper.begin(run, group, lambda: recorder.progress.step)
    for text in keeper.take_notes():
        recorder.note("compile_archive", text)
    set_aside()
    with gpus, recorder, profiler:
        evaluated = Loop(world, job, recorder, begun.state, rescue, profiler).run()
    world.supervisor.set_status(Phase.LEAVE, PROGRESS_TIMEOUT_S)
    leave_process_group()
    job.checkpoints.wait()
    keeper.end()
    if group.rank == 0:
        run.tell_result(recorder.result(evaluated, job.loader.order.epoch_samples))
        print_verdict(run)
    run.finish()


def last_words(recorder: Recorder, checkpoints: Checkpoints) -> None:
    """Write what this rank has not written yet."""
    try:
        recorder.last_words()
    finally:
        checkpoints.wait(_LAST_SAVE_S)


def record_from(begun: Begun, run: Run, group: ProcessGroup) -> Recorder:
    """Records of what follows, with the notes of what was before."""
    job, state = begun.job, begun.state
    recorder = Recorder(
        run, job.model.task, group, job.config, tells_sync=not job.engine.equal_micro_steps,
        done=state.step, total=job.length.last_step(state), compiles=job.model.is_compiled,
        first_steps=begun.first_steps,
    )  # fmt: skip
    for kind, text, content in begun.notes:
        recorder.note(kind, text, **content)
    return recorder


class Loop:
    """Trains a job, from where it stands to its last step.

    Args:
        state: where it stands.
        rescue: hears of what changes. profiler: of each step.
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
        self._timer = SaveTimer(job.config.save_every, state.step)
        self._plan = job.plan  # of a full batch; the last of an epoch may be smaller
        self._profiler = profiler
        job.engine.clock.on_phase = self._enter

    def run(self) -> EpochRecord:
        """Train to the end; returns the last evaluation."""
        evaluated = self._evaluation_before()
        while not self._job.length.ended(self._state):
            if self._epoch():
                evaluated = self._evaluate()
        assert evaluated is not None  # no run is shorter than a step
        return evaluated

    def _epoch(self) -> bool:
        """Train on what is left of the epoch, or of it until another plan cuts it anew; whether
        the epoch has ended, or the run."""
        job, epoch = self._job, self._state.epoch
        job.engine.clock.restart()
        self._say(Phase.DATA)
        for batch, micro_batches in job.loader.steps(epoch, self._state.consumed, self._plan):
            if not self._world.supervisor.begin_step(self._state.step):
                pause(self._world, job, self._state, partial(self._save, asked=True))
                break  # from a checkpoint again
            result, indices = self._step(batch, micro_batches)
            if not self._after_step(batch, result, indices):
                break
        self._recorder.flush()
        return self._state.epoch > epoch or job.length.ended(self._state)

    def _step(
        self, batch: Plan, micro_batches: Iterator[tuple[Batch, bool]]
    ) -> tuple[StepResult, list[int]]:
        """One global batch: this rank's micro-batches, then one step of all ranks; returns the
        indices of this rank's samples too."""
        job, indices = self._job, list[int]()
        self._profiler.before(self._state.step)
        self._rescue.whole(self._state, self._plan)
        self._world.supervisor.step = self._state.step
        # Drop-out differs between ranks and steps, and a step that is taken again has its own.
        seed_random(seed_of(job.config.seed, dist.get_rank(), self._state.step), job.engine.device)
        length, here = job.length, self._state
        set_rate(job.schedule, length.updates(here), length.full_batch(here), job.config)
        for micro_batch, last in micro_batches:
            job.engine.clock.lap("data")
            job.engine.accumulate(micro_batch, batch.global_batch, last)
            indices += readable(micro_batch, job.config, job.run)
        self._recorder.write()
        result = job.engine.step()
        self._world.supervisor.check_group()  # of a broken one it may be anything
        return result, indices

    def _after_step(self, batch: Plan, result: StepResult, indices: list[int]) -> bool:
        """What follows a step: help where memory or numbers have ended, its record, a checkpoint,
        another split; whether the epoch goes on as it is cut now."""
        job, before = self._job, self._state
        if result.oom_ranks:
            self._shrink(batch, result)
            if result.retry:
                return False  # the same samples, as the new plan cuts them
        check_numbers(job, self._plan, before, result, indices)
        rate = rate_of(job.engine.optimizer)
        timed = self._profiler.after(self._recorder.step(before, rate, batch, result))
        self._state = job.length.after(before, batch.global_batch)
        self._rescue.whole(self._state, self._plan)
        if not self._save():
            return False  # from the checkpoint again
        changed = self._replan(timed) or bool(result.oom_ranks)
        return not job.length.ended(self._state) and not (
            changed and self._state.epoch == before.epoch
        )

    def _shrink(self, batch: Plan, result: StepResult) -> None:
        """Go on with smaller micro-batches on ranks whose memory has ended."""
        # Of Local SGD the news is old: by now the batch may be another.
        tried = batch if result.retry else self._plan
        less = shrink_micro_batches(tried, self._job, result, self._recorder, self._state.step)
        self._plan = replace(self._plan, max_micro_batch=less.max_micro_batch)
        self._job.engine.reconfigure(self._plan)
        self._job.watch.limit(self._plan.max_micro_batch)

    def _replan(self, timed: Timed | None) -> bool:
        """Split the batch anew where ranks have become slower or faster; whether it is."""
        if timed is None or timed.plan.global_batch != self._plan.global_batch:
            return False  # a ragged batch says nothing
        proposal = self._job.watch.step(timed.ready_s, self._plan.counts)
        if proposal is None:
            return False
        self._plan = rebalance(self._plan, proposal, self._recorder, self._state)
        self._job.engine.reconfigure(self._plan)
        self._job.watch.forget()
        return True

    def _save(self, asked: bool = False) -> bool:
        """Where a checkpoint or the end is due, or somebody has asked for one: compare what all
        ranks hold, and save it; False if all have gone back to a checkpoint."""
        job, state = self._job, self._state
        job.checkpoints.check()
        saves = asked or job.length.saves(state) or self._timer.due(state.step)
        if not saves and not job.length.ended(state):
            return True
        self._say(Phase.SAVE)
        self._recorder.flush()
        job.engine.sync_parameters()
        self._state = self._agreement.check(state)
        self._rescue.whole(self._state, self._plan)
        if self._state != state:
            return False
        if saves:
            save(job.engine, job.checkpoints, state, job.saved_config)
            self._agreement.saved(state)
            self._timer.saved(state.step)
        job.engine.clock.restart()
        return True

    def _evaluation_before(self) -> EpochRecord | None:
        """The evaluation that belongs to where the run goes on; made now if it was stopped between
        the checkpoint and it. None where none is due."""
        if not self._job.length.evaluates(self._state):
            return None
        return self._recorder.evaluation_at(self._state.step) or self._evaluate()

    def _evaluate(self) -> EpochRecord:
        evaluated = evaluate(self._world, self._job, self._plan, self._state)
        self._recorder.epoch(evaluated)
        return evaluated

    def _enter(self, phase: Phase) -> None:
        self._profiler.enter(phase)
        self._say(phase, self._recorder.timeout_s)

    def _say(self, phase: Phase, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        self._world.supervisor.set_status(phase, timeout_s)

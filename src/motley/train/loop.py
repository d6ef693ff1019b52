"""The one training loop. Read :func:`train` from top to bottom; engines plug in.

A run is: who takes part, the data, the model, the plan; then epochs of global batches,
each computed in micro-batches by every rank and finished by one step; a record after
every step, an evaluation and a checkpoint after every epoch.
"""

import dataclasses
import math
import time

import torch
from torch import Tensor

from motley.checkpoint.run import Run
from motley.checkpoint.transfer import save
from motley.comm.collectives import all_gather_floats, release_groups
from motley.config.options import Config
from motley.data.datasets import prepare
from motley.engines.memory import release
from motley.engines.protocol import EngineFactory
from motley.errors import NotFiniteError
from motley.faults import Phase
from motley.launch.watchdog import DATA, PROGRESS_TIMEOUT_S
from motley.launch.world import World
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.planner.parts import open_parts
from motley.planner.planner import plan_batch
from motley.planner.process_group import gpu_logger, join_process_group, leave_process_group
from motley.records.run_folder import EpochRecord
from motley.tasks.model import model_name
from motley.train.agreement import Agreement
from motley.train.recorder import Recorder
from motley.train.recovery import (
    check_finite,
    describe_overflow,
    readable,
    rebalance,
    shrink_micro_batches,
)
from motley.train.setup import Job, assemble, budget_of
from motley.train.summary import print_summary, records_of


def train(world: World, config: Config, engine_factory: EngineFactory) -> None:
    """Train one model on all ranks of ``world``; every rank calls it with the same config."""
    config = dataclasses.replace(config, model=model_name(config))
    run = Run.find(world, config)
    say = world.supervisor.set_status
    say(Phase.PREPARE, DATA)
    world.once_per_node(lambda: prepare(config))
    say(Phase.BUILD, PROGRESS_TIMEOUT_S)
    group = join_process_group(world, config.precision, config.hosts)

    # All that can be wrong with the options is said before the run's records are touched.
    parts = open_parts(group, config)
    group, planned = plan_batch(world, run, group, parts, config, engine_factory.traits)
    plan = planned.plan
    run.check_leader(group.workers[0].rank)
    job, position, notes = None, TrainState(), list[str]()
    if group.rank is not None and parts is not None:
        job = assemble(run, group, planned, config, engine_factory, parts)
        plan = job.plan
        position, notes = job.resume(run.resume_from)
        if group.rank == 0:
            budget = budget_of(job, position, planned)
            budget.check()
    run.start(records_of(config, group, plan, planned, engine_factory.traits))
    print_summary(world, run, group, planned, plan, config)
    if job is None:
        parts = None  # its memory is of use to others
        release()
        with gpu_logger(world, group, run.folder, interval=config.gpu_log_interval):
            run.finish()  # this rank is left out, and waits for the others
        return

    if group.rank == 0:
        print(f"  {budget.sentence()}", flush=True)
        job.checkpoints.set_aside_after(position.step)
    tells_sync = not job.engine.equal_micro_steps
    release_groups()  # those that were measured
    last = job.length.last_step(position)
    recorder = Recorder(run, group, config, tells_sync, position.step, last)
    for note in notes:
        recorder.note("resume", note)
    for kind, text, content in job.notes:
        recorder.note(kind, text, **content)
    with (
        gpu_logger(world, group, run.folder, lambda: recorder.progress, config.gpu_log_interval),
        recorder,
    ):
        evaluated = fit(world, job, recorder, position)
    say(Phase.LEAVE, PROGRESS_TIMEOUT_S)
    leave_process_group()
    if group.rank == 0:
        run.tell_result(recorder.result(evaluated, job.loader.order.epoch_samples))
    run.finish()


def fit(world: World, job: Job, recorder: Recorder, position: TrainState) -> EpochRecord:
    """Train from ``position`` to the last step; returns the last evaluation."""
    engine, loader, say = job.engine, job.loader, world.supervisor.set_status
    engine.clock.on_phase = lambda phase: say(phase, recorder.timeout_s)
    plan, watch, length = job.plan, job.watch, job.length
    evaluated, agreement = make_up(world, job, recorder, position), Agreement(job, recorder)
    while not length.ended(position):
        epoch, before = position.epoch, 0
        engine.clock.restart()
        say(Phase.DATA, PROGRESS_TIMEOUT_S)
        for part, micro_batches in loader.steps(epoch, position.consumed, plan):
            world.supervisor.step = position.step
            job.schedule.step_update(length.updates(position))  # type: ignore[arg-type]
            lr = float(engine.optimizer.param_groups[0]["lr"])

            # One global batch: this rank's micro-batches, then one step of all ranks.
            losses: list[Tensor] = []
            indices: list[int] = []
            for batch, last in micro_batches:
                engine.clock.lap("data")
                losses.append(engine.accumulate(batch, part.global_batch, last))
                indices += readable(batch, job.config, job.run)
            sample_loss = torch.cat(losses)
            result = engine.step(sample_loss.sum(), recorder.ready_s)
            if result.oom_ranks:
                # Of local steps the news is old: by now the batch may be another.
                tried = part if result.retry else plan
                less = shrink_micro_batches(tried, job, result, recorder, position.step)
                plan = less.of_batch(plan.global_batch)
                engine.reconfigure(plan)
                watch.limit(plan.max_micro_batch)
                if result.retry:
                    break  # the same samples, as the new plan cuts them
            known = sample_loss.sum().item() if result.loss_sum is None else result.loss_sum
            check_finite(known, sample_loss, indices)
            if result.overflow and not engine.scale.may_clear:
                raise NotFiniteError(describe_overflow(job, plan, position, result))

            recorder.step(position.step, epoch, lr, part, result, engine.clock.cut())
            position = length.after(position, part.global_batch)
            ended, saves = length.ended(position), length.saves(position)
            if ended or saves:
                say(Phase.SAVE, PROGRESS_TIMEOUT_S)
                recorder.flush()
                engine.sync_parameters()
                agreed = agreement.check(position)
                if agreed != position:
                    position = agreed
                    break  # from the checkpoint again
                if saves:
                    save(engine, job.checkpoints, position, job.saved_config)
                    agreement.saved(position)
                engine.clock.restart()
            # Ready times describe the previous step, are absent after a pause, and are ignored for
            # ragged batches.
            full = before == plan.global_batch and result.ready_s and all(result.ready_s)
            before = part.global_batch
            proposal = watch.step(result.ready_s, plan.counts) if full else None
            if proposal:
                plan = rebalance(plan, proposal, recorder, position)
                engine.reconfigure(plan)
                watch.forget()
            changed = proposal or result.oom_ranks
            if ended or (changed and position.epoch == epoch):
                break
        recorder.flush()
        if position.epoch <= epoch and not length.ended(position):
            continue  # the rest of the epoch, as the new plan shares it
        evaluated = evaluate(world, job, plan, position)
        recorder.epoch(evaluated)
    assert evaluated is not None  # no run is shorter than a step
    return evaluated


def make_up(world: World, job: Job, recorder: Recorder, position: TrainState) -> EpochRecord | None:
    """The evaluation that belongs to where a run goes on; made now if the run was stopped between
    the checkpoint and it. None where none is due."""
    if not job.length.evaluates(position):
        return None
    evaluated = recorder.evaluation_at(position.step)
    if evaluated is None:
        evaluated = evaluate(world, job, job.plan, position)
        recorder.epoch(evaluated)
    return evaluated


def evaluate(world: World, job: Job, plan: Plan, position: TrainState) -> EpochRecord:
    """Accuracy on the held-out images, shared as ``plan`` shares a batch: sums and counts over all
    ranks, never a mean of means."""
    start = time.monotonic()
    parts = []
    say = world.supervisor.set_status
    say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    job.engine.sync_parameters()
    for batch in job.loader.test_batches(plan):
        parts.append(job.engine.evaluate(batch))
        readable(batch, job.config, job.run)
        say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    say(Phase.ALL_REDUCE, PROGRESS_TIMEOUT_S)
    table = all_gather_floats(list(torch.stack(parts).sum(dim=0)))
    loss, correct, samples = (math.fsum(column) for column in zip(*table, strict=True))
    return EpochRecord(
        step=position.step, epoch=position.epoch - (position.consumed == 0),
        top1=correct / samples, loss=loss / samples, samples=int(samples),
        seconds=time.monotonic() - start, time=time.time(),
    )  # fmt: skip

"""The one training loop. Read :func:`train` from top to bottom; engines plug in.

A run is: who takes part, the data, the model, the plan; then epochs of global batches,
each computed in micro-batches by every rank and finished by one step; a record after
every step, an evaluation and a checkpoint after every epoch.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor

from motley.briefing import announce, records_of
from motley.budget import Budget, checkpoint_bytes
from motley.checkpoint import Checkpoints, free_bytes
from motley.collectives import everyone, exchange
from motley.data import prepare
from motley.engine import Engine, EngineMaker, Seating, StepResult
from motley.errors import MotleyError
from motley.launch import World
from motley.memory import release
from motley.model import Classifier, image_size, model_name
from motley.options import Config
from motley.overflow import find_overflow
from motley.plan import Plan
from motley.planning import Parts, Planned, open_parts, plan_batch
from motley.precision import parse_loss_scale
from motley.rebalance import Proposal, Watch
from motley.recorder import Recorder
from motley.records import EpochRecord
from motley.runs import Run
from motley.sampler import Batch, Loader, seed_of
from motley.scale_search import search_scale
from motley.state import Position, drifted, resume, same_again, save
from motley.team import Member, Team, gpu_logger, join_team, leave_team
from motley.vigil import DATA, PATIENCE, WAITING

Note = tuple[str, str, dict[str, Any]]  # an event's kind, its text, and its content


@dataclass(frozen=True)
class Job:
    """Everything that training needs, made once by :func:`assemble`.

    Attributes:
        numbers: in the model, its buffers included.
        last_step: where this run ends. save_every: steps between checkpoints, 0 for none.
        saved_config: what a checkpoint keeps of the options.
        notes: what was found while it was made, for the records.
        watch: proposes another split when this one fits no more.
    """

    config: Config
    run: Run
    plan: Plan
    loader: Loader
    model: Classifier
    engine: Engine
    schedule: CosineLRScheduler
    checkpoints: Checkpoints
    numbers: int
    last_step: int
    save_every: int
    saved_config: dict[str, Any]
    notes: list[Note]
    members: tuple[Member, ...]
    watch: Watch


def train(world: World, config: Config, make_engine: EngineMaker) -> None:
    """Train one model on all ranks of ``world``; every rank calls it with the same config."""
    config = dataclasses.replace(config, model=model_name(config))
    run = Run.find(world, config)
    say = world.lifeline.enter
    say("preparing the data", DATA)
    world.once_per_node(lambda: prepare(config))
    say("building the model", PATIENCE)
    team = join_team(world, config.precision, config.hosts)

    # All that can be wrong with the options is said before the run's records are touched.
    parts = open_parts(team, config)
    team, planned = plan_batch(world, run, team, parts, config, make_engine.sending)
    plan = planned.plan
    run.check_leader(team.members[0].rank)
    job, position, notes = None, Position(), list[str]()
    if team.rank is not None and parts is not None:
        job = assemble(run, team, planned, config, make_engine, parts)
        plan = job.plan
        position, notes = resume(job.engine, run.resume_from, job.saved_config, team.device)
        if team.rank == 0:
            budget = budget_of(job, position, planned)
            budget.check()
    run.start(records_of(config, team, plan, planned, make_engine.sending))
    announce(world, run, team, planned, plan, config)
    if job is None:
        parts = None  # its memory is of use to others
        release()
        with gpu_logger(world, team, run.folder, interval=config.gpu_log_interval):
            run.finish()  # this rank is left out, and waits for the others
        return

    if team.rank == 0:
        print(f"  {budget.sentence()}", flush=True)
        job.checkpoints.set_aside_after(position.step)
    tells_sync = not job.engine.equal_micro_steps
    recorder = Recorder(run, team, config, tells_sync, position.step, job.last_step)
    for note in notes:
        recorder.note("resume", note)
    for kind, text, content in job.notes:
        recorder.note(kind, text, **content)
    with (
        gpu_logger(world, team, run.folder, lambda: recorder.progress, config.gpu_log_interval),
        recorder,
    ):
        evaluated = fit(world, job, recorder, position)
    say("leaving", PATIENCE)
    leave_team()
    if team.rank == 0:
        run.tell_result(recorder.result(evaluated, job.loader.order.epoch_samples))
    run.finish()


def assemble(
    run: Run, team: Team, planned: Planned, config: Config, make_engine: EngineMaker, parts: Parts
) -> Job:
    """Set an engine on the model, and make what else training needs."""
    assert team.rank is not None
    img_size, model, plan = image_size(config), parts.model, planned.plan
    loader = Loader(parts.images, config, img_size, team.rank, team.device)
    torch.manual_seed(seed_of(config.seed, team.rank))  # drop-out differs between ranks
    scale = parse_loss_scale(config.loss_scale, (*team.precisions, plan.wire.kind))
    notes: list[Note] = []
    if config.loss_scale == "auto" and scale.dynamic and not run.resume_from:
        scale.value = search_scale(team, loader, model, plan, config.smoothing)
        text = f"the loss scale starts at {scale.value:g}, found on the first batches"
        notes.append(("loss_scale", text, {"value": scale.value}))
    numbers = sum(value.numel() for value in model.net.state_dict().values())
    engine = make_engine(  # some leave no rank a whole parameter
        model, Seating(config, team.rank, team.size, team.device, team.precisions, scale, plan)
    )
    plan = dataclasses.replace(plan, equal_micro_steps=engine.equal_micro_steps)
    engine.reconfigure(plan)

    steps_an_epoch = math.ceil(loader.order.epoch_samples / plan.global_batch)
    total_steps = steps_an_epoch * config.epochs
    return Job(
        config, run, plan, loader, model, engine,
        schedule=make_schedule(engine.optimizer, config, steps_an_epoch),
        checkpoints=Checkpoints(run.folder.checkpoints, config.keep), numbers=numbers,
        last_step=min(total_steps, config.max_steps or total_steps),
        save_every=config.save_every or (0 if config.dataset == "synthetic" else steps_an_epoch),
        saved_config={**dataclasses.asdict(config), "img_size": img_size}, notes=notes,
        members=team.members,
        watch=Watch(
            planned.speeds if config.replan == "auto" else (),
            [member.uuid or member.host for member in team.members],
        ),
    )  # fmt: skip


def budget_of(job: Job, position: Position, planned: Planned) -> Budget:
    """What the rest of the run is going to take; on the rank that writes."""
    job.checkpoints.sweep()
    last, every = max(job.last_step, position.step), job.save_every
    saves = last // every - position.step // every + (last % every > 0) if every else 0
    return Budget(
        last - position.step, planned.forecast.step_s if planned.forecast else None,
        checkpoint=checkpoint_bytes(job.numbers, job.config, job.plan),
        saves=saves if last > position.step else 0, keep=job.config.keep,
        there=len(job.checkpoints.found(position.step)),
        free=free_bytes(job.checkpoints.path), folder=job.checkpoints.path,
    )  # fmt: skip


def fit(world: World, job: Job, recorder: Recorder, position: Position) -> EpochRecord:
    """Train from ``position`` to the last step; returns the last evaluation."""
    engine, loader, say = job.engine, job.loader, world.lifeline.enter
    engine.clock.on_lap = lambda doing: say(doing, recorder.patience)
    evaluated, plan, watch = None, job.plan, job.watch
    if position.consumed >= loader.order.epoch_samples:  # the data set has become smaller
        position = Position(position.step, position.epoch + 1, 0)
    while position.step < job.last_step:
        epoch, before = position.epoch, 0
        engine.clock.restart()
        say("loading images", PATIENCE)
        for part, micro_batches in loader.steps(epoch, position.consumed, plan):
            world.lifeline.step = position.step
            job.schedule.step_update(position.step)
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
            if result.short:
                plan = give_room(plan, job, result, recorder, position.step)
                engine.reconfigure(plan)
                watch.limit(plan.max_micro_batch)
                if result.again:
                    break  # the same samples, as the new plan cuts them
            known = sample_loss.sum().item() if result.loss_sum is None else result.loss_sum
            check_finite(known, sample_loss, indices)
            if result.overflow and not engine.scale.helps:
                raise MotleyError(hopeless(job, plan, position, result))

            recorder.step(position.step, epoch, lr, part, result, engine.clock.cut())
            position = advance(position, part.global_batch, loader.order.epoch_samples)
            ended = position.step == job.last_step
            if ended or (job.save_every and position.step % job.save_every == 0):
                say("saving a checkpoint", PATIENCE)
                recorder.settle()
                engine.unite()
                keep_same(job, recorder, position)
                if job.save_every:
                    save(engine, job.checkpoints, position, job.saved_config)
                engine.clock.restart()
            # Times arrive a step late, none after a pause, and a ragged batch says nothing.
            full = before == plan.global_batch and result.ready_s and all(result.ready_s)
            before = part.global_batch
            proposal = watch.step(result.ready_s, plan.counts) if full else None
            if proposal:
                plan = rebalance(plan, proposal, recorder, position)
                engine.reconfigure(plan)
                watch.forget()
            changed = proposal or result.short
            if ended or (changed and position.epoch == epoch):
                break
        recorder.settle()
        if position.epoch == epoch and position.step < job.last_step:
            continue  # the rest of the epoch, as the new plan shares it
        evaluated = evaluate(world, job, position.step, epoch)
        recorder.epoch(evaluated)
    # A run that was finished before it was resumed has nothing left but its result.
    return evaluated or evaluate(world, job, position.step, position.epoch)


def make_schedule(
    optimizer: torch.optim.Optimizer, config: Config, steps_an_epoch: int
) -> CosineLRScheduler:
    """Linear warm-up, then a cosine down to ``--min-lr`` at the end of the last epoch."""
    total = steps_an_epoch * config.epochs
    warmup = min(round(config.warmup_epochs * steps_an_epoch), total - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=total - warmup,
        lr_min=config.min_lr,
        warmup_t=warmup,
        warmup_lr_init=config.lr / (warmup + 1),
        warmup_prefix=True,
        t_in_epochs=False,
    )


def readable(batch: Batch, config: Config, run: Run) -> tuple[int, ...]:
    """The batch's sample indices, once its unreadable images are dealt with."""
    for name in batch.unreadable:
        if config.bad_images == "fail":
            raise MotleyError(
                f"cannot read {name}; repair or remove it, or go on without such images by "
                "--bad-images skip"
            )
        run.event("unreadable", image=name)
    return batch.indices


def check_finite(loss_sum: float, sample_loss: Tensor, indices: list[int]) -> None:
    """Stop where a loss is not finite; ranks whose losses are fine leave the word to others."""
    if math.isfinite(loss_sum):
        return
    bad = [index for index, loss in zip(indices, sample_loss.tolist(), strict=True)
           if not math.isfinite(loss)]  # fmt: skip
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        raise MotleyError(
            f"the loss of {len(bad)} of this rank's {len(indices)} samples is not finite (sample "
            f"indices {shown}); lower --lr, or set --clip-grad 1.0, and --resume auto"
        )


def hopeless(job: Job, plan: Plan, position: Position, result: StepResult) -> str:
    """What to say where skipping steps can help no more: which layer overflows, on which samples.

    All ranks compute the step again, and say the same; not where nobody can do it alone.
    """
    found = f"the gradient is not finite at the loss scale {result.loss_scale:g}, though the losses"
    advice = "lower --lr, set --clip-grad 1.0, or give fp16 ranks another --precision"
    if not job.engine.whole:
        return f"{found} are; {advice}"
    part, micro_batches = next(iter(job.loader.steps(position.epoch, position.consumed, plan)))
    factor = result.loss_scale * job.engine.loss_weight / part.global_batch
    try:
        batches = [batch for batch, _ in micro_batches]
        own = find_overflow(job.model, batches, factor, job.config.smoothing)
        words = str(own) if own else ""
    except (RuntimeError, MemoryError) as error:  # the others wait for this rank's word
        words = f"could not compute the step again ({error})"
    where = "; ".join(
        f"rank {member.rank} on {member.host} ({member.precision}): {words}"
        for member, words in zip(job.members, everyone(words), strict=True) if words
    )  # fmt: skip
    return f"{found} are: {where or 'no rank alone overflows, their sum does'}; {advice}"


def rebalance(plan: Plan, proposal: Proposal, recorder: Recorder, position: Position) -> Plan:
    """The same batch, split anew; says what changed."""
    changed = dataclasses.replace(plan, shares=proposal.counts)
    slow = ", ".join(f"{factor:.2f}" for factor in proposal.slowdown)
    recorder.note(
        "replan",
        f"the ranks now take {' + '.join(map(str, changed.counts))} samples (before: "
        f"{' + '.join(map(str, plan.counts))}): against their measured speed they need {slow} of "
        f"the time, and this saves {proposal.gain:.0%} of a step's compute",
        step=position.step, counts=changed.counts, before=plan.counts,
        slowdown=proposal.slowdown, gain=proposal.gain,
    )  # fmt: skip
    return changed


def give_room(plan: Plan, job: Job, result: StepResult, recorder: Recorder, step: int) -> Plan:
    """The same shares in smaller micro-batches where memory had ended; says who holds it."""
    short = result.short
    names = {rank: f"rank {job.members[rank].rank} on {job.members[rank].host}" for rank in short}
    said = "; ".join(f"{names[rank]}: {words}" for rank, words in short.items())
    try:
        smaller = plan.halved(tuple(short))
    except ValueError:
        raise MotleyError(
            f"out of memory with micro-batches of one sample ({said}); wait until others leave, "
            "or take the host out of hosts.txt, and continue with --resume auto"
        ) from None
    before = {names[rank]: max(plan.micro_batches[rank]) for rank in short}
    after = {names[rank]: smaller.max_micro_batch[rank] for rank in short}
    recorder.note(
        "out_of_memory",
        (
            f"out of memory in step {step}, which is done again with micro-batches of at most "
            if result.again
            else f"out of memory before step {step}; from here on micro-batches of at most "
        )
        + ", ".join(f"{after[name]} (before: {before[name]}) on {name}" for name in names.values())
        + f". {said}",
        step=step, before=before, after=after, found={names[rank]: short[rank] for rank in short},
    )  # fmt: skip
    return smaller


def advance(position: Position, samples: int, epoch_samples: int) -> Position:
    """The position after a global batch of ``samples``."""
    consumed = position.consumed + samples
    if consumed < epoch_samples:
        return dataclasses.replace(position, step=position.step + 1, consumed=consumed)
    return Position(position.step + 1, position.epoch + 1, 0)


def keep_same(job: Job, recorder: Recorder, position: Position) -> None:
    """Check that all ranks hold the same parameters; if not, say so and give them the first's.

    Where each holds a part alone, there is nothing to compare."""
    if not job.engine.whole:
        return
    if drift := drifted(job.model.net):
        first, ranks = job.members[0].rank, [job.members[rank].rank for rank in drift]
        recorder.note(
            "drift",
            f"the parameters of rank {', '.join(map(str, ranks))} differ from rank {first}'s; all "
            f"take rank {first}'s now",
            step=position.step,
            ranks=ranks,
        )
        same_again(job.model.net)


def evaluate(world: World, job: Job, step: int, epoch: int) -> EpochRecord:
    """Accuracy on the held-out images: sums and counts over all ranks, never a mean of means."""
    start = time.monotonic()
    parts = []
    say = world.lifeline.enter
    say("evaluating", PATIENCE)
    job.engine.unite()
    for batch in job.loader.test_batches(job.plan):
        parts.append(job.engine.evaluate(batch))
        readable(batch, job.config, job.run)
        say("evaluating", PATIENCE)
    say(WAITING, PATIENCE)
    table = exchange(list(torch.stack(parts).sum(dim=0)))
    loss, correct, samples = (math.fsum(column) for column in zip(*table, strict=True))
    return EpochRecord(
        step=step, epoch=epoch, top1=correct / samples, loss=loss / samples, samples=int(samples),
        seconds=time.monotonic() - start, time=time.time(),
    )  # fmt: skip

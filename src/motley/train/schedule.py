"""The learning rate of each step, by timm's schedules."""

import math

from torch.optim import Optimizer

from motley.config.options import RAMP_POWERS, Config
from motley.data.import_timm import Scheduler, timm
from motley.plan.length import Length, TrainState

_FALLS = ("cosine", "tanh", "poly")  # until the end of the schedule
_EPOCHS = 30  # default of --epochs, of which the default --warmup-epochs are a part


def make_schedule(optimizer: Optimizer, config: Config, length: Length) -> Scheduler:
    """Linear warm-up, then ``--sched``; cosine, tanh and poly end with the schedule at
    ``--min-lr``. Of steps, not of epochs: timm takes what it calls epochs in any unit."""
    steps_an_epoch, total = length.steps_an_epoch, schedule_steps(config, length)
    warmup = min(round(config.warmup_epochs * steps_an_epoch), total - 1)
    if config.schedule_ends_with_run and "warmup_epochs" not in config.typed_names:
        warmup = min(warmup, round(total * config.warmup_epochs / _EPOCHS))
    # timm steps at the end of the update before a milestone.
    milestones = [steps_an_epoch * epoch - warmup + 1 for epoch in sorted(config.decay_milestones)]
    rate = config.decay_rate or (1.0 if config.sched == "poly" else 0.1)
    schedule: Scheduler
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, config.sched, num_epochs=total - warmup, min_lr=config.min_lr,
        decay_epochs=max(1, round(config.decay_epochs * steps_an_epoch)), decay_rate=rate,
        decay_milestones=milestones,
        warmup_epochs=warmup, warmup_lr=config.lr / (warmup + 1), warmup_prefix=True,
        step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    return schedule


def schedule_steps(config: Config, length: Length) -> int:
    """Return the updates after which the schedule ends: those of all epochs, or of the run."""
    total = length.steps_an_epoch * config.epochs
    if config.schedule_ends_with_run and config.max_steps is not None:
        total = min(total, math.ceil(length.updates_at(config.max_steps)))
    return total


def explain_early_end(config: Config, length: Length, state: TrainState) -> str:
    """Return a sentence if the run ends before the rate has fallen, or before ``--max-steps``."""
    last = length.last_step(state)
    if config.schedule_ends_with_run and config.max_steps is not None and last < config.max_steps:
        return (
            f"{config.epochs} epochs, the default, end after step {last:,}, before --max-steps "
            f"{config.max_steps:,}; for more steps raise --epochs"
        )
    total = schedule_steps(config, length)
    if config.sched not in _FALLS or config.max_steps is None or config.schedule_ends_with_run:
        return ""
    if length.updates(state) + last - state.step >= total - 1:
        return ""
    return (
        f"the rate falls until step {total:,}, with epoch {config.epochs}, and --max-steps stops "
        f"after step {last:,}; without --epochs it falls until --max-steps"
    )


def set_rate(schedule: Scheduler, updates: float, batch: int, config: Config) -> None:
    """For the step that comes.

    Args:
        updates: where the schedule stands; see Length. batch: samples in a full step there.
    """
    schedule.step_update(updates)  # type: ignore[arg-type]
    factor = (batch / int(config.batch_size)) ** RAMP_POWERS[config.ramp_lr]
    if factor != 1.0:
        for group in schedule.optimizer.param_groups:
            group["lr"] *= factor


def rate_of(optimizer: Optimizer) -> float:
    """``--lr`` as the schedule has it now: of a parameter group whose rate is not scaled."""
    group = optimizer.param_groups[0]
    return float(group["lr"] / group.get("lr_scale", 1.0))

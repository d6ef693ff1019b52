"""The schedule of the learning rate and of the weight decay, in steps.

The learning rate follows one of timm's schedules, or the task's own schedule.
"""

import math
from bisect import bisect_right
from itertools import accumulate, count, pairwise

import torch
from torch.optim import Optimizer

from motley.config.option import Part
from motley.config.options import RAMP_POWERS, Config
from motley.data.import_timm import Scheduler, timm
from motley.errors import MotleyError
from motley.plan.length import Length, TrainState
from motley.tasks.builtin import get_task
from motley.tasks.task import Task

_FALLS = ("cosine", "tanh", "poly")  # schedules that fall until their end
_EPOCHS = 30  # default of --epochs, to which the default of --warmup-epochs relates
_WARM_PART = 10  # a task's own warm-up takes one in so many steps at most
_OF_RATE = (
    "sched", "warmup_epochs", "warmup_steps", "warmup_lr", "min_lr", "decay_epochs",
    "decay_milestones", "decay_rate", "lr_noise", "lr_cycle_mul", "lr_cycle_decay",
    "lr_cycle_limit",
)  # fmt: skip
_CYCLES = _OF_RATE[-3:]


def check_schedule(config: Config) -> None:
    """Raise MotleyError if options of the schedule contradict each other or have no effect."""
    task, typed = get_task(config), config.typed_names - config.continued_names
    if has_schedule(task) and (useless := [name for name in _OF_RATE if name in typed]):
        raise MotleyError(
            f"{_flag(useless[0])} has no effect, since schedule() of {type(task).__name__} sets "
            "the learning rate; leave out the option"
        )
    if config.sched not in _FALLS and (useless := [name for name in _CYCLES if name in typed]):
        raise MotleyError(
            f"{_flag(useless[0])} has no effect with --sched {config.sched}; take --sched "
            f"{', '.join(_FALLS[:-1])} or {_FALLS[-1]}, or leave out the option"
        )
    if config.lr_noise is not None and len(config.lr_noise) > 2:
        raise MotleyError(
            f"--lr-noise has {len(config.lr_noise)} numbers; give the fraction of the epochs after "
            "which noise begins, and the fraction after which it ends, as in --lr-noise 0.4 0.9"
        )
    if config.weight_decay_end is not None and config.weight_decay == 0:
        raise MotleyError(
            f"--weight-decay-end {config.weight_decay_end:g} has no effect with --weight-decay 0; "
            "give a --weight-decay above 0, from which the weight decay changes to that end"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def has_schedule(task: Task) -> bool:
    """Return True if a task overrides the method :meth:`Task.schedule`.

    An option of the task that is named ``schedule`` does not count.
    """
    own = type(task).schedule
    return callable(own) and own is not Task.schedule


class Schedule:
    """A writer of each step's learning rate and weight decay to an optimizer's groups.

    Each cycle of the learning rate has its own timm schedule. Cycles begin at whole steps, so that
    all ranks begin a cycle at the same step, whatever the rounding of their hosts.

    Args:
        optimizer: the optimizer, with the learning rate and weight decay of the options.
        config: the options.
        length: length of the run.

    Attributes:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer, config: Config, length: Length) -> None:
        self.optimizer, self._config = optimizer, config
        self._steps_an_epoch = length.steps_an_epoch
        self._total = schedule_steps(config, length)
        warmup = warmup_steps(config, length, self._total)
        ends = cycle_ends(config, self._total - warmup)
        self._starts = [0, *(warmup + end for end in ends[:-1])]
        self._cycles: list[Scheduler] = []
        for first, end in pairwise((0, *ends)):
            own = 0 if self._cycles else warmup
            self._cycles.append(make_cycle(optimizer, config, length, own, end - first))
        factor = 1.0
        self._rates = self._cycles[0].base_values
        for cycle in self._cycles[1:]:
            factor *= config.lr_cycle_decay
            cycle.base_values = [factor * rate for rate in self._rates]
        for group in optimizer.param_groups:
            group.setdefault("initial_weight_decay", group.get("weight_decay", 0.0))
        task = get_task(config)
        self._task = task if has_schedule(task) else None
        self.step_update(0)

    def step_update(self, updates: float) -> None:
        """Write the learning rate and weight decay of a step to the optimizer's groups.

        Args:
            updates: position in the schedule, in steps; see Length.
        """
        if self._task is not None:
            self._set_own(self._task, updates)
        else:
            cycle = bisect_right(self._starts, updates) - 1
            passed = updates - self._starts[cycle]
            self._cycles[cycle].step_update(passed)  # type: ignore[arg-type]
            if self._config.lr_noise:
                self._add_noise(self._config.lr_noise, int(updates / self._steps_an_epoch))
        if self._config.weight_decay_end is not None:
            self._set_weight_decay(self._config.weight_decay_end, updates)

    def _set_own(self, task: Task, updates: float) -> None:
        factor = task.schedule(updates, self._total)
        if factor is None or not 0 <= factor < math.inf:
            raise MotleyError(
                f"schedule({updates:g}, {self._total}) of {type(task).__name__} returns {factor}; "
                "return the factor of --lr, which is 0 or more"
            )
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate * group.get("lr_scale", 1.0)

    def _add_noise(self, bounds: tuple[float, ...], epoch: int) -> None:
        """Change the learning rates of an epoch by a random fraction.

        The fraction has a normal distribution, and depends on ``--seed`` and the epoch. Like timm,
        this method draws again if the fraction is not below ``--lr-noise-pct``.
        """
        begin, end = (part * self._config.epochs for part in (*bounds, math.inf)[:2])
        if begin <= epoch < end:
            generator = torch.Generator().manual_seed(self._config.seed + epoch)
            draws = (torch.randn(1, generator=generator).item() for _ in count())
            part = next(draw for draw in draws if abs(draw) < self._config.lr_noise_pct)
            for group in self.optimizer.param_groups:
                group["lr"] *= 1 + part

    def _set_weight_decay(self, end: float, updates: float) -> None:
        """Set the weight decay by a half cosine that ends at ``end``. A decay of 0 stays 0."""
        part = min(1.0, updates / max(1, self._total - 1))
        factor = end / self._config.weight_decay
        now = factor + (1 - factor) * (1 + math.cos(math.pi * part)) / 2
        for group in self.optimizer.param_groups:
            group["weight_decay"] = now * group["initial_weight_decay"]


def make_schedule(optimizer: Optimizer, config: Config, length: Length) -> Schedule:
    """Return the schedule: a linear warm-up, then ``--sched`` or the task's own schedule.

    The schedules cosine, tanh and poly reach ``--min-lr`` at their end. Steps are passed to timm as
    epochs, because timm accepts any unit of time.
    """
    return Schedule(optimizer, config, length)


def make_cycle(
    optimizer: Optimizer, config: Config, length: Length, warmup: int, steps: int
) -> Scheduler:
    """Return timm's schedule of one cycle: ``warmup`` steps of warm-up, then ``steps`` steps."""
    steps_an_epoch = length.steps_an_epoch
    # timm steps at the end of the update before a milestone.
    milestones = [steps_an_epoch * epoch - warmup + 1 for epoch in sorted(config.decay_milestones)]
    rate = config.decay_rate or (1.0 if config.sched == "poly" else 0.1)
    least = config.lr * config.min_lr if isinstance(config.min_lr, Part) else config.min_lr
    first = config.lr / (warmup + 1) if config.warmup_lr is None else config.warmup_lr
    schedule: Scheduler
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, config.sched, num_epochs=steps, min_lr=least,
        decay_epochs=max(1, round(config.decay_epochs * steps_an_epoch)), decay_rate=rate,
        decay_milestones=milestones,
        warmup_epochs=warmup, warmup_lr=first, warmup_prefix=True,
        step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    return schedule


def warmup_steps(config: Config, length: Length, total: int) -> int:
    """Return the number of warm-up steps.

    Args:
        config: the options.
        length: length of the run.
        total: number of steps of the whole schedule.
    """
    typed, new = config.typed_names, config.typed_names - config.continued_names
    is_typed = "warmup_steps" in typed  # else the number is a task's default
    in_epochs = "warmup_epochs" in (new if is_typed else typed | config.recipe_names)
    if config.warmup_steps is not None and ("warmup_steps" in new or not in_epochs):
        return min(config.warmup_steps, total - 1 if is_typed else total // _WARM_PART)
    warmup = min(round(config.warmup_epochs * length.steps_an_epoch), total - 1)
    if config.schedule_ends_with_run and "warmup_epochs" not in typed:
        warmup = min(warmup, round(total * config.warmup_epochs / _EPOCHS))
    return warmup


def cycle_ends(config: Config, steps: int) -> list[int]:
    """Return the steps at which the cycles of the learning rate end. The last entry is ``steps``.

    Each cycle is ``--lr-cycle-mul`` times as long as the cycle before it. A cycle has at least one
    step, so a short schedule has fewer cycles.
    """
    lengths = [1.0]
    for _ in range(config.lr_cycle_limit - 1):
        lengths.append(lengths[-1] * config.lr_cycle_mul)
    whole = sum(lengths)
    ends = {max(1, round(steps * passed / whole)) for passed in accumulate(lengths)}
    return sorted({*(end for end in ends if end < steps), steps})


def schedule_steps(config: Config, length: Length) -> int:
    """Return the number of steps after which the schedule ends.

    The schedule ends with the last epoch, or with the run.
    """
    total = length.steps_an_epoch * config.epochs
    if config.schedule_ends_with_run and config.max_steps is not None:
        total = min(total, math.ceil(length.updates_at(config.max_steps)))
    return total


def explain_early_end(config: Config, length: Length, state: TrainState) -> str:
    """Return a sentence if the run ends before the end of its schedule, or before ``--max-steps``.

    At the end of a schedule, the learning rate has reached its last value. The result is an empty
    string if the run does not end early.
    """
    last = length.last_step(state)
    if config.schedule_ends_with_run and config.max_steps is not None and last < config.max_steps:
        return (
            f"the {config.epochs} epochs of the default end after step {last:,}, before "
            f"--max-steps {config.max_steps:,}; for more steps, raise --epochs"
        )
    total = schedule_steps(config, length)
    falls_in_steps = config.sched in _FALLS and not has_schedule(get_task(config))
    if not falls_in_steps or config.max_steps is None or config.schedule_ends_with_run:
        return ""
    if length.updates(state) + last - state.step >= total - 1:
        return ""
    falls = (
        f"the learning rate falls until step {total:,}, the end of epoch {config.epochs}, and "
        f"--max-steps stops the run after step {last:,}"
    )
    if "epochs" in config.continued_names:
        return (
            f"{falls}; --epochs {config.epochs} comes from the checkpoint, and --epochs N "
            "changes it"
        )
    return f"{falls}; without --epochs, the rate falls until --max-steps"


def set_rate(schedule: Schedule, updates: float, batch: int, config: Config) -> None:
    """Set the learning rate for the next step.

    Args:
        schedule: the schedule.
        updates: position in the schedule, in steps; see Length.
        batch: number of samples in a full step at this position.
        config: the options.
    """
    schedule.step_update(updates)
    factor = (batch / int(config.batch_size)) ** RAMP_POWERS[config.ramp_lr]
    if factor != 1.0:
        for group in schedule.optimizer.param_groups:
            group["lr"] *= factor


def get_rate(optimizer: Optimizer) -> float:
    """Return the current learning rate of the schedule.

    A group's own factor on the learning rate (``lr_scale``) is not included.
    """
    group = optimizer.param_groups[0]
    return float(group["lr"] / group.get("lr_scale", 1.0))

"""What a model is worth: the task's scores of all held-out samples, over all ranks."""

import math
import time

import torch

from motley.comm.collectives import all_gather_floats
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.watchdog import PROGRESS_TIMEOUT_S
from motley.launch.world import World
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.records.training import EMA, EpochRecord
from motley.train.recovery import check_scores, readable
from motley.train.setup import Job


def evaluate(world: World, job: Job, plan: Plan, position: TrainState) -> EpochRecord:
    """The task's scores of the held-out samples, shared as ``plan`` shares a batch; also of the
    average of the parameters, where there is one, as ``ema_...``."""
    start = time.monotonic()
    world.supervisor.set_status(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    job.engine.sync_parameters()
    average = job.engine.average is not None
    metrics, samples = _scores(world, job, plan, None if average else position)
    if average:
        with job.engine.averaged():
            also, _ = _scores(world, job, plan, position)
        metrics |= {f"{EMA}{name}": value for name, value in also.items()}
    return EpochRecord(
        step=position.step, epoch=position.epoch - (position.consumed == 0), metrics=metrics,
        samples=samples, seconds=time.monotonic() - start, time=time.time(),
    )  # fmt: skip


def _scores(
    world: World, job: Job, plan: Plan, then: TrainState | None
) -> tuple[dict[str, float], int]:
    """The summary of all held-out samples, and their number: sums and weights over all ranks, never
    a mean of means.

    Args:
        then: where training goes on; its first samples are read while the device still evaluates.
    """
    parts, indices = list[torch.Tensor](), list[tuple[int, ...]]()
    say = world.supervisor.set_status
    say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    for batch in job.loader.test_batches(plan):
        parts.append(job.engine.evaluate(batch))
        indices.append(readable(batch, job.config, job.run))
        say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    if then and not job.length.ended(then):
        job.loader.prepare(then.epoch, then.consumed, plan)
    say(Phase.ALL_REDUCE, PROGRESS_TIMEOUT_S)
    scores = torch.stack(parts)
    check_scores(scores, indices, lambda: job.loader.test_batches(plan))
    table = all_gather_floats(list(scores.sum(dim=0)))
    *sums, weight, samples = (math.fsum(column) for column in zip(*table, strict=True))
    names = job.model.score_names
    if weight == 0:
        raise MotleyError(
            f"the {int(samples):,} held-out samples weigh 0 in all, and have no mean; weights() of "
            f"{type(job.model.task).__name__} gives a number above 0 for a sample that counts"
        )
    means = {name: total / weight for name, total in zip(names, sums, strict=True)}
    return dict(job.model.task.summary(means)), int(samples)

"""Evaluation of each held-out sample once, divided among all ranks.

Metrics are computed from sums over all samples, or from results of all samples that rank 0 gathers.
Metrics therefore do not depend on the number of ranks or on the ranks' shares of the samples.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motley.comm.collectives import all_gather_floats, all_gather_object, broadcast_object
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.world import World
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.records.classes import write_classes, write_worst
from motley.records.training import EMA, EpochRecord
from motley.tasks.model import Gathered, GatheredRows, compute_metrics
from motley.tasks.task import Task
from motley.tasks.worst import WorstSamples, merge
from motley.train.agreement import check_scores, readable
from motley.train.setup import Job


def evaluate(world: World, job: Job, plan: Plan, position: TrainState) -> EpochRecord:
    """Evaluate the held-out samples on all ranks, and return the task's metrics.

    The plan divides the samples among the ranks. If the engine keeps an average of the parameters,
    the average is evaluated too, and its metrics are named ``ema_...``. The name of an additional
    held-out set is a prefix of its metrics, as in ``night/loss``.
    """
    start = time.monotonic()
    world.supervisor.set_status(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    job.engine.sync_parameters()
    average = job.engine.average is not None
    further = [*job.model.task.held_out_sets()]
    parts = ["", *further]
    metrics, counts = dict[str, float](), dict[str, int]()

    def add(part: str, prefix: str, then: TrainState | None) -> None:
        found, counts[part] = _evaluate_set(world, job, plan, part, then)
        begins = f"{prefix}{part}/" if part else prefix
        metrics.update({f"{begins}{name}": value for name, value in found.items()})

    pairs, worst = list[Tensor](), WorstSamples(job.config.worst)
    for part in parts:
        job.model.worst = None if part else worst
        add(part, "", None if average or part != parts[-1] else position)
        pairs = pairs if part else job.model.class_pairs
    job.model.worst = None
    if average:
        with job.engine.averaged():
            for part in parts:
                add(part, EMA, position if part == parts[-1] else None)
    job.model.class_pairs, job.model.worst = pairs, worst
    return EpochRecord(
        step=position.step, epoch=max(0, position.epoch - (position.consumed == 0)),
        metrics=metrics, samples=counts[""], seconds=time.monotonic() - start, time=time.time(),
        sets={name: counts[name] for name in further},
    )  # fmt: skip


def _evaluate_set(
    world: World, job: Job, plan: Plan, part: str, then: TrainState | None
) -> tuple[dict[str, float], int]:
    """Return the metrics of a held-out set, and the number of its samples.

    A mean is the sum over all ranks divided by the total weight, never a mean of the ranks' means.

    Args:
        world: the ranks.
        job: the objects of the training.
        plan: division of the samples among the ranks.
        part: name of an additional held-out set; empty: the task's usual held-out data.
        then: position at which training continues. The loader reads the first samples from this
            position while the device still evaluates. None: read no samples in advance.
    """
    parts, indices = list[Tensor](), list[tuple[int, ...]]()
    model, task = job.model, job.model.task
    model.class_pairs, model.gathered = [], []
    say = world.supervisor.set_status
    say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    if then and job.length.ended(then):
        then = None
    after = (then.epoch, then.consumed) if then else None
    for batch in job.loader.test_batches(plan, after, part):
        parts.append(job.engine.evaluate(batch))
        indices.append(readable(batch, job.config, job.run))
        say(Phase.EVALUATE, PROGRESS_TIMEOUT_S)
    say(Phase.ALL_REDUCE, PROGRESS_TIMEOUT_S)
    scores = torch.stack(parts)
    check_scores(scores, indices, lambda: job.loader.test_batches(plan, part=part))
    table = all_gather_floats([*scores.sum(dim=0), len(model.gathered)])
    *sums, weight, samples, _ = (math.fsum(column) for column in zip(*table, strict=True))
    if weight == 0:
        raise MotleyError(
            f"the weights of the {int(samples):,} held-out samples are all 0, so a mean over them "
            f"has no value; let weights() of {type(task).__name__} return a number above 0 for a "
            "sample that counts"
        )
    means = {
        name: total / weight for name, total in zip(model.score_names, sums, strict=True)
    }  # fmt: skip
    metrics = dict(task.summary(means))
    if task.gathered:
        received = list[GatheredRows]()
        for turn in range(int(max(row[-1] for row in table))):
            received += _gather_turn(model.gathered, turn)
            say(Phase.ALL_REDUCE, PROGRESS_TIMEOUT_S)
        model.gathered = []
        metrics |= _compute_on_first(task, received, job.engine.device)
    return metrics, int(samples)


def _gather_turn(own: Sequence[GatheredRows], turn: int) -> list[GatheredRows]:
    """Gather the rows of one batch of each rank on rank 0. All ranks call this function.

    Gathering one batch at a time limits the memory that the messages need.

    Args:
        own: the rows of this rank's batches.
        turn: index of the batch to gather.
    """
    result: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own[turn] if turn < len(own) else None, result)
    return [each for each in result or () if each is not None]


def order_rows(parts: Sequence[GatheredRows]) -> Gathered:
    """Return the gathered rows of all batches, in the order of the samples."""
    indices = [index for batch, _ in parts for index in batch]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    result = dict[str, Any]()
    for name in parts[0][1] if parts else ():
        values = [rows[name] for _, rows in parts]
        is_tensor = all(isinstance(each, Tensor) for each in values)
        if is_tensor and len({each.shape[1:] for each in values}) == 1:
            result[name] = torch.cat(values)[order]
        else:
            rows = [row for each in values for row in each]
            result[name] = [rows[at] for at in order]
    return result


def _compute_on_first(
    task: Task, parts: Sequence[GatheredRows], device: torch.device
) -> dict[str, float]:
    """Return the metrics that rank 0 computes from gathered rows. All ranks call it."""
    outcome: dict[str, float] | str = ""
    cause: MotleyError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = compute_metrics(task, order_rows(parts))
        except MotleyError as error:
            outcome, cause = str(error), error
    known: dict[str, float] | str = broadcast_object(outcome, device)
    if isinstance(known, str):
        raise cause or MotleyError(known)
    return known


def write_last_evaluation(job: Job) -> None:
    """Write the class counts and the worst samples of the last evaluation, on rank 0.

    The class counts are the numbers of correct and wrong predictions of each class. The worst
    samples are those with the largest loss. All ranks call this function. Nothing is written if an
    earlier launch made the last evaluation.
    """
    own_worst = [] if job.model.worst is None else job.model.worst.describe(job.model.task)
    worst = merge(all_gather_object(own_worst), job.config.worst)
    if worst and dist.get_rank() == 0:
        write_worst(job.run.folder, worst)
    own = Counter[tuple[int, int]]()
    if job.model.class_pairs:
        pairs = torch.cat(job.model.class_pairs, dim=1).T.tolist()
        own.update((label, predicted) for label, predicted in pairs)
    total = sum(all_gather_object(own), Counter[tuple[int, int]]())
    if total and dist.get_rank() == 0:
        write_classes(job.run.folder, total, job.model.task.class_names)

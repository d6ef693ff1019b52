"""Handles unreadable samples, losses that are no numbers, memory that ends, and new splits."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.run import Run
from motley.comm.collectives import all_gather_object
from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.protocol import StepResult
from motley.errors import DeviceError, MotleyError, NoMemoryError, NotFiniteError
from motley.plan.length import TrainState
from motley.plan.plan import Plan
from motley.plan.replan import Proposal
from motley.text import step_in_words
from motley.train.loss_scale import find_overflow
from motley.train.recorder import Recorder
from motley.train.setup import Job

_SHOWN = 8  # samples in a message


def readable(batch: Batch, config: Config, run: Run) -> tuple[int, ...]:
    """The batch's sample indices, once what cannot be read is dealt with."""
    for name in batch.unreadable:
        if config.bad_samples == "fail":
            raise MotleyError(
                f"cannot read {name}; repair or remove it, or go on without such samples by "
                "--bad-samples skip"
            )
        run.event("unreadable", sample=name)
    return batch.indices


def check_finite(
    loss_sum: float, sample_loss: Tensor, indices: list[int], batches: Callable[[], Iterable[Batch]]
) -> None:
    """Stop where a loss is not finite; ranks whose losses are fine leave the word to others.

    Args:
        batches: this rank's, read again.
    """
    if math.isfinite(loss_sum):
        return
    bad = [index for index, loss in zip(indices, sample_loss.tolist(), strict=True)
           if not math.isfinite(loss)]  # fmt: skip
    if bad:
        why = bad_data(batches(), set(bad))
        raise NotFiniteError(
            f"the loss of {len(bad)} of this rank's {len(indices)} samples is not finite (sample "
            f"indices {_shown(bad)}){why and f': {why}'}; "
            + ("repair or remove it" if why else "lower --lr, or set --clip-grad 1.0")
            + ", and --resume auto"
        )


def check_scores(
    scores: Tensor, indices: Sequence[tuple[int, ...]], batches: Callable[[], Iterable[Batch]]
) -> None:
    """Stop where held-out data is not finite: then no evaluation ever is.

    Args:
        scores: of each of this rank's batches, [batches, any]. indices: of their samples.
        batches: these, read again.
    """
    fine = scores.isfinite().all(dim=1).tolist()
    bad = {index for known, part in zip(fine, indices, strict=True) if not known for index in part}
    if bad and (why := bad_data(batches(), bad)):
        raise NotFiniteError(
            f"scores of held-out samples are not finite: {why}; repair or remove it, and "
            "--resume auto"
        )


def bad_data(batches: Iterable[Batch], bad: set[int]) -> str:
    """What of samples without a finite loss is not finite before anything is computed; or empty.

    A tensor that is so of other samples too, as a mask may be, is no cause.
    """
    found: dict[str, list[int]] = {}
    for batch in batches:
        for name, values in batch.data.items():
            if values.is_floating_point():
                rows = (~values.isfinite()).reshape(len(batch), -1).any(dim=1).nonzero()
                found.setdefault(name, []).extend(batch.indices[row] for row in rows)
    return "; ".join(
        f"neither is {name!r} in the data of {_shown(indices)}"
        for name, indices in found.items() if indices and bad.issuperset(indices)
    )  # fmt: skip


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")


def check_numbers(
    job: Job, plan: Plan, state: TrainState, result: StepResult, indices: list[int]
) -> None:
    """Stop where a loss is not finite, or a gradient at any loss scale.

    Args:
        plan: of a full batch. state: before the step. indices: of this rank's samples.
    """
    known = result.losses.sum().item() if result.loss_sum is None else result.loss_sum

    def batches() -> Iterator[Batch]:
        _, again = next(iter(job.loader.steps(state.epoch, state.consumed, plan)))
        return (batch for batch, _ in again)

    check_finite(known, result.losses, indices, batches)
    if math.isfinite(known) and result.overflow and not job.engine.scale.may_clear:
        job.engine.on_same()  # nobody stepped
        error = explain_overflow(job, plan, state, result)
        if dist.get_rank() == (*result.unsound, 0)[0]:
            raise error
        dist.barrier()  # the word is that rank's, and it ends the job


def explain_overflow(job: Job, plan: Plan, position: TrainState, result: StepResult) -> MotleyError:
    """What to say where skipping steps can help no more: which layer overflows, on which samples.

    All ranks compute the step again, and say the same; not where nobody can do it alone.
    """
    found = f"the gradient is not finite at the loss scale {result.loss_scale:g}, though the losses"
    advice = "lower --lr, set --clip-grad 1.0, or give fp16 ranks another --precision"
    if not job.engine.replicated:
        return NotFiniteError(f"{found} are; {advice}")
    part, micro_batches = next(iter(job.loader.steps(position.epoch, position.consumed, plan)))
    usual_weight = part.global_batch * job.model.task.weight
    factor = result.loss_scale * job.engine.loss_weight / usual_weight
    try:
        batches = [batch for batch, _ in micro_batches]
        own = find_overflow(job.model, batches, factor)
        words = str(own) if own else ""
    except (RuntimeError, MemoryError) as error:  # the others wait for this rank's word
        words = f"could not compute the step again ({error})"
    where = "; ".join(
        f"rank {worker.rank} on {worker.host} ({worker.precision}): {words}"
        for worker, words in zip(job.workers, all_gather_object(words), strict=True) if words
    )  # fmt: skip
    if result.unsound and not where:
        host = job.workers[result.unsound[0]].host
        return DeviceError(
            "this rank's gradient was not finite before it was added up, though its losses are, "
            "and computed once more it is: its device or memory may be faulty; continue with "
            f"--resume auto, without {host} in hosts.txt if it happens again"
        )
    return NotFiniteError(
        f"{found} are: {where or 'no rank alone overflows, their sum does'}; {advice}"
    )


def rebalance(plan: Plan, proposal: Proposal, recorder: Recorder, position: TrainState) -> Plan:
    """Return the plan with the proposed shares, and record what changed and why."""
    changed = dataclasses.replace(plan, shares=proposal.counts)
    if proposal.taken_back:
        expected, measured = proposal.taken_back
        saved = f"saved {measured:.0%}" if measured >= 0.005 else "saved nothing"
        why = f"those were to save {expected:.0%} of a step's compute, and {saved}"
    else:
        slow = ", ".join(f"{factor:.2f}" for factor in proposal.slowdown)
        why = (
            f"against their measured speed they need {slow} of the time, and this saves "
            f"{proposal.gain:.0%} of a step's compute"
        )
    recorder.note(
        "replan",
        f"the ranks now take {' + '.join(map(str, changed.counts))} samples (before: "
        f"{' + '.join(map(str, plan.counts))}): {why}",
        step=position.step, counts=changed.counts, before=plan.counts,
        slowdown=proposal.slowdown, gain=proposal.gain, taken_back=proposal.taken_back,
    )  # fmt: skip
    return changed


def shrink_micro_batches(
    plan: Plan, job: Job, result: StepResult, recorder: Recorder, step: int
) -> Plan:
    """The same shares in smaller micro-batches where memory had ended; says who holds it.

    Args:
        plan: of the batch in which it did, as far as that is known; it may be the ragged last of
            an epoch.
    """
    short = result.oom_ranks
    names = {rank: f"rank {job.workers[rank].rank} on {job.workers[rank].host}" for rank in short}
    said = "; ".join(f"{names[rank]}: {words}" for rank, words in short.items())
    try:
        smaller = plan.halved(tuple(short))
    except ValueError:
        raise NoMemoryError(
            f"out of memory with the smallest micro-batches ({said}); wait until others leave, "
            "or take the host out of hosts.txt, and continue with --resume auto"
        ) from None
    at = step_in_words(step)
    before = {names[rank]: max(plan.micro_batches[rank]) for rank in short}
    after = {names[rank]: smaller.max_micro_batch[rank] for rank in short}
    recorder.note(
        "out_of_memory",
        (
            f"out of memory in {at}, which is done again with micro-batches of at most "
            if result.retry
            else f"out of memory before {at}; from here on micro-batches of at most "
        )
        + ", ".join(f"{after[name]} (before: {before[name]}) on {name}" for name in names.values())
        + f". {said}",
        step=step, before=before, after=after, found={names[rank]: short[rank] for rank in short},
    )  # fmt: skip
    return smaller

"""Faults after which training continues.

The faults are unreadable samples, losses that are not finite, exhausted memory, and ranks whose
state differs. The module also changes the split of a batch among the ranks.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from motley.checkpoint.run import Run
from motley.checkpoint.store import spread
from motley.comm.collectives import all_gather_object
from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.named_state import State
from motley.engines.protocol import Engine, Scope, StepResult
from motley.errors import DeviceError, MotleyError, NoMemoryError, NotFiniteError
from motley.plan.length import TrainState
from motley.plan.plan import Plan, Rank
from motley.plan.replan import Proposal
from motley.tasks.check import fingerprint
from motley.text import format_step, name_some
from motley.train.recorder import Recorder
from motley.train.scale_search import find_overflow
from motley.train.setup import Job

_TRIALS, _PROBED = 3, 20  # trials of a device's arithmetic, and steps in each


class Agreement:
    """The comparison of the state that all ranks replicate, and the repair of differences.

    Args:
        job: the objects of the training.
        recorder: the recorder of the run.
    """

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job, self._recorder = job, recorder
        self._back_at: int | None = None  # step of the checkpoint to which all ranks returned
        self._round = False  # True once devices are known to round differently

    def check(self, position: TrainState) -> TrainState:
        """Compare the replicated state of all ranks, and repair differences. All ranks call it.

        If the engine shards all state over the ranks, the method compares nothing.

        Returns:
            The position to continue from: ``position``, or that of a checkpoint.

        Raises:
            MotleyError: no majority of ranks has equal state, and there is no checkpoint.
        """
        job = self._job
        if not job.engine.replicated or len(job.workers) == 1:
            return position
        right, wrong = vote(digests(job.engine))
        if not wrong:
            return position
        if right is not None:
            self._take(right, wrong, position, "which more than half of the ranks have")
            return position
        job.checkpoints.wait()
        folders = all_gather_object(job.checkpoints.list_folders() or job.run.resume_from)[0]
        if folders and self._back_at is None and not self._round:
            return self._go_back(wrong, position, folders)
        if _unlike(job.workers):  # unlike devices may differ without a fault
            self._round = True
            self._take(0, wrong, position, "since devices of different kinds may round differently")
            return position
        faulty = unsound(all_gather_object(arithmetic(job.engine.device)))
        if faulty:
            cause = (
                f"the same arithmetic gives other numbers on {self._names(faulty)}, so that a "
                "device or its memory is faulty"
            )
            fix = "leave its host out with --hosts NAME,..., and "
        else:
            cause = (
                "the same arithmetic gives the same numbers on all ranks, so that something else "
                "changes these values"
            )
            fix = (
                "look in the task for values that depend on the rank, the time or the number of "
                "passes, such as a buffer that forward() changes in some steps, or leave a host "
                "out with --hosts NAME,...; then "
            )
        raise MotleyError(
            f"{self._difference(wrong)} after step {position.step}, "
            + ("as they did before all ranks went back to a checkpoint" if folders
               else "and there is no checkpoint to go back to")
            + f": {cause}; {fix}" + ("continue with --resume auto" if folders else "start anew")
        )  # fmt: skip

    def _difference(self, wrong: Sequence[int], right: int = 0) -> str:
        """Return a sentence that names the tensors in which some ranks differ. All ranks call it.

        Args:
            wrong: the ranks whose state differs.
            right: the rank whose state is compared with that of ``wrong``.
        """
        names = differing(all_gather_object(fingerprints(self._job.engine)), wrong, right)
        return (
            f"the parameters, buffers or optimizer state of {self._names(wrong)} differ from "
            f"those of {self._names([right])} in {name_some(names, 3)}"
        )

    def _names(self, ranks: Sequence[int]) -> str:
        workers = [self._job.workers[rank] for rank in ranks]
        return ", ".join(f"rank {worker.rank} on {worker.host}" for worker in workers)

    def _take(self, right: int, wrong: list[int], position: TrainState, why: str) -> None:
        """Broadcast the state of rank ``right`` to all ranks, and report the reason ``why``."""
        engine = self._job.engine
        difference = self._difference(wrong, right)
        state = engine.state(Scope.REPLICATED)
        result = all_gather_object((state.plain, engine.scale.state_dict()))[right]
        plain, scale = result
        taken = State(spread(state.tensors, engine.device, right), plain)
        engine.on_change()
        engine.load_state(Scope.REPLICATED, taken)
        engine.on_same()
        engine.scale.load_state_dict(scale)
        self._report(
            wrong, position,
            f"{difference}; all ranks now take the values of {self._names([right])}, {why}",
        )  # fmt: skip

    def _go_back(self, wrong: list[int], position: TrainState, folders: list[Path]) -> TrainState:
        job = self._job
        self._report(
            wrong, position,
            f"{self._difference(wrong)}, and no value is the same on more than half of the "
            "ranks; all ranks go back to the last checkpoint",
        )  # fmt: skip
        job.engine.on_change()
        back, notes = job.resume(folders)
        for note in notes:
            self._recorder.note("resume", note)
        self._back_at = back.step
        self._recorder.go_back(back.step)
        return back

    def saved(self, position: TrainState) -> None:
        """Record that all ranks had equal state at a new checkpoint.

        Args:
            position: position of the training at the checkpoint.
        """
        if self._back_at is not None and position.step > self._back_at:
            self._back_at = None

    def _report(self, wrong: list[int], position: TrainState, text: str) -> None:
        ranks = [self._job.workers[rank].rank for rank in wrong]
        self._recorder.note("drift", text, step=position.step, ranks=ranks)


def digests(engine: Engine) -> list[str]:
    """Return one hash per rank of the state that all ranks replicate. All ranks call it."""
    digest = hashlib.sha256()
    for name, text in fingerprints(engine).items():
        digest.update(f"{name} {text}".encode())
    return all_gather_object(digest.hexdigest())


def fingerprints(engine: Engine) -> dict[str, str]:
    """Return the hash of each tensor and value in this rank's replicated state, by name."""
    state = engine.state(Scope.REPLICATED)
    named = sorted(state.tensors.items())
    result = [fingerprint(tensor).to(engine.device) for _, tensor in named]
    numbers = torch.stack(result).tolist() if result else []
    hashes = {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {number}"
        for (name, tensor), number in zip(named, numbers, strict=True)
    }
    plain = {"the optimizer's numbers": state.plain, "the loss scale": engine.scale.state_dict()}
    return hashes | {name: json.dumps(value, sort_keys=True) for name, value in plain.items()}


def differing(told: Sequence[dict[str, str]], wrong: Sequence[int], right: int) -> list[str]:
    """Return the names of the values in which any rank of ``wrong`` differs from ``right``.

    Args:
        told: the :func:`fingerprints` of each rank.
        wrong: the ranks to compare.
        right: the rank with the reference values.
    """
    names = dict.fromkeys(name for rank in (right, *wrong) for name in told[rank])
    return [
        name for name in names
        if any(told[rank].get(name) != told[right].get(name) for rank in wrong)
    ]  # fmt: skip


def arithmetic(device: torch.device) -> list[int]:
    """Run the same optimizer steps several times on this device, and return a hash of each result.

    A sound device returns equal hashes, and all ranks run the same steps.
    """
    start = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(device)
    result = []
    for _ in range(_TRIALS):
        value, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for _ in range(_PROBED):
            slope = value * 3 - 1
            mean.lerp_(slope, 0.1)
            square.mul_(0.99).addcmul_(slope, slope, value=0.01)
            value.addcdiv_(mean, square.sqrt().add_(1e-8), value=-0.01)
        result.append(int(fingerprint(value)))
    return result


def unsound(told: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose device computed wrong results.

    The result has the ranks whose own results changed between trials. If no rank's results changed,
    the result has the ranks that differ from the most frequent result.

    Args:
        told: result of :func:`arithmetic` of each rank. All devices are of the same model.
    """
    shaky = [rank for rank, numbers in enumerate(told) if len(set(numbers)) > 1]
    most = Counter(numbers[0] for numbers in told).most_common(1)[0][0]
    return shaky or [rank for rank, numbers in enumerate(told) if numbers[0] != most]


def vote(digests: Sequence[str]) -> tuple[int | None, list[int]]:
    """Return the rank with the majority's state, and the ranks with another state.

    Without a majority, the first value is None, and the second value lists the ranks that differ
    from rank 0.

    Args:
        digests: hash of the state of each rank.
    """
    most, count = Counter(digests).most_common(1)[0]
    right = digests.index(most) if 2 * count > len(digests) else None
    reference = digests[right or 0]
    return right, [rank for rank, digest in enumerate(digests) if digest != reference]


def _unlike(workers: Sequence[Rank]) -> bool:
    """Return True if the devices differ in model. CPUs of two hosts count as different models."""
    kinds = {worker.device.partition(" ")[2] or f"{worker.device} {worker.host}"
             for worker in workers}  # fmt: skip
    return len(kinds) > 1


_SHOWN = 8  # samples in a message


def readable(batch: Batch, config: Config, run: Run) -> tuple[int, ...]:
    """Report the unreadable samples of a batch, and return the indices of the batch's samples.

    Raises:
        MotleyError: a sample is unreadable, and ``--bad-samples`` is ``fail``.
    """
    for name in batch.unreadable:
        if config.bad_samples == "fail":
            raise MotleyError(
                f"the sample {name} cannot be read; repair or remove it, or skip unreadable "
                "samples with --bad-samples skip"
            )
        run.event("unreadable", sample=name)
    return batch.indices


def check_finite(
    loss_sum: float, sample_loss: Tensor, indices: list[int], batches: Callable[[], Iterable[Batch]]
) -> None:
    """Raise NotFiniteError on the ranks whose losses are not finite.

    Args:
        loss_sum: sum of the losses of all ranks.
        sample_loss: loss of each of this rank's samples, [n].
        indices: indices of this rank's samples.
        batches: function that reads this rank's batches again.
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
            + ("repair or remove that data" if why else "lower --lr, or set --clip-grad 1.0")
            + ", and continue with --resume auto"
        )


def check_scores(
    scores: Tensor, indices: Sequence[tuple[int, ...]], batches: Callable[[], Iterable[Batch]]
) -> None:
    """Raise NotFiniteError if scores are not finite because of values in the held-out data.

    Every later evaluation would have these scores, too, because it reads the same data.

    Args:
        scores: scores of each of this rank's batches, [batches, ...].
        indices: indices of the samples in each batch.
        batches: function that reads these batches again.
    """
    fine = scores.isfinite().all(dim=1).tolist()
    bad = {index for known, part in zip(fine, indices, strict=True) if not known for index in part}
    if bad and (why := bad_data(batches(), bad)):
        raise NotFiniteError(
            f"scores of held-out samples are not finite: {why}; repair or remove that data, "
            "and continue with --resume auto"
        )


def bad_data(batches: Iterable[Batch], bad: set[int]) -> str:
    """Return a phrase that names the input tensors that caused non-finite losses.

    An input tensor explains the losses if it is not finite in some of the samples ``bad``, and
    finite in all other samples. A mask that has infinite values in other samples, too, is therefore
    not named. The phrase is empty if no input tensor explains the losses.

    Args:
        batches: the batches that contain the samples.
        bad: indices of the samples without a finite loss.
    """
    result: dict[str, list[int]] = {}
    for batch in batches:
        for name, values in batch.data.items():
            if values.is_floating_point():
                rows = (~values.isfinite()).reshape(len(batch), -1).any(dim=1).nonzero()
                result.setdefault(name, []).extend(batch.indices[row] for row in rows)
    return "; ".join(
        f"{name!r} is not finite either in the data of {_shown(indices)}"
        for name, indices in result.items() if indices and bad.issuperset(indices)
    )  # fmt: skip


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")


def check_numbers(
    job: Job, plan: Plan, state: TrainState, result: StepResult, indices: list[int]
) -> None:
    """Raise NotFiniteError if a loss is not finite, or if gradients overflow at every loss scale.

    Args:
        job: the objects of the training.
        plan: plan of a full batch.
        state: position before the step.
        result: outcome of the step.
        indices: indices of this rank's samples in the step.
    """
    known = result.losses.sum().item() if result.loss_sum is None else result.loss_sum

    def batches() -> Iterator[Batch]:
        _, again = next(iter(job.loader.steps(state.epoch, state.consumed, plan)))
        return (batch for batch, _ in again)

    check_finite(known, result.losses, indices, batches)
    if math.isfinite(known) and result.overflow and not job.engine.scale.may_clear:
        job.engine.on_same()  # no rank stepped
        error = explain_overflow(job, plan, state, result)
        if dist.get_rank() == (*result.unsound, 0)[0]:
            raise error
        dist.barrier()  # another rank raises the error, which ends the job


def explain_overflow(job: Job, plan: Plan, position: TrainState, result: StepResult) -> MotleyError:
    """Return an error that names the layer that overflows, and the samples.

    The caller uses this function if gradients overflow at a lower loss scale, too. All ranks
    compute the step again, and get the same error. If the engine shards the parameters, so that all
    ranks must compute each batch together, the error names no layer.

    Args:
        job: the objects of the training.
        plan: plan of a full batch.
        position: position before the step.
        result: outcome of the step.
    """
    scale = f"{result.loss_scale:g}"
    advice = "lower --lr, set --clip-grad 1.0, or give fp16 ranks another --precision"
    if not job.engine.replicated:
        return NotFiniteError(
            f"the gradient is not finite at the loss scale {scale}, though the losses are finite; "
            f"{advice}"
        )
    part, micro_batches = next(iter(job.loader.steps(position.epoch, position.consumed, plan)))
    usual_weight = part.global_batch * job.model.task.weight
    factor = result.loss_scale * job.engine.loss_weight / usual_weight
    try:
        batches = [batch for batch, _ in micro_batches]
        own = find_overflow(job.model, batches, factor)
        words = str(own) if own else ""
    except (RuntimeError, MemoryError) as error:  # the other ranks wait for this rank's answer
        words = f"could not compute the step again ({error})"
    where = "; ".join(
        f"rank {worker.rank} on {worker.host} ({worker.precision}): {words}"
        for worker, words in zip(job.workers, all_gather_object(words), strict=True) if words
    )  # fmt: skip
    if result.unsound and not where:
        host = job.workers[result.unsound[0]].host
        return DeviceError(
            "this rank's gradient was not finite before the all-reduce, though its losses were "
            "finite, and a second computation gives a finite gradient: the device or memory of "
            f"{host} may be faulty. Continue with --resume auto; if it happens again, remove "
            f"{host} from hosts.txt first"
        )
    return NotFiniteError(
        f"the gradient is not finite at the loss scale {scale}, though the losses are finite: "
        f"{where or 'no gradient of a single rank overflows, but their sum does'}; {advice}"
    )


def rebalance(plan: Plan, proposal: Proposal, recorder: Recorder, position: TrainState) -> Plan:
    """Return the plan with the proposed shares, and record the change and its reason."""
    changed = dataclasses.replace(plan, shares=proposal.counts)
    if proposal.taken_back:
        expected, measured = proposal.taken_back
        saved = f"saved {measured:.0%}" if measured >= 0.005 else "saved nothing"
        why = f"the last change was to save {expected:.0%} of a step's compute, and {saved}"
    else:
        slow = ", ".join(f"{factor:.2f}" for factor in proposal.slowdown)
        why = (
            f"the ranks need {slow} times the time that their measured speeds predict, and this "
            f"change saves {proposal.gain:.0%} of a step's compute"
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
    """Return the plan with smaller micro-batches on the ranks whose memory ran out.

    The shares stay the same. A note to the user names the processes that hold the memory.

    Args:
        plan: plan of the step's batch, which may be the smaller last batch of an epoch.
        job: the objects of the training.
        result: outcome of the step.
        recorder: the recorder of the run.
        step: number of the step.

    Raises:
        NoMemoryError: the micro-batches cannot be smaller.
    """
    short = result.oom_ranks
    names = {rank: f"rank {job.workers[rank].rank} on {job.workers[rank].host}" for rank in short}
    text = "; ".join(f"{names[rank]}: {words}" for rank, words in short.items())
    try:
        smaller = plan.halved(tuple(short))
    except ValueError:
        raise NoMemoryError(
            f"out of memory even with the smallest micro-batches ({text}); wait until other "
            "processes free memory, or remove the host from hosts.txt, and continue with --resume "
            "auto"
        ) from None
    at = format_step(step)
    before = {names[rank]: max(plan.micro_batches[rank]) for rank in short}
    after = {names[rank]: smaller.max_micro_batch[rank] for rank in short}
    recorder.note(
        "out_of_memory",
        (
            f"out of memory in {at}, which is computed again with micro-batches of at most "
            if result.retry
            else (
                f"out of memory before {at}, so the following steps have micro-batches of at "
                "most "
            )
        )
        + ", ".join(f"{after[name]} (before: {before[name]}) on {name}" for name in names.values())
        + f". {text}",
        step=step, before=before, after=after, found={names[rank]: short[rank] for rank in short},
    )  # fmt: skip
    return smaller

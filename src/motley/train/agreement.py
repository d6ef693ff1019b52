"""Compares by hash what all ranks should hold alike, and repairs a rank that differs: from the
others if they are more than half, else from the last checkpoint."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from motley.checkpoint.transfer import spread
from motley.comm.collectives import all_gather_object
from motley.engines.named_state import State
from motley.engines.protocol import Engine
from motley.errors import MotleyError
from motley.measure.process_group import Worker
from motley.plan.length import TrainState
from motley.tasks.fingerprint import fingerprint
from motley.text import name_some
from motley.train.recorder import Recorder
from motley.train.setup import Job

_TRIALS, _PROBED = 3, 20  # of a device's arithmetic, and steps in each


class Agreement:
    """Watches over a run's ranks."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job, self._recorder = job, recorder
        self._back_at: int | None = None  # of the checkpoint that was gone back to
        self._round = False  # the devices round differently: going back has not helped

    def check(self, position: TrainState) -> TrainState:
        """Compare all that should be alike, and put right what is not; all ranks call it.

        Where each rank holds a part alone, there is nothing to compare.

        Returns:
            Where to go on: ``position``, or that of a checkpoint.

        Raises:
            MotleyError: nobody can say what is right.
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
        folders = all_gather_object(job.checkpoints.found() or job.run.resume_from)[0]
        if folders and self._back_at is None and not self._round:
            return self._go_back(wrong, position, folders)
        if _unlike(job.workers):  # and that is nobody's fault
            self._round = True
            self._take(0, wrong, position, "since unlike devices may round differently")
            return position
        faulty = unsound(all_gather_object(arithmetic(job.engine.device)))
        if faulty:
            cause = (
                f"the same arithmetic gave other numbers on {self._names(faulty)}, so that a "
                "device or its memory is faulty"
            )
            fix = "leave its host out with --hosts NAME,..., and "
        else:
            cause = (
                "the same arithmetic gave the same numbers on all of them, so that something else "
                "changes these values"
            )
            fix = (
                "look in the task for what depends on the rank, the time or the passes so far, as "
                "a buffer that forward() changes in some steps, or leave a host out with --hosts "
                "NAME,...; then "
            )
        raise MotleyError(
            f"{self._difference(wrong)} after step {position.step}, "
            + ("again, as before all went back to a checkpoint" if folders
               else "and there is no checkpoint to go back to")
            + f": {cause}; {fix}" + ("continue with --resume auto" if folders else "start anew")
        )  # fmt: skip

    def _difference(self, wrong: Sequence[int], right: int = 0) -> str:
        """Say which values of some ranks differ from another's; all ranks call it."""
        names = differing(all_gather_object(fingerprints(self._job.engine)), wrong, right)
        return (
            f"the parameters, buffers or optimizer of {self._names(wrong)} differ from "
            f"{self._names([right])}'s in {name_some(names, 3)}"
        )

    def _names(self, ranks: Sequence[int]) -> str:
        workers = [self._job.workers[rank] for rank in ranks]
        return ", ".join(f"rank {worker.rank} on {worker.host}" for worker in workers)

    def _take(self, right: int, wrong: list[int], position: TrainState, why: str) -> None:
        """Give one rank's to all."""
        engine = self._job.engine
        difference = self._difference(wrong, right)
        state = engine.alike()
        found = all_gather_object((state.plain, engine.scale.state_dict()))[right]
        plain, scale = found
        taken = State(spread(state.tensors, engine.device, right), plain)
        engine.on_change()
        engine.load_alike(taken)
        engine.on_same()
        engine.scale.load_state_dict(scale)
        self._tell(wrong, position, f"{difference}, {why}; all take these now")

    def _go_back(self, wrong: list[int], position: TrainState, folders: list[Path]) -> TrainState:
        job = self._job
        self._tell(
            wrong, position,
            f"{self._difference(wrong)}, and no value is that of more than half of the ranks; all "
            "go back to the last checkpoint",
        )  # fmt: skip
        job.engine.on_change()
        back, notes = job.resume(folders)
        for note in notes:
            self._recorder.note("resume", note)
        self._back_at = back.step
        self._recorder.go_back(back.step)
        return back

    def saved(self, position: TrainState) -> None:
        """Hear of a checkpoint that all agreed on."""
        if self._back_at is not None and position.step > self._back_at:
            self._back_at = None

    def _tell(self, wrong: list[int], position: TrainState, text: str) -> None:
        ranks = [self._job.workers[rank].rank for rank in wrong]
        self._recorder.note("drift", text, step=position.step, ranks=ranks)


def digests(engine: Engine) -> list[str]:
    """A hash of what each rank holds that all should hold alike; all ranks call it."""
    digest = hashlib.sha256()
    for name, said in fingerprints(engine).items():
        digest.update(f"{name} {said}".encode())
    return all_gather_object(digest.hexdigest())


def fingerprints(engine: Engine) -> dict[str, str]:
    """Return a hash by name of each value that all ranks should hold alike, as this rank has it."""
    state = engine.alike()
    named = sorted(state.tensors.items())
    found = [fingerprint(tensor).to(engine.device) for _, tensor in named]
    numbers = torch.stack(found).tolist() if found else []
    said = {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {number}"
        for (name, tensor), number in zip(named, numbers, strict=True)
    }
    plain = {"the optimizer's numbers": state.plain, "the loss scale": engine.scale.state_dict()}
    return said | {name: json.dumps(value, sort_keys=True) for name, value in plain.items()}


def differing(told: Sequence[dict[str, str]], wrong: Sequence[int], right: int) -> list[str]:
    """Return the names of the values that any rank of ``wrong`` has otherwise than ``right``.

    Args:
        told: the :func:`fingerprints` of each rank.
    """
    names = dict.fromkeys(name for rank in (right, *wrong) for name in told[rank])
    return [
        name for name in names
        if any(told[rank].get(name) != told[right].get(name) for rank in wrong)
    ]  # fmt: skip


def arithmetic(device: torch.device) -> list[int]:
    """Return what the same steps of an optimizer give on this device, a hash for each of some
    trials."""
    start = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for _ in range(_TRIALS):
        value, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for _ in range(_PROBED):
            slope = value * 3 - 1
            mean.lerp_(slope, 0.1)
            square.mul_(0.99).addcmul_(slope, slope, value=0.01)
            value.addcdiv_(mean, square.sqrt().add_(1e-8), value=-0.01)
        found.append(int(fingerprint(value)))
    return found


def unsound(told: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose device gave other numbers from trial to trial, or else than most.

    Args:
        told: the :func:`arithmetic` of each rank; their devices are of one kind.
    """
    shaky = [rank for rank, numbers in enumerate(told) if len(set(numbers)) > 1]
    most = Counter(numbers[0] for numbers in told).most_common(1)[0][0]
    return shaky or [rank for rank, numbers in enumerate(told) if numbers[0] != most]


def vote(digests: Sequence[str]) -> tuple[int | None, list[int]]:
    """The first rank that holds what more than half hold, None if there is no such; and the ranks
    that hold something else, or without a majority something else than the first."""
    most, count = Counter(digests).most_common(1)[0]
    right = digests.index(most) if 2 * count > len(digests) else None
    reference = digests[right or 0]
    return right, [rank for rank, digest in enumerate(digests) if digest != reference]


def _unlike(workers: Sequence[Worker]) -> bool:
    """Whether there are devices of several kinds; the processors of two hosts may well be."""
    kinds = {worker.device.partition(" ")[2] or f"{worker.device} {worker.host}"
             for worker in workers}  # fmt: skip
    return len(kinds) > 1

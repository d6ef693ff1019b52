"""The trial that decides if a model is compiled.

Each rank with a GPU times the model with and without torch.compile, at the micro-batch sizes that
the plan would use.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from motley.checkpoint.run import Run
from motley.checkpoint.store import parse_step
from motley.config.options import Config
from motley.faults import Phase
from motley.launch.world import World
from motley.measure.device import PASSES, time_micro_batch
from motley.measure.process_group import ProcessGroup
from motley.measure.profile import with_readers_of_compiled
from motley.measure.speed_cache import compile_file
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.plan.forecast import split_and_forecast
from motley.plan.plan import cut
from motley.plan.speeds import SpeedTable
from motley.plan.wire import AllReduceCost
from motley.tasks.model import TaskModel
from motley.tasks.net import get_kind

_FASTER = 0.02  # least gain for which a compiled model is worth its risks
_MOST_FASTER = 1.65  # times; 1.21 to 1.58 were measured (benchmarks/NOTES.md)
_KIND_LEAST_S = 1.0  # seconds that a kind of blocks takes to compile, with all caches warm
_KIND_S = 15.0  # the same without caches: a ViT's took 7 s, eight of Swin's 168 s
_BLOCK_S = 3.0  # a block of a model that is compiled as a whole: 40 of one took 121 s


@dataclass(frozen=True)
class Promise:
    """The gain that a rank expects from torch.compile: the gain of its last trial, or a default.

    Attributes:
        gain: fraction of the rank's compute time that compiling saves.
        cost_s: seconds that compiling and timing the model take.
        known: True if the values are from an earlier compilation of this model on this machine.
    """

    gain: float = 0.15
    cost_s: float = _KIND_S
    known: bool = False

    @classmethod
    def read(cls, path: Path) -> "Promise":
        """Return the expected gain that an earlier run has stored, or else the default."""
        try:
            content = json.loads(path.read_text())
            result = cls(float(content["gain"]), float(content["cost_s"]), known=True)
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return result if result.gain < 1 and 0 <= result.cost_s < math.inf else cls()

    def write(self, path: Path) -> None:
        """Write the expected gain to a file, for the next run."""
        path.write_text(json.dumps({"gain": self.gain, "cost_s": self.cost_s}))

    def costs_least(self, passes_s: float, kinds: int) -> float:
        """Return the least seconds that compiling and timing can take.

        If an earlier compilation measured the cost, that cost is returned. Otherwise the estimate
        assumes that the timed passes have the largest speed-up that compiling may give, and that
        each kind of block compiles with warm caches.

        Args:
            passes_s: sum of the seconds of one micro-batch of each timed size, without compiling.
            kinds: number of kinds of blocks. Blocks are of one kind if their modules and the shapes
                of their tensors are equal. The stages of a Swin therefore usually count as several
                kinds.
        """
        least_s = PASSES * passes_s / _MOST_FASTER + kinds * _KIND_LEAST_S
        return self.cost_s if self.known else least_s

    def costs(self, passes_s: float, kinds: int, blocks: int = 0) -> float:
        """Return the expected seconds of compiling and timing; the measured cost if known.

        Args:
            passes_s: as in :meth:`costs_least`.
            kinds: as in :meth:`costs_least`.
            blocks: number of blocks of a model that is compiled as a whole; 0: each block is
                compiled separately.
        """
        usual_s = PASSES * passes_s + (blocks * _BLOCK_S or kinds * _KIND_S)
        return self.cost_s if self.known else max(self.cost_s, usual_s)

    @property
    def saves_most(self) -> float:
        """Largest fraction of a rank's compute time that compiling may save."""
        return max(1 - 1 / _MOST_FASTER, self.gain if self.known else 0.0)


def can_compile(model: TaskModel) -> bool:
    """Return True if torch can compile the model on its device.

    On a GPU, Triton needs compute capability 7.0.
    """
    device = next(model.parameters()).device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def count_steps(config: Config, samples: int) -> int:
    """Return the number of steps of a whole run.

    Args:
        config: the options.
        samples: number of samples in the training set.
    """
    an_epoch = math.ceil(max(1, round(samples * config.data_fraction)) / config.batch_size)
    return min(config.epochs * an_epoch, config.max_steps or config.epochs * an_epoch)


def is_worth_it(counts: Sequence[int], promises: Sequence[Promise | None], run_s: float) -> bool:
    """Return True if compiling is expected to save more seconds of a run than it takes.

    Args:
        counts: samples of each rank in a step.
        promises: expected gain of each rank; None: the rank cannot compile.
        run_s: seconds of the run without compiling.
    """
    able = [each for each in promises if each is not None]
    if not able:
        return False
    # A step is split by speed, so what one rank saves is shared by all.
    saved = sum(n * each.gain for n, each in zip(counts, promises, strict=True) if each)
    return run_s * saved / sum(counts) > max(each.cost_s for each in able)


def why_not(promises: Sequence[Promise | None], least_s: float, rest_s: float) -> str:
    """Return the reason why compiling cannot save time; empty if it may save time.

    Args:
        promises: see :func:`is_worth_it`.
        least_s: least seconds that the trial takes.
        rest_s: seconds that the rest of the run takes without compiling.
    """
    most_s = rest_s * max((each.saves_most for each in promises if each), default=0.0)
    if most_s >= least_s:
        return ""
    return (
        f"the model is not compiled: compiling could save at most {most_s:,.0f} s of the "
        f"{rest_s:,.0f} s that are left, and a trial takes at least {least_s:,.0f} s; --compile "
        "on compiles it anyway"
    )


def compile_where_faster(
    world: World,
    run: Run | None,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
) -> tuple[tuple[SpeedTable, ...], tuple[str, ...]]:
    """Compile the models of ranks if this is faster; every launched rank calls this function.

    Args:
        world: the ranks.
        run: the run, which may be a continued one; None: nothing is trained.
        group: process group of the ranks.
        model: the model; None on a rank that does not train.
        config: the options.
        speeds: speed of each rank without compiling.
        wire: cost of an all-reduce.

    Returns:
        The speeds of all ranks, and notes for the user. The speed of a rank that uses a compiled
        model is the speed of that model.
    """
    tables, counts, forecast = split_and_forecast(config.batch_size, speeds, wire)
    own: _Own | None = None
    if model is not None and group.rank is not None:
        rank = group.rank
        sizes = _sizes(counts[rank], speeds[rank].grain, tables[rank].micro_batch)
        own = _Own.from_rank(model, run, compile_file(group, config), config, speeds[rank], sizes)
    received = [each for each in world.allgather(own) if each]
    wanted, text = _is_wanted(config.compile, received, counts, forecast.step_s)
    if not wanted:
        return tuple(speeds), (text,) if text else ()
    world.supervisor.set_status(Phase.MEASURE, PROGRESS_TIMEOUT_S, "compiling the model")
    result: tuple[SpeedTable, str] | None = None
    if model is not None and own is not None:
        result = speeds[rank], ""
        if own.promise is not None:
            is_equal = len(set(counts)) == 1  # a plan that need not change
            speed, text = _try(
                model, speeds[rank], sizes, own.file, config.compile == "on", is_equal
            )
            if speed.compiled:
                speed = with_readers_of_compiled(speed, model.task, config, group.device)
            result = speed, text
    all_found = [each for each in world.allgather(result) if each is not None]
    notes = [
        f"rank {worker.rank} on {worker.host}: {text}"
        for worker, (_, text) in zip(group.workers, all_found, strict=True) if text
    ]  # fmt: skip
    return tuple(table for table, _ in all_found), tuple(notes)


@dataclass(frozen=True)
class _Own:
    """The facts about compiling that a rank sends to the other ranks.

    Attributes:
        file: file in which the expected gain is stored.
        promise: expected gain; None: the rank cannot compile.
        least_s: least seconds of a trial on this rank; 0: the rank cannot compile.
        steps: steps of the whole run.
        done: steps that earlier launches of the run have done.
    """

    file: Path
    promise: Promise | None
    least_s: float
    steps: int
    done: int

    @classmethod
    def from_rank(
        cls,
        model: TaskModel,
        run: Run | None,
        file: Path,
        config: Config,
        speed: SpeedTable,
        sizes: set[int],
    ) -> "_Own":
        """Return the facts about compiling on this rank."""
        promise, least_s = None, 0.0
        if config.compile == "on" or can_compile(model):
            promise = Promise.read(file)
            blocks = model.task.blocks(model.net).values()
            kinds = max(1, len({get_kind(block) for block in blocks}))
            whole = len(blocks) if model.task.compiles_whole else 0
            passes_s = sum(speed.micro_s(size) for size in sizes)
            least_s = promise.costs_least(passes_s, kinds)
            promise = replace(promise, cost_s=max(promise.costs(passes_s, kinds, whole), least_s))
        begun = (parse_step(run.resume_from[0]) or 0) if run and run.resume_from else 0
        return cls(file, promise, least_s, count_steps(config, model.samples), begun)


def _is_wanted(
    asked: str, told: Sequence[_Own], counts: Sequence[int], step_s: float
) -> tuple[bool, str]:
    """Return True if the ranks should try to compile, and a note for the user if not.

    Args:
        asked: value of ``--compile``.
        told: the facts of all ranks.
        counts: samples of each rank in a step.
        step_s: seconds of a step without compiling.
    """
    promises = [each.promise for each in told]
    if not any(promises) or asked != "auto":
        return any(promises) and asked == "on", ""
    remaining = max(each.steps for each in told) - max(each.done for each in told)
    rest_s = max(0, remaining) * step_s
    if text := why_not(promises, max(each.least_s for each in told), rest_s):
        return False, text
    return is_worth_it(counts, promises, rest_s), ""


def _sizes(count: int, grain: int, most: int) -> set[int]:
    """Return the sizes of the micro-batches into which a share is cut, in samples.

    Args:
        count: samples of the rank in a step. If the number is 0, the result is ``{most}``.
        grain: number of samples that stay together.
        most: samples in the largest micro-batch.
    """
    return {grain * groups for groups in cut(count // grain, most // grain)} or {most}


def _try(
    model: TaskModel, speed: SpeedTable, sizes: set[int], kept: Path, anyway: bool, is_equal: bool
) -> tuple[SpeedTable, str]:
    """Compile a rank's model, time it, and keep the compiled model if it is faster.

    Args:
        model: the model.
        speed: speed of the plain model.
        sizes: sizes of micro-batches to time, in samples.
        kept: file in which to store the result of the trial.
        anyway: True: use the compiled model even if it is not faster.
        is_equal: True if the sizes will not change after the trial, so that the model is compiled
            for them alone.

    Returns:
        The speed of the model in use, and a note for the user; mostly empty.
    """
    start = time.perf_counter()
    model.compile_task(sizes if is_equal else ())
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            timed = {size: time_micro_batch(model, size)[0] for size in sorted(sizes)}
    except Exception as error:  # torch's own error, of a missing compiler, or of the model
        model.compute_plainly()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = " ".join(lines[:2])[:200]  # torch names the compiler, and in the next line why
        return speed, f"the model is not compiled, because compiling fails: {text}"
    finally:
        model.zero_grad(set_to_none=True)
    cost_s = time.perf_counter() - start
    largest = max(timed)
    gain = 1 - timed[largest] / speed.micro_s(largest)
    Promise(gain, cost_s).write(kept)
    if gain < _FASTER and not anyway:
        model.compute_plainly()
        return speed, ""
    return speed.compiled_as(timed), ""

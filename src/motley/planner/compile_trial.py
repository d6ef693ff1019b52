"""Whether a model is compiled: each GPU's rank times both ways at the sizes that it would use."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from motley.config.options import Config
from motley.faults import Phase
from motley.launch.watchdog import PROGRESS_TIMEOUT_S
from motley.launch.world import World
from motley.measure.device import time_micro_batch
from motley.plan.forecast import arrange
from motley.plan.plan import cut
from motley.plan.speed_table import SpeedTable
from motley.plan.wire import AllReduceCost
from motley.planner.process_group import ProcessGroup
from motley.planner.speed_cache import compile_file
from motley.tasks.model import TaskModel

_FASTER = 0.02  # by less a compiled model is not worth what else it may bring


@dataclass(frozen=True)
class Promise:
    """What a rank expects of compiling; remembered from when it last did, or usual.

    Attributes:
        gain: part of its time that it saves. cost_s: seconds that compiling takes.
    """

    gain: float = 0.15
    cost_s: float = 15.0

    @classmethod
    def read(cls, path: Path) -> "Promise":
        """As it was remembered; the usual one where nothing can be read."""
        try:
            content = json.loads(path.read_text())
            found = cls(float(content["gain"]), float(content["cost_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return found if found.gain < 1 and 0 <= found.cost_s < math.inf else cls()

    def write(self, path: Path) -> None:
        """Remember it."""
        path.write_text(json.dumps({"gain": self.gain, "cost_s": self.cost_s}))


def can_compile(model: TaskModel) -> bool:
    """Whether torch can compile it here at all: Triton needs compute capability 7.0."""
    device = next(model.parameters()).device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def steps_of(config: Config, samples: int) -> int:
    """Steps of a whole run."""
    an_epoch = math.ceil(max(1, round(samples * config.data_fraction)) / config.batch_size)
    return min(config.epochs * an_epoch, config.max_steps or config.epochs * an_epoch)


def is_worth_it(counts: Sequence[int], promises: Sequence[Promise | None], run_s: float) -> bool:
    """Whether compiling is expected to save more of a run than it takes. Pure.

    Args:
        counts: samples of each rank in a step. promises: of each; None: it cannot compile.
        run_s: seconds of the run without it.
    """
    able = [each for each in promises if each is not None]
    if not able:
        return False
    # A step is split by speed, so what one rank saves is shared by all.
    saved = sum(n * each.gain for n, each in zip(counts, promises, strict=True) if each)
    return run_s * saved / sum(counts) > max(each.cost_s for each in able)


def compile_where_faster(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    speeds: Sequence[SpeedTable],
    wire: AllReduceCost,
) -> tuple[tuple[SpeedTable, ...], tuple[str, ...]]:
    """The speeds of all ranks, of compiled models where these are faster, which they are from then
    on; and what is to be said. Every launched rank calls it.

    Args:
        model: None on a rank that is left out.
    """
    own = model is not None and group.rank is not None
    kept = compile_file(group, config) if own else None
    promise = None
    if model is not None and kept and (config.compile == "on" or can_compile(model)):
        promise = Promise.read(kept)
    steps = 0 if model is None else steps_of(config, model.samples)
    told = [each for each in world.allgather((promise, steps) if own else None) if each]
    promises, lengths = zip(*told, strict=True)
    tables, counts, forecast = arrange(config.batch_size, speeds, wire)
    wanted = config.compile == "on" or (
        config.compile == "auto" and is_worth_it(counts, promises, max(lengths) * forecast.step_s)
    )
    if not (wanted and any(promises)):
        return tuple(speeds), ()
    world.supervisor.set_status(Phase.MEASURE, PROGRESS_TIMEOUT_S, "compiling the model")
    found: tuple[SpeedTable, str] | None = None
    if model is not None and group.rank is not None and kept is not None:
        rank = group.rank
        found = speeds[rank], ""
        if promise is not None:
            grain, most = speeds[rank].grain, tables[rank].micro_batch
            sizes = {grain * n for n in cut(counts[rank] // grain, most // grain)} or {most}
            found = _try(model, speeds[rank], sizes, kept, config.compile == "on")
    all_found = [each for each in world.allgather(found) if each is not None]
    notes = [
        f"rank {worker.rank} on {worker.host}: {said}"
        for worker, (_, said) in zip(group.workers, all_found, strict=True) if said
    ]  # fmt: skip
    return tuple(table for table, _ in all_found), tuple(notes)


def _try(
    model: TaskModel, speed: SpeedTable, sizes: set[int], kept: Path, anyway: bool
) -> tuple[SpeedTable, str]:
    """A rank's speed, compiled if it is faster so, or ``anyway``; and what is to be said."""
    start = time.perf_counter()
    model.compile_task()
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            timed = {size: time_micro_batch(model, size)[0] for size in sorted(sizes)}
    except Exception as error:  # torch's own, of a compiler that is missing, or of the model
        model.compute_plainly()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = " ".join(lines[:2])[:200]  # torch names the compiler, and in the next line why
        return speed, f"the model is not compiled, for that fails: {said}"
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

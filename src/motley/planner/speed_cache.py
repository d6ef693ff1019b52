"""A rank's speed: measured, or remembered from an earlier run on the same device."""

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from motley.checkpoint.run import versions
from motley.config.option import Decides
from motley.config.options import Config
from motley.engines.optimizer import a_part, make_optimizer
from motley.engines.optimizer_trial import try_optimizer, try_types
from motley.launch.cache_folder import SPEED_FILES, cache_folder
from motley.measure.device import leaves_room, measure_speed, passes, time_micro_batch
from motley.plan.engine_traits import EngineTraits
from motley.plan.speed_table import SpeedTable
from motley.planner.process_group import ProcessGroup
from motley.tasks.find import task_of
from motley.tasks.model import TaskModel

_STEPPED = 2**25  # numbers whose optimizer step is timed, of a model that is not held whole
_CHANGED = 1.5  # a remembered speed is measured anew if the device is busier, or idler, by this
_LOOKS = 6  # passes at most; to measure anew takes many times as long
_FAR_SLOWER = 4.0  # with a small micro-batch: then a large one could take minutes
_LARGER = 8  # times, from one such to the next
_TELLS = 0.7  # of the best rate, at which a micro-batch tells what each sample takes


def speed_of(group: ProcessGroup, model: TaskModel, config: Config, shards: int) -> SpeedTable:
    """This rank's speed, remembered if the device still is as fast.

    Args:
        shards: of the optimizer, of which this rank has one.
    """
    path, key = _place(group, config, shards)
    if (speed := read_speed(path, key)) is not None:
        try:
            if _still_holds(group.device, model, speed):
                return speed
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        finally:
            model.zero_grad(set_to_none=True)

    own = -(-sum(each.numel() for each in model.every_parameter() if each.requires_grad) // shards)
    stepped = min(own, _STEPPED) if model.by_blocks else own

    def make() -> torch.optim.Optimizer:
        is_whole = shards == 1 and not model.by_blocks
        return make_optimizer(
            model.net if is_whole else a_part(stepped, config, group.device), config
        )

    # These say what is wrong with an optimizer that cannot be timed.
    try_optimizer(config, group.device)
    try_types(config, model.net, group.device)
    speed = measure_speed(model, make, config.batch_size)
    return speed if stepped == own else replace(speed, step_s=speed.step_s * own / stepped)


def _still_holds(device: torch.device, model: TaskModel, speed: SpeedTable) -> bool:
    """Whether the device is about as fast as remembered. What else starts beside this rank can
    disturb a look, which is a few milliseconds; so one of some is enough."""
    size, most = speed.sizes[0], speed.micro_batch
    if device.type == "cpu":  # on a GPU the largest tells whether there still is memory for it
        enough = _TELLS * speed.rate
        timed = zip(speed.sizes, speed.seconds, strict=True)
        most = min(most, next(n for n, seconds in timed if n / seconds >= enough))
    while size < most:
        if min(passes(model, size, 2)) >= _FAR_SLOWER * speed.micro_s(size):
            return False
        size *= _LARGER
    looks = (seconds / speed.micro_s(most) for seconds in passes(model, most, _LOOKS))
    return any(1 / _CHANGED < look < _CHANGED for look in looks)


def with_sizes(model: TaskModel, speed: SpeedTable, sizes: Sequence[int]) -> SpeedTable:
    """The speed with these sizes in its table, as far as they fit in memory."""
    for size in sorted(set(sizes) - set(speed.sizes)):
        try:
            seconds, peak = time_micro_batch(model, size)
            if leaves_room(model, peak, speed.rest_mib or 0.0):
                speed = speed.with_size(size, seconds, peak)
            else:
                speed = speed.at_most(size - 1)
        except torch.OutOfMemoryError:  # another user came
            speed = speed.at_most(size - 1)
        finally:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return speed


def remember(group: ProcessGroup, config: Config, traits: EngineTraits, speed: SpeedTable) -> None:
    """Keep this rank's speed, measured beside all of ``group``, for the next run; not that of its
    disk, which may have the samples in memory by then."""
    place = _place(group, config, traits.optimizer_shards(group.size))
    write_speed(*place, speed.computing())


def compile_file(group: ProcessGroup, config: Config) -> Path:
    """Where it is remembered what compiling the model brings; see motley.planner.compile_trial."""
    path, _ = _place(group, config, 1)
    return path.with_name(path.name.replace("speed-", "compile-"))


def _place(group: ProcessGroup, config: Config, shards: int) -> tuple[Path, dict[str, Any]]:
    """Where a rank's speed is remembered, and all that it depends on."""
    assert group.rank is not None
    own, task = group.workers[group.rank], task_of(config)
    here = sum(worker.host == own.host for worker in group.workers)
    key = {
        "device": own.device, "uuid": own.uuid, "precision": own.precision,
        "ranks": 1 if own.uuid else here, "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)), "versions": versions(), "shards": shards,
        "options": {**config.as_json(Decides.SPEED), **task.identity()},
        "task": hashlib.sha256(Path(inspect.getfile(type(task))).read_bytes()).hexdigest(),
    }  # fmt: skip
    return cache_folder() / SPEED_FILES.replace("*", digest_of(key)[:20]), key


def digest_of(content: object) -> str:
    """Of what JSON knows, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_speed(path: Path, key: Mapping[str, Any]) -> SpeedTable | None:
    """A remembered speed; None if there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            return None
        return SpeedTable.from_json(content["speed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_speed(path: Path, key: Mapping[str, Any], speed: SpeedTable) -> None:
    """Remember a speed, whole or not at all."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"key": key, "speed": speed.as_json()}))
    new.replace(path)

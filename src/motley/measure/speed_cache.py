"""Measured speeds of ranks, links and wire modes, stored on disk by an earlier run.

A stored speed is used only if the devices and hosts are the same as in the earlier run.

Stored speeds of links and wire modes are removed from the disk when they are read. A run stores
them again if its first steps take the predicted time (motley.train.recorder). If the steps take
another time, or the job ends earlier, the next start measures again.
"""

import contextlib
import hashlib
import inspect
import json
import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from motley.checkpoint.run import versions
from motley.cluster.account import SPEED_FILES, cache_folder
from motley.comm.modes import parse_wire
from motley.config.option import Decides
from motley.config.options import Config
from motley.engines.optimizer import a_part, make_optimizer, try_optimizer, try_types
from motley.errors import MotleyError
from motley.launch.world import World
from motley.measure.device import leaves_room, measure_speed, passes, time_micro_batch
from motley.measure.process_group import ProcessGroup, nccl_version
from motley.plan.speeds import Flow, SpeedTable
from motley.plan.wire import AllReduceCost, EngineTraits, FewerCost, WireMode
from motley.records.json_files import read_json, write_json
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel

_STEPPED = 2**25  # numbers whose optimizer step is timed, for a model that is not held whole
_CHANGED = 1.5  # factor: a stored speed is measured again if the device is slower or faster by it
_LOOKS = 6  # most passes of a check; to measure again takes many times as long
_FAR_SLOWER = 4.0  # factor for a small micro-batch, with which a large one could take minutes
_LARGER = 8  # factor from one small micro-batch to the next
_TELLS = 0.7  # part of the best rate from which a micro-batch shows the time per sample


def measure_own_speed(
    group: ProcessGroup, model: TaskModel, config: Config, shards: int
) -> SpeedTable:
    """Return this rank's stored speed if the device is still as fast; else measure the speed.

    Args:
        group: process group of the ranks.
        model: the model.
        config: the options.
        shards: number of shards of the optimizer state. This rank has one shard.
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

    # These raise a clear error for an optimizer that cannot be timed.
    try_optimizer(config, group.device)
    try_types(config, model.net, group.device)
    speed = measure_speed(model, make, config.batch_size)
    return speed if stepped == own else replace(speed, step_s=speed.step_s * own / stepped)


def _still_holds(device: torch.device, model: TaskModel, speed: SpeedTable) -> bool:
    """Return True if the device is about as fast as the stored speed.

    Each check takes a few milliseconds, and other processes may disturb it. One of several checks
    at the stored speed is therefore enough.
    """
    size, most = speed.sizes[0], speed.micro_batch
    if device.type == "cpu":  # on a GPU the largest size also shows if memory still suffices
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
    """Time further micro-batch sizes, and return the speed with these sizes.

    Sizes that do not fit in memory are left out.
    """
    for size in sorted(set(sizes) - set(speed.sizes)):
        try:
            seconds, peak = time_micro_batch(model, size)
            if leaves_room(model, peak, speed.rest_mib or 0.0):
                speed = speed.with_size(size, seconds, peak)
            else:
                speed = speed.at_most(size - 1)
        except torch.OutOfMemoryError:  # another user has taken memory
            speed = speed.at_most(size - 1)
        finally:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return speed


def remember(group: ProcessGroup, config: Config, traits: EngineTraits, speed: SpeedTable) -> None:
    """Store this rank's speed, measured while all ranks of ``group`` ran, for the next run.

    The time to read samples is not saved, because the disk's cache may have the samples in the next
    run.
    """
    place = _place(group, config, traits.optimizer_shards(group.size))
    write_speed(*place, speed.computing())


def compile_file(group: ProcessGroup, config: Config) -> Path:
    """Return the file for the results of compiling; see motley.measure.compile_trial."""
    path, _ = _place(group, config, 1)
    return path.with_name(path.name.replace("speed-", "compile-"))


def _place(group: ProcessGroup, config: Config, shards: int) -> tuple[Path, dict[str, Any]]:
    """Return the path of the file for a rank's speed, and the key of the speed.

    The key holds all facts on which the speed depends.
    """
    assert group.rank is not None
    own, task = group.workers[group.rank], get_task(config)
    here = sum(worker.host == own.host for worker in group.workers)
    key = {
        "device": own.device, "uuid": own.uuid, "precision": own.precision,
        "ranks": 1 if own.uuid else here, "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)), "versions": versions(), "shards": shards,
        "options": {**config.as_json(Decides.SPEED), **task.identity()},
        "task": hashlib.sha256(Path(inspect.getfile(type(task))).read_bytes()).hexdigest(),
    }  # fmt: skip
    return cache_folder() / SPEED_FILES.replace("*", compute_digest(key)[:20]), key


def compute_digest(content: object) -> str:
    """Return the hash of a JSON value. The order of keys does not change the hash."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_speed(path: Path, key: Mapping[str, Any]) -> SpeedTable | None:
    """Return the stored speed; None if the file has another key or cannot be read."""
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            return None
        return SpeedTable.from_json(content["speed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_speed(path: Path, key: Mapping[str, Any], speed: SpeedTable) -> None:
    """Write a speed to a file, completely or not at all."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"key": key, "speed": speed.as_json()}))
    new.replace(path)


_OLDEST_S = 24 * 3600.0  # a lab's cables and traffic may differ the next day
_MOST_BYTES = 1 << 24  # largest bytes of a file: a thousand machines with 16 links each take 2 MB
_OF_NETWORK = ("NCCL_", "GLOO_")  # prefixes of the user's variables that change communication


@dataclass(frozen=True)
class WireFigures:
    """The measured speeds of links and wire modes between hosts.

    Attributes:
        flows: measured flow, by the pair of sending and receiving machine; empty for a single
            machine.
        wires: ``latency_s`` and ``transfer_s`` of :class:`~motley.plan.wire.AllReduceCost`, by wire
            mode.
        measured: time of the oldest measurement, in seconds since 1970.
        steps_took: duration of the first steps of the run that measured the speeds, divided by
            their forecast. The ratio may differ from 1, since a forecast does not include other
            work of a machine.
        fewer: cost of the exact mode without the rank whose link is slow; None: not measured.
    """

    flows: Mapping[tuple[int, int], Flow] = field(default_factory=dict)
    wires: Mapping[WireMode, tuple[float, float]] = field(default_factory=dict)
    measured: float = field(default_factory=time.time)
    steps_took: float = 1.0
    fewer: FewerCost | None = None

    def with_wires(self, wires: Mapping[WireMode, AllReduceCost]) -> "WireFigures":
        """Return the speeds with the costs of these wire modes added, except local SGD."""
        result = {
            mode: (cost.latency_s, cost.transfer_s)
            for mode, cost in wires.items() if cost.sync_every == 1
        }  # fmt: skip
        return replace(self, wires={**self.wires, **result})

    def as_json(self) -> dict[str, Any]:
        """Return the speeds as JSON, for the file."""
        return {
            "measured": self.measured, "steps_took": self.steps_took,
            "flows": [[*pair, f.bytes_per_s, f.latency_s] for pair, f in self.flows.items()],
            "wires": {str(mode): list(costs) for mode, costs in self.wires.items()},
            "fewer": self.fewer and asdict(self.fewer),
        }  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any], machines: Sequence[int]) -> "WireFigures":
        """Return the speeds that :meth:`as_json` has encoded, for these machines.

        Raises:
            MotleyError, LookupError, TypeError, ValueError or AttributeError: the content is
                damaged, or belongs to other machines.
        """
        flows = {
            (sender, receiver): Flow(_number(rate, above=0.0), _number(latency_s))
            for sender, receiver, rate, latency_s in content["flows"]
        }
        known = set(machines)
        # Each machine has sent to another one, and received from one.
        for met in ({sender for sender, _ in flows}, {receiver for _, receiver in flows}):
            if met != (known if len(known) > 1 else set()):
                raise ValueError("other machines")
        wires = {}
        for text, (latency_s, transfer_s) in content["wires"].items():
            if (mode := parse_wire(text)) is None or str(mode) != text:
                raise ValueError(f"{text} is no wire mode")
            wires[mode] = _number(latency_s), _number(transfer_s)
        fewer = content["fewer"]
        if fewer is not None:
            if not set(fewer["ranks"]) < set(range(len(machines))):
                raise ValueError("other ranks")
            fewer = FewerCost(tuple(fewer["ranks"]), _number(fewer["transfer_s"]))
        steps_took = _number(content["steps_took"], above=0.0)
        return cls(flows, wires, _number(content["measured"]), steps_took, fewer)


def _number(value: object, above: float = -1.0) -> float:
    """Return ``value`` as a float; raise ValueError unless it is finite, >= 0 and > ``above``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    if not (math.isfinite(value) and value >= 0 and value > above):
        raise ValueError(f"{value!r} is out of range")
    return float(value)


@dataclass(frozen=True)
class WireCache:
    """The file with the measured speeds of one job's links and wire modes.

    The file is on the disk of the first rank that trains.

    Attributes:
        path: path of the file.
        key: all facts on which these speeds depend.
        machines: machine of each rank; see World.
    """

    path: Path
    key: Mapping[str, Any]
    machines: Sequence[int]

    def take(self) -> WireFigures | None:
        """Remove the stored speeds from the disk and return them; None if they are unusable.

        Usable speeds are recent and complete, and have the key of this job.
        """
        try:
            about = self.path.lstat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                return None
            content = read_json(self.path)
            self.path.unlink()
            if content["key"] != self.key:
                return None
            result = WireFigures.from_json(content["figures"], self.machines)
        except (MotleyError, OSError, LookupError, TypeError, ValueError, AttributeError):
            return None
        return result if 0 <= time.time() - result.measured <= _OLDEST_S else None

    def keep(self, figures: WireFigures) -> None:
        """Write the speeds to the file, completely or not at all."""
        with contextlib.suppress(OSError):  # a full disk: they are measured again
            write_json(self.path, {"key": self.key, "figures": figures.as_json()})


def wire_cache(
    world: World, group: ProcessGroup, model: TaskModel | None, asked: WireMode | None
) -> WireCache:
    """Return the file for the speeds of these hosts' links; every launched rank calls it.

    Args:
        world: the ranks.
        group: process group of the ranks.
        model: the model; None on a rank that is left out.
        asked: the wire mode that the user wants; None: auto.
    """
    shapes = model and [[list(p.shape), p.requires_grad] for p in model.every_parameter()]
    own = (
        world.network.address,
        world.network.interface,
        compute_digest(shapes) if shapes else None,
    )
    received = world.allgather(own)
    key = {
        "hosts": [[world.nodes[m].host, *received[m][:2]] for m in sorted(set(world.machines))],
        "machines": list(world.machines), "backend": group.backend,
        "workers": [[worker.rank, worker.device, worker.precision] for worker in group.workers],
        "parameters": received[group.workers[0].rank][2], "wire": str(asked or "auto"),
        "versions": versions(), "nccl": nccl_version(),
        "network": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_OF_NETWORK)},
    }  # fmt: skip
    return WireCache(cache_folder() / f"wire-{compute_digest(key)[:20]}.json", key, world.machines)


def recall(world: World, group: ProcessGroup, cache: WireCache) -> WireFigures | None:
    """Return the stored link speeds, equal on all ranks; every launched rank calls it."""
    own = cache.take() if group.rank == 0 else None
    return world.allgather(own)[group.workers[0].rank]


@dataclass(frozen=True)
class WireMemory:
    """The measured link speeds of a plan, which are stored once the first steps confirm them.

    Attributes:
        cache: the file in which to store the speeds.
        figures: the speeds.
        is_old: True if an earlier run has measured the speeds.
    """

    cache: WireCache
    figures: WireFigures
    is_old: bool

    def keep(self, steps_took: float) -> None:
        """Store the speeds on the disk of the first rank that trains.

        For the argument see :attr:`WireFigures.steps_took`.
        """
        self.cache.keep(replace(self.figures, steps_took=steps_took))

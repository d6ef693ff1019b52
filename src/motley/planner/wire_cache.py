"""What links carry and what wire modes cost: remembered from an earlier run of the same hosts.

What is read is taken off the disk, and a run puts it back once its first steps took what was
foretold (motley.train.first_steps). So figures that steps do not bear out, or with which a job
ends before it can tell, are measured anew at the next start.
"""

import contextlib
import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from motley.checkpoint.run import versions
from motley.comm.modes import parse_wire
from motley.errors import MotleyError
from motley.launch.cache_folder import cache_folder
from motley.launch.world import World
from motley.plan.links import Flow
from motley.plan.wire import AllReduceCost, FewerCost, WireMode
from motley.planner.process_group import ProcessGroup, nccl_version
from motley.planner.speed_cache import digest_of
from motley.records.json_files import read_json, write_json
from motley.tasks.model import TaskModel

_OLDEST_S = 24 * 3600.0  # a lab's cables and neighbours are others tomorrow
_MOST_BYTES = 1 << 24  # of a file: a thousand machines that each met 16 others are 2 MB
_OF_NETWORK = ("NCCL_", "GLOO_")  # variables of a user's that change what travels how


@dataclass(frozen=True)
class WireFigures:
    """What was measured between hosts.

    Attributes:
        flows: by the machines that send and receive; none where there is one machine.
        wires: by mode, latency_s and transfer_s of AllReduceCost.
        measured: when, seconds since the epoch; of the oldest of them.
        steps_took: what the first steps of the run that measured took, in forecasts made of them:
            what a machine does besides is in none.
        fewer: of AllReduceCost, in the exact mode.
    """

    flows: Mapping[tuple[int, int], Flow] = field(default_factory=dict)
    wires: Mapping[WireMode, tuple[float, float]] = field(default_factory=dict)
    measured: float = field(default_factory=time.time)
    steps_took: float = 1.0
    fewer: FewerCost | None = None

    def with_wires(self, wires: Mapping[WireMode, AllReduceCost]) -> "WireFigures":
        """The same with what these modes cost, but for those that follow from another."""
        found = {
            mode: (cost.latency_s, cost.transfer_s)
            for mode, cost in wires.items() if cost.sync_every == 1
        }  # fmt: skip
        return replace(self, wires={**self.wires, **found})

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "measured": self.measured, "steps_took": self.steps_took,
            "flows": [[*pair, f.bytes_per_s, f.latency_s] for pair, f in self.flows.items()],
            "wires": {str(mode): list(costs) for mode, costs in self.wires.items()},
            "fewer": self.fewer and asdict(self.fewer),
        }  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any], machines: Sequence[int]) -> "WireFigures":
        """Reads :meth:`as_json`, of these machines.

        Raises:
            MotleyError, LookupError, TypeError, ValueError or AttributeError: it is none.
        """
        flows = {
            (sender, receiver): Flow(_number(rate, above=0.0), _number(latency_s))
            for sender, receiver, rate, latency_s in content["flows"]
        }
        known = set(machines)
        # Each has met another, both ways.
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
    """A finite number from 0, or ``above`` another; ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    if not (math.isfinite(value) and value >= 0 and value > above):
        raise ValueError(f"{value!r} is out of range")
    return float(value)


@dataclass(frozen=True)
class WireCache:
    """The place of one job's figures, on the disk of the first rank that trains.

    Attributes:
        key: all that they depend on. machines: of the ranks, see World.
    """

    path: Path
    key: Mapping[str, Any]
    machines: Sequence[int]

    def take(self) -> WireFigures | None:
        """What is remembered, once; None if there is none that is young, whole and of this key."""
        try:
            about = self.path.lstat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                return None
            content = read_json(self.path)
            self.path.unlink()
            if content["key"] != self.key:
                return None
            found = WireFigures.from_json(content["figures"], self.machines)
        except (MotleyError, OSError, LookupError, TypeError, ValueError, AttributeError):
            return None
        return found if 0 <= time.time() - found.measured <= _OLDEST_S else None

    def keep(self, figures: WireFigures) -> None:
        """Remember figures, whole or not at all."""
        with contextlib.suppress(OSError):  # a full disk: they are measured again
            write_json(self.path, {"key": self.key, "figures": figures.as_json()})


def wire_cache(
    world: World, group: ProcessGroup, model: TaskModel | None, asked: WireMode | None
) -> WireCache:
    """Where the figures of these hosts are; every launched rank calls it.

    Args:
        model: None on a rank that is left out. asked: the wire mode that the user wants.
    """
    shapes = model and [[list(p.shape), p.requires_grad] for p in model.every_parameter()]
    own = (world.network.address, world.network.interface, digest_of(shapes) if shapes else None)
    told = world.allgather(own)
    key = {
        "hosts": [[world.nodes[m].host, *told[m][:2]] for m in sorted(set(world.machines))],
        "machines": list(world.machines), "backend": group.backend,
        "workers": [[worker.rank, worker.device, worker.precision] for worker in group.workers],
        "parameters": told[group.workers[0].rank][2], "wire": str(asked or "auto"),
        "versions": versions(), "nccl": nccl_version(),
        "network": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_OF_NETWORK)},
    }  # fmt: skip
    return WireCache(cache_folder() / f"wire-{digest_of(key)[:20]}.json", key, world.machines)


def recall(world: World, group: ProcessGroup, cache: WireCache) -> WireFigures | None:
    """What is remembered, the same on all launched ranks, which all call it."""
    own = cache.take() if group.rank == 0 else None
    return world.allgather(own)[group.workers[0].rank]


@dataclass(frozen=True)
class WireMemory:
    """The figures that a plan was made from, to be kept once steps have borne them out.

    Attributes:
        is_old: they are of an earlier run.
    """

    cache: WireCache
    figures: WireFigures
    is_old: bool

    def keep(self, steps_took: float) -> None:
        """On the first rank that trains; see WireFigures."""
        self.cache.keep(replace(self.figures, steps_took=steps_took))

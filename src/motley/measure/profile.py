"""The measurements from which a plan is made.

The measurements are the speeds at which ranks compute and read samples, the links between hosts,
and the cost of wire modes.
"""

import math
import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from motley.cluster.launcher import cores_per_rank
from motley.comm.modes import modes
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.loader import count_workers, ranks_here, samples_on
from motley.data.source import Key, Keyed, Samples
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.world import World
from motley.measure.link_speed import (
    TRIES,
    Traffic,
    compute_cost,
    known_links,
    measure_fewer,
    measure_links,
    measure_wire,
)
from motley.measure.process_group import ProcessGroup
from motley.measure.speed_cache import WireFigures, measure_own_speed
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.plan.forecast import split_and_forecast
from motley.plan.speeds import Links, SpeedTable
from motley.plan.wire import Addition, AllReduceCost, EngineTraits, FewerCost, WireMode
from motley.tasks.model import TaskModel

_SECONDS = 0.2  # seconds of reading
_BATCH = 8  # samples in a batch
_AHEAD = 2.0  # times the device's rate: a loader process reads a whole batch, and is late at times
_MOST = 16  # loader processes of a rank


def with_reading(
    speed: SpeedTable, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """Measure the time to read a sample, and return the rank's speed with this time.

    All ranks of a host call this function at the same time, as they read at the same time in
    training.

    Samples in memory are not timed, since reading them takes hardly any time.
    """
    samples = samples_on(samples, config, device)
    if not samples.needs_workers and not config.workers:
        return speed
    with _threads(torch.get_num_threads() if device.type == "cpu" and not config.workers else 1):
        one_s = time_reading(samples, config.seed)
    return _with_readers(speed, one_s, samples, config, device)


def with_readers_of_compiled(
    speed: SpeedTable, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """Return the speed of a rank with as many loader processes as its compiled model needs.

    Args:
        speed: speed of the compiled model, with the loader processes that the plain model needs.
        samples: the object that reads samples.
        config: the options.
        device: device of this rank.
    """
    if not speed.input_s:
        return speed
    one_s = speed.input_s * _at_once(speed.readers or 0, device)
    return _with_readers(speed, one_s, samples, config, device)


def _with_readers(
    speed: SpeedTable, one_s: float, samples: Samples, config: Config, device: torch.device
) -> SpeedTable:
    """Return a rank's speed with as many loader processes as it needs.

    Args:
        speed: speed of the rank.
        one_s: seconds that one process takes for a sample.
        samples: the object that reads samples.
        config: the options.
        device: device of this rank.
    """
    readers = math.ceil(_AHEAD * speed.rate * one_s)
    readers = count_workers(samples, config, device, min(_MOST, max(1, readers)))
    return replace(
        speed, input_s=one_s / _at_once(readers, device), readers=readers,
        reads_ahead=readers > 0 and _spare(device) >= 1,
    )  # fmt: skip


def _at_once(readers: int, device: torch.device) -> float:
    """Return the number of a rank's loader processes that can run at the same time."""
    if not readers:
        return 1.0
    spare = _spare(device)
    # A loader process without a core of its own takes time from the computation.
    return min(readers, spare) if spare >= 1 else cores_per_rank(ranks_here())


def _spare(device: torch.device) -> int:
    """Return the number of a rank's cores that neither compute nor feed the rank's GPU."""
    return cores_per_rank(ranks_here()) - (torch.get_num_threads() if device.type == "cpu" else 1)


def time_reading(samples: Samples, seed: int) -> float:
    """Return the seconds that one process takes to read a training sample.

    The samples are drawn from the whole set.

    Raises:
        MotleyError: no sample can be read.
    """
    keyed = Keyed(samples, training=True)
    chance = torch.Generator().manual_seed(seed + os.getpid())  # other samples on each rank

    def batch() -> None:
        chosen = torch.randint(len(keyed), (_BATCH,), generator=chance).tolist()
        keyed.batch(keyed.__getitems__([Key(index, index) for index in chosen]))

    batch()  # opens all files
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _SECONDS or not count:
        batch()
        count += _BATCH
    return spent / count


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let torch use ``number`` threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_WORTH_A_WORD = 0.05  # part of a step from which another wire than the exact one is measured
_TOGETHER_S = 600.0  # timeout of a measurement that all ranks do together
_SHOWN = 4  # links that do not work, in an error


@dataclass(frozen=True)
class Measured:
    """The measurements from which a plan is made.

    Attributes:
        speeds: speed of each rank, by rank in the group.
        wires: cost of the measured wire modes; EXACT is always among them.
        links: links between machines; None if there is only one machine.
        figures: measured links and wire modes, in the form that is stored for the next run; None:
            nothing was measured.
    """

    speeds: tuple[SpeedTable, ...]
    wires: Mapping[WireMode, AllReduceCost]
    links: Links | None = None
    figures: WireFigures | None = None


def measure_speeds(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits,
) -> tuple[SpeedTable, ...]:
    """Measure the speeds of all ranks at once, and return them; every launched rank calls it.

    Ranks that are left out have no model, and no speed in the result.
    """
    own = None
    world.supervisor.set_status(Phase.MEASURE, PROGRESS_TIMEOUT_S, "measuring its speed")
    if model is not None and group.rank is not None:
        own = measure_own_speed(group, model, config, traits.optimizer_shards(group.size))
        # All ranks of a host at once, as they do when they train.
        own = with_reading(own, model.task, config, group.device)
    result = [each for each in world.allgather(own) if each is not None]
    world.clock.lap("speeds")
    return equalise_speeds(group, result)


def measure_between(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    config: Config,
    traits: EngineTraits,
    asked: WireMode | None,
    speeds: tuple[SpeedTable, ...],
    traffic: Traffic | None,
    remembered: WireFigures | None = None,
) -> Measured:
    """Measure links and wire modes that no earlier run has stored; every launched rank calls it.

    Args:
        world: the ranks.
        group: process group of the ranks.
        model: the model; None on a rank that is left out.
        config: the options.
        traits: traits of the engine.
        asked: the wire mode that the user wants; None: auto.
        speeds: speed of each rank.
        traffic: see :func:`measure_links`.
        remembered: links and wire modes that an earlier run has stored; None: measure all.
    """
    world.supervisor.set_status(Phase.MEASURE, _TOGETHER_S, "measuring links")
    links = None
    if len(set(world.machines)) > 1:
        known = remembered and known_links(world, remembered.flows)
        links = known or _passing_links(world, traffic, again=remembered is None)
    world.clock.lap("links")
    figures = remembered or WireFigures(links.flows if links else {})
    wires = measure_wires(world, group, model, [EXACT], traits, remembered=figures)
    exact = split_and_forecast(config.batch_size, speeds, wires[EXACT])[2]
    part = exact.wire_s / exact.limit_s
    slow = _slow_rank(group.machines(world), links)
    others = _other_modes(group, asked, traits, part, slow)
    for taken in (True, False):  # modes for advice alone are measured less precisely
        some = [mode for mode in others if may_take(mode, asked, group.precisions) == taken]
        tries = TRIES if taken else 1
        wires = measure_wires(world, group, model, some, traits, wires, figures, tries)
    if slow is not None:
        figures = replace(figures, fewer=figures.fewer or _without(world, group, model, slow))
        wires = {
            mode: cost if mode.addition is Addition.BUCKETS  # these modes also compute
            else cost.among_fewer(figures.fewer, wires[EXACT])
            for mode, cost in wires.items()
        }  # fmt: skip
    world.clock.lap("wires")
    # A link in use by other programs was measured slower than it is, so nothing is remembered.
    lasts = group.size > 1 and not (links and links.in_use())
    return Measured(speeds, wires, links, figures.with_wires(wires) if lasts else None)


def _without(
    world: World, group: ProcessGroup, model: TaskModel | None, slow: int
) -> FewerCost | None:
    """Measure the exact all-reduce without the rank ``slow``; every launched rank calls it."""
    own = None
    if model is not None and group.rank is not None:
        name = group.workers[slow].host
        world.supervisor.set_status(Phase.MEASURE, _TOGETHER_S, f"measuring without {name}")
        parameters = [p for p in model.every_parameter() if p.requires_grad]
        own = measure_fewer(parameters, [rank for rank in range(group.size) if rank != slow])
    return next((each for each in world.allgather(own) if each is not None), None)


def _passing_links(world: World, traffic: Traffic | None, again: bool) -> Links:
    """Return all links. Raise MotleyError if messages do not pass some link.

    Args:
        world: the ranks.
        traffic: see :func:`measure_links`.
        again: True: if messages do not pass, measure once more before raising the error. False:
            raise the error at once, because stored links have already failed.
    """
    links = measure_links(world, traffic)
    if again and links.broken():
        links = measure_links(world)  # a host may have been busy for seconds
    if broken := links.broken():
        raise MotleyError(
            "some hosts cannot reach each other: "
            f"{'; '.join(broken[:_SHOWN])}{'; ...' if len(broken) > _SHOWN else ''}. Repair the "
            "network, or remove one of the two hosts from hosts.txt"
        )
    return links


def _other_modes(
    group: ProcessGroup, asked: WireMode | None, traits: EngineTraits, part: float, slow: int | None
) -> list[WireMode]:
    """Return the wire modes that the plan may use or advise, except the plain exact mode.

    Args:
        group: process group of the ranks.
        asked: the wire mode that the user wants; None: auto.
        traits: traits of the engine.
        part: seconds of the exact all-reduce, divided by the seconds of a step without
            communication.
        slow: the rank whose link is slow. Some modes send less over this link. None: no link is
            slow.
    """
    if group.size == 1:
        return []
    result = [] if asked is None else [asked]
    if part > _WORTH_A_WORD:
        for kind in modes().values():
            result += kind.offers(group.precisions, part)
    if slow is not None:
        result += [replace(m, slow_rank=slow) for m in result if m.addition is Addition.NUMBERS]
    return [
        mode for mode in dict.fromkeys(result)
        if mode != EXACT and traits.can(mode) and (mode.mixes_devices or not group.is_mixed)
    ]  # fmt: skip


def may_take(mode: WireMode, asked: WireMode | None, precisions: Collection[str]) -> bool:
    """Return True if a plan may use a wire mode without asking the user.

    A plan may use the mode that the user wants. If the user wants none, a plan may use a mode that
    costs no accuracy. Both forms of a mode are allowed, with and without less traffic over a slow
    link.

    Args:
        mode: the wire mode.
        asked: the wire mode that the user wants; None: auto.
        precisions: precisions of the ranks that would train.
    """
    if asked is None:
        return mode.is_free(precisions)
    return mode == asked or asked == replace(mode, slow_rank=None)


def measure_wires(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    wanted: Sequence[WireMode],
    traits: EngineTraits,
    known: Mapping[WireMode, AllReduceCost] | None = None,
    remembered: WireFigures | None = None,
    tries: int = TRIES,
) -> dict[WireMode, AllReduceCost]:
    """Measure the all-reduce of all gradients in some wire modes; every launched rank calls it.

    Args:
        world: the ranks.
        group: process group of the ranks.
        model: the model; None on a rank that is left out.
        wanted: modes to measure.
        traits: traits of the engine.
        known: costs of other modes, which become part of the result.
        remembered: links and wire modes that an earlier run has stored. These modes are not
            measured.
        tries: see :func:`measure_wire`.
    """
    old = remembered.wires if remembered else {}
    own: dict[WireMode, AllReduceCost] | None = None
    if model is not None and group.rank is not None:
        parameters = [p for p in model.every_parameter() if p.requires_grad]
        numbers = sum(p.numel() for p in parameters)
        frozen = sum(p.numel() for p in model.every_parameter()) / numbers - 1
        own = dict(known or {})
        for mode in dict.fromkeys(wanted):
            world.supervisor.set_status(Phase.MEASURE, _TOGETHER_S, f"measuring --wire {mode}")
            if group.size == 1:
                own[mode] = AllReduceCost(0.0, 0.0)
            else:
                result = mode.cost_from(own[EXACT]) if EXACT in own else None
                if result is None and mode in old:
                    result = compute_cost(parameters, mode, *old[mode])
                result = result or measure_wire(parameters, mode, tries)
                own[mode] = replace(result, frozen=frozen)
    wires = next(each for each in world.allgather(own) if each is not None)
    return {
        mode: traits.through(
            replace(wire, overlaps=can_overlap(world, group, mode, wire)),
            mode, group.precisions, wires.get(EXACT),
        )
        for mode, wire in wires.items()
    }  # fmt: skip


def can_overlap(world: World, group: ProcessGroup, mode: WireMode, wire: AllReduceCost) -> bool:
    """Return True if a backward pass can hide the all-reduce on these devices."""
    # For ranks on the cores of one machine, 8 buckets made a step a third longer than one bucket.
    apart = any(worker.uuid for worker in group.workers) or len(set(group.machines(world))) > 1
    return apart and not (wire.on_gpu and mode.waits_for_gpu)


def _slow_rank(machines: Sequence[int], links: Links | None) -> int | None:
    """Return the rank whose link is far slower than all other links, or None.

    Args:
        machines: machine of each rank, by number.
        links: measured links between the machines; None: not measured.
    """
    slow = None if links is None else links.slow_rank()
    ranks = [rank for rank, machine in enumerate(machines) if machine == slow]
    return ranks[0] if len(ranks) == 1 and len(machines) > 2 else None


def equalise_speeds(group: ProcessGroup, speeds: Sequence[SpeedTable]) -> tuple[SpeedTable, ...]:
    """Return the speeds, with their median for all CPU ranks of one machine.

    CPU ranks share the machine's cores. Noise must not give these ranks different shares.
    """
    groups: dict[str, list[SpeedTable]] = {}
    for worker, speed in zip(group.workers, speeds, strict=True):
        groups.setdefault(worker.host, []).append(speed)
    return tuple(
        speed if worker.uuid else _middle(groups[worker.host])
        for worker, speed in zip(group.workers, speeds, strict=True)
    )


def _middle(speeds: Sequence[SpeedTable]) -> SpeedTable:
    """Return the median of several speed tables, for the sizes that all tables have."""
    tables = [dict(zip(speed.sizes, speed.seconds, strict=True)) for speed in speeds]
    sizes = sorted(set(tables[0]).intersection(*tables[1:]))
    return SpeedTable(
        tuple(sizes),
        tuple(statistics.median(table[size] for table in tables) for size in sizes),
        statistics.median(speed.step_s for speed in speeds),
        grain=speeds[0].grain,
        compiled=speeds[0].compiled,
        input_s=statistics.median(speed.input_s for speed in speeds),
        reads_ahead=speeds[0].reads_ahead,
        readers=speeds[0].readers,
    )

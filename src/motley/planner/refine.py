"""Times what a split would use, and splits anew."""

from dataclasses import replace

from motley.comm.modes.numbers import EXACT
from motley.launch.world import World
from motley.measure.device import has_room
from motley.plan.forecast import arrange
from motley.plan.plan import cut
from motley.plan.speed_table import SpeedTable
from motley.plan.wire import AllReduceCost, WireMode
from motley.planner.process_group import ProcessGroup
from motley.planner.profile import Measured
from motley.planner.speed_cache import with_sizes
from motley.tasks.model import TaskModel

_ROUNDS = 4  # of timing and splitting, at most
_SHOWS = 0.02  # of a step: a wire that cannot be hidden


def refine(
    world: World,
    group: ProcessGroup,
    model: TaskModel | None,
    global_batch: int,
    measured: Measured,
    mode: WireMode = EXACT,
    most: int | None = None,
) -> Measured:
    """Time the micro-batches that the split would use, and split anew, some times over.

    A GPU computes in waves of tiles: one image more can cost a whole wave (8 % on a H200), and
    between powers of two a straight line does not show it. Where the wire takes a part of the
    step, a whole share in one micro-batch is timed too: the longer the last backward pass, the
    more of the wire it hides; and where each micro-step has its part of the wire, a share in as few
    as memory and ``most`` allow. Every launched rank calls it.

    Args:
        most: samples in a micro-batch of this rank; None: as many as fit in memory.
    """
    for _ in range(_ROUNDS):
        wire = measured.wires[mode]
        speeds, counts, predicted = arrange(global_batch, measured.speeds, wire)
        shows = wire.likes_long_batches and predicted.exposed_s > _SHOWS * predicted.step_s
        speed = None
        if model is not None and group.rank is not None:
            own, gpu = counts[group.rank], bool(group.workers[group.rank].uuid)
            speed, sizes = measured.speeds[group.rank], tuple[int, ...]()
            if gpu:
                grain, m = speed.grain, speeds[group.rank].micro_batch
                sizes = tuple(grain * groups for groups in cut(own // grain, m // grain))
            speed = with_sizes(model, speed, sizes)
            if shows:
                speed = _with_long(model, speed, own, most, wire)
        found = tuple(each for each in world.allgather(speed) if each is not None)
        if found == measured.speeds:
            break
        measured = replace(measured, speeds=found)
    return measured


def _with_long(
    model: TaskModel, speed: SpeedTable, own: int, most: int | None, wire: AllReduceCost
) -> SpeedTable:
    """The speed with the longest micro-batch in its table that a share may be cut into.

    Args:
        own: the share. most: samples that a micro-batch may have.
    """
    is_cpu = next(model.parameters()).device.type == "cpu"
    each_sends = wire.allreduces_per_micro_step > 0
    for size in _sizes_of_like_parts(own, speed.grain, min(own, most or own)):
        # A processor's time is on a straight line between the sizes that were timed.
        if size in speed.sizes or (is_cpu and size <= speed.sizes[-1]):
            return speed
        if has_room(model, speed, size) and (size == own or each_sends):
            speed = with_sizes(model, speed, (size,))
            if size in speed.sizes:
                break
        if is_cpu or not each_sends:  # nobody says what a processor's memory holds
            break
    return speed


def _sizes_of_like_parts(count: int, grain: int, limit: int) -> list[int]:
    """The larger micro-batch of each way to cut ``count`` samples into parts of like size, of
    ``limit`` samples at most; descending."""
    groups, most = count // grain, limit // grain
    parts = range(-(-groups // most), groups + 1) if most else ()
    return list(dict.fromkeys(grain * -(-groups // each) for each in parts))

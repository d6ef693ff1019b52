"""Times what a split would use, and splits anew."""

from dataclasses import replace

from motley.comm.modes.numbers import EXACT
from motley.launch.world import World
from motley.measure.device import has_room
from motley.plan.forecast import arrange
from motley.plan.plan import cut
from motley.plan.wire import WireMode
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
    more of the wire it hides. Every launched rank calls it.

    Args:
        most: samples in a micro-batch of this rank; None: as many as fit in memory.
    """
    for _ in range(_ROUNDS):
        wire = measured.wires[mode]
        speeds, counts, predicted = arrange(global_batch, measured.speeds, wire)
        shows = wire.likes_long_batches and predicted.exposed_s > _SHOWS * predicted.step_s
        speed = None
        if model is not None and group.rank is not None:
            speed, own = measured.speeds[group.rank], counts[group.rank]
            sizes: tuple[int, ...] = ()
            if group.workers[group.rank].uuid:
                grain, m = speed.grain, speeds[group.rank].micro_batch
                sizes = tuple(grain * groups for groups in cut(own // grain, m // grain))
            # A processor's time is on a straight line between the sizes that were timed.
            known = not sizes and own <= speed.sizes[-1]
            if shows and not known and own <= (most or own) and has_room(model, speed, own):
                sizes = (*sizes, own)
            speed = with_sizes(model, speed, sizes)
        found = tuple(each for each in world.allgather(speed) if each is not None)
        if found == measured.speeds:
            break
        measured = replace(measured, speeds=found)
    return measured

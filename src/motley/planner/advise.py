"""What a user may ask for that would be faster than what a plan takes."""

from collections.abc import Mapping
from dataclasses import replace

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.launch.world import World
from motley.plan.advice import Advice, better_modes, fewer_hosts, larger_batch
from motley.plan.engine_traits import EngineTraits
from motley.plan.forecast import Choice, Forecast, arrange, choose_machines
from motley.plan.wire import WireMode
from motley.planner.process_group import ProcessGroup
from motley.planner.profile import Measured, can_overlap


def faster(
    world: World,
    group: ProcessGroup,
    config: Config,
    measured: Measured,
    options: Mapping[WireMode, Choice],
    mode: WireMode,
) -> tuple[Advice, ...]:
    """Other modes, fewer hosts, larger batches.

    Args:
        group: those that could train. measured: of them.
        options: who should train, by mode. mode: the one that was chosen.
    """
    names, machines = [worker.host for worker in group.workers], group.machines(world)
    advice = better_modes(options, mode, names)
    job = config.batch_size, machines, measured.speeds
    ring = measured.wires.get(replace(mode, slow_rank=None), measured.wires[EXACT])
    if config.hosts != "auto":
        fewer = choose_machines(*job, ring, measured.links, world.machines[0])
        planned_s = options[mode].chosen.step_s
        advice += fewer_hosts(fewer, planned_s, names, machines, measured.links)
    if mode.slow_rank is None:
        advice += larger_batch(config.batch_size, names, *job[1:], ring, measured.links)
    return advice


def other_engines(
    world: World,
    group: ProcessGroup,
    global_batch: int,
    measured: Measured,
    mode: WireMode,
    traits: EngineTraits,
) -> dict[str, Forecast]:
    """The same through engines that send otherwise, by what a user writes to have them."""
    wire, exact = measured.wires[mode], measured.wires.get(EXACT)
    wire = replace(wire, overlaps=can_overlap(world, group, mode, wire))
    through = {
        name: other.through(wire, mode, group.precisions, exact)
        for name, other in traits.others.items() if other.can(mode)
    }  # fmt: skip
    return {name: arrange(global_batch, measured.speeds, sent)[2] for name, sent in through.items()}
